"""Element-wise parts of layers that torch.compile makes: the gradients of dense execution, and compiled once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from app.tree import PrefixTree, TreeEngine
from app.tree.model import elementwise, projections
from tests.app.tree import models, oracle
from tests.app.tree.attention.test_backends import SEQUENCES
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import assert_unchanged, snapshot, take_grads

LOSS = SequenceLoss("tanh_of_sums", [len(s) for s in SEQUENCES], 3, ("logprobs",))


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traced and differentiated as with inductor, whose code generation is torch's own affair."""
    monkeypatch.setattr(elementwise, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    elementwise._compiled.cache_clear()
    counters.clear()
    yield
    elementwise._compiled.cache_clear()


@pytest.fixture
def wider_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight gradients of bf16 models are summed in float32, as on a GPU."""
    monkeypatch.setattr(projections, "DEVICES", ("cpu",))
    monkeypatch.setattr(projections, "add_product", lambda total, left, right: total.add_(left.t() @ right))


def breaks() -> set[str]:
    """Why graphs ended, but for functions that are not to be compiled; one that ends before it began is counted with
    what cannot be traced."""
    found = {*counters["graph_break"], *counters["unimplemented"]}
    return {why for why in found if "torch.compiler.disable" not in why}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_parity_and_no_compilation_for_a_new_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weight gradients that are summed in place, as on a GPU."""
    monkeypatch.setattr(projections, "DEVICES", ("cpu",))
    model = models.make("starcoder2", torch.float64)
    _, expected = oracle.dense_backward(model, SEQUENCES, LOSS)
    take_grads(model)
    before, graphs = snapshot(model), []
    for chunk_tokens, live_tokens in ((1, 1), (6, 9), (8, 1000), (13, 30)):
        engine = TreeEngine(model, chunk_tokens, live_tokens, self_check=False, elementwise="compile")
        engine.backward(PrefixTree.build(SEQUENCES), LOSS)
        error, where = oracle.relative_error(take_grads(model), expected)
        assert error <= 1e-9, f"{error:.1e} in {where}"
        graphs.append(counters["stats"]["unique_graphs"])
    assert_unchanged(model, dict(before))
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert 0 < graphs[0] < graphs[1]  # of one token torch.compile always makes a graph of its own
    assert graphs[2:] == graphs[1:2] * 2
    deeper = models.make("starcoder2", torch.float64, num_hidden_layers=4)
    TreeEngine(deeper, 6, 9, self_check=False, elementwise="compile").backward(PrefixTree.build(SEQUENCES), LOSS)
    assert counters["stats"]["unique_graphs"] == graphs[1]  # layers share what is compiled


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("wider_sums")
@pytest.mark.slow
def test_weights_of_norms_whose_gradients_are_wider_are_compiled_with_them() -> None:
    """torch.compile breaks its graph at a parameter whose gradient has another dtype: bf16, summed in float32. These
    are complete layer by layer, not after all of them: sums over ranks begin when a bucket's last gradient is there."""
    model, order = models.make("qwen3", torch.bfloat16), list[str]()
    for name, parameter in model.named_parameters():
        if name.endswith((".post_attention_layernorm.weight", "embed_tokens.weight")):
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name.split(".")[-3]))
    before, found = snapshot(model), []
    for how in ("eager", "compile"):
        for one in ("eager", how):  # there are gradients as it is compiled: what was compiled before is not traced anew
            TreeEngine(model, 100, 100, self_check=False, elementwise=one).backward(PrefixTree.build(SEQUENCES), LOSS)
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        found.append(take_grads(model))
    assert order == ["1", "0", "model"] * 4
    assert counters["stats"]["unique_graphs"] and not breaks()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    with torch.inference_mode():  # as Lightning validates; it knows no order of autograd
        TreeEngine(model, 100, 100, elementwise="compile").forward(PrefixTree.build(SEQUENCES))
    assert_unchanged(model, dict(before))
    assert not any({"forward", "weight"} & module.__dict__.keys() for module in model.modules())


@pytest.mark.usefixtures("wider_sums")
def test_breaks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the other: norms alone, compiled without the copies."""
    monkeypatch.setattr(elementwise, "_copies", lambda parts: iter(()))
    parts = elementwise._parts
    monkeypatch.setattr(elementwise, "_parts", lambda *given: (p for p in parts(*given) if "Norm" in type(p).__name__))
    model = models.make("qwen3", torch.bfloat16)
    for how in ("eager", "compile"):
        TreeEngine(model, 100, 100, self_check=False, elementwise=how).backward(PrefixTree.build(SEQUENCES), LOSS)
    (why,) = breaks()
    assert "its gradient" in why


def test_names() -> None:
    model = models.make("qwen3")
    assert ", element-wise parts eager" in TreeEngine(model).chosen()
    assert ", element-wise parts compile" in TreeEngine(model, elementwise="compile").chosen()
    with pytest.raises(ValueError, match=r"elementwise must be one of \('eager', 'compile'\), got 'liger'"):
        TreeEngine(model, elementwise="liger")


def test_experts_and_states_stay_as_they_are() -> None:
    moe = models.make("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    kinds = {type(part).__name__ for part in elementwise._parts(moe, set())}
    assert kinds == {"Qwen3MoeAttention", "Qwen3MoeRMSNorm"}
    assert {type(part).__name__ for part in elementwise._parts(models.make("qwen3"), {0, 1})} == {
        "Qwen3MLP",
        "Qwen3RMSNorm",
    }
