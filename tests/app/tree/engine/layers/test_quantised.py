"""Adapters beside layers in 4 bit: what is computed is what a plain model with the same numbers computes, whatever ran
before, and the self-check sees what it sees elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING

from app.tree import PrefixTree, SelfCheckError, TreeEngine, elements, quantised_layers, scales, settle_quantised
from app.tree.memory import pass_memory
from app.tree.model.quantised import BYTES_EACH, quantised_bytes, whole_weight
from app.tree.model.shape import shape_of
from tests.app.tree import models, oracle
from tests.app.tree.cases import Case, cases
from tests.app.tree.engine import families
from tests.app.tree.engine.test_self_check import BROKEN, TREE
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import assert_backward, assert_forward, take_grads
from tests.helpers.selection import some

bnb = pytest.importorskip("bitsandbytes", reason="4 bit need bitsandbytes: pip install -e '.[qlora]'")
ROW = families.SUPPORTED["Qwen3"]
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def adapted(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return families.with_lora(ROW, families.quantised(ROW, dtype, **options))


@pytest.fixture(scope="module")
def shared() -> tuple[Any, nn.Module]:
    return adapted(), models.value_head(torch.float32)


@settings(max_examples=settings.default.max_examples // 3)  # half a second each
@given(case=cases())
def test_random_trees(shared: tuple[Any, nn.Module], case: Case) -> None:
    model, head = shared
    assert_forward(model.base_model.model, head, case, ("logprobs", "entropy", "values"), 1e-5)
    assert_backward(model.base_model.model, head, case, "plain_sum", ("logprobs",), 2e-6, False, floor=1.0)


def test_what_is_in_4_bit_and_what_is_not() -> None:
    for tied in (True, False):
        model = adapted(tie_word_embeddings=tied)
        inner = model.get_base_model()
        layers = quantised_layers(inner)
        assert len(layers) == 7 * len(inner.model.layers)
        assert type(inner.lm_head) is nn.Linear and type(inner.model.embed_tokens) is nn.Embedding
        assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
        plain = families.with_lora(ROW, families.build(ROW, tie_word_embeddings=tied))
        counts = [sum(elements(p) for p in one.parameters()) for one in (model, plain)]
        assert counts[0] == counts[1] == sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_changes_no_weight(dtype: torch.dtype) -> None:
    """Where a CPU has products in bfloat16, bitsandbytes would pack weights in evaluation mode and keep them so."""
    model = adapted(dtype, **WIDE)
    tree, loss = PrefixTree.build(families.SEQUENCES), SequenceLoss("plain_sum", families.LENGTHS, 0, ("logprobs",))
    engine = TreeEngine(model, 4, 8, self_check=False)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    engine.backward(tree, loss)
    first = take_grads(model)
    with torch.no_grad():
        model.eval()(torch.arange(9)[None])
        engine.forward(tree)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    engine.backward(tree, loss)
    for name, grad in take_grads(model).items():
        assert grad is None or torch.equal(grad, first[name]), name


class Kernels(TorchDispatchMode):
    """Names of bitsandbytes' kernels that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "bitsandbytes":
            self.seen.add(func._schema.name.removeprefix("bitsandbytes::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_pass_for_one_row_as_for_many(rows: int, training: bool) -> None:
    """A pass without gradient runs the same kernels, and leaves the layer as it was."""
    model = families.quantised(ROW, **WIDE)
    layer = next(iter(quantised_layers(model).values())).train(training)
    x = torch.randn(1, rows, layer.in_features)
    with Kernels() as kernels, torch.no_grad():
        bare = layer(x)
    without, kernels.seen = kernels.seen, set()
    x.requires_grad_()
    with kernels:
        out = layer(x)
    assert kernels.seen == without and "gemv_4bit" not in without
    torch.testing.assert_close(out, bare, rtol=0, atol=0)
    chosen = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, x, chosen)
    torch.testing.assert_close(gradient, chosen @ whole_weight(layer))
    torch.testing.assert_close(out, nn.functional.linear(x, whole_weight(layer), layer.bias))


def test_bfloat16_is_as_far_from_the_truth_as_dense() -> None:
    model = adapted(torch.bfloat16, **WIDE)
    plain = families.with_lora(ROW, families.whole(ROW, families.quantised(ROW, torch.bfloat16, **WIDE), **WIDE))
    plain.load_state_dict({n: p for n, p in model.named_parameters() if p.requires_grad}, strict=False)
    loss = SequenceLoss("plain_sum", families.LENGTHS, 0, ("logprobs",))
    _, truth = oracle.dense_backward(plain.float(), families.SEQUENCES, loss)
    _, dense = oracle.dense_backward(model, families.SEQUENCES, loss)
    TreeEngine(model, 4, 8, self_check=False).backward(PrefixTree.build(families.SEQUENCES), loss)
    ours = families.distance(take_grads(model), truth)
    assert ours < families.LOW_PRECISION * families.distance(dense, truth) and ours < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_check_passes_what_is_right(dtype: torch.dtype) -> None:
    report = TreeEngine(adapted(dtype)).verify(TREE)
    assert report is not None and report.passed, str(report)


@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], [torch.float32]))
@pytest.mark.parametrize("kind", BROKEN)
def test_the_self_check_catches_what_is_broken(kind: str, dtype: torch.dtype) -> None:
    inner = families.quantised(ROW, dtype)
    BROKEN[kind](inner)
    model = families.with_lora(ROW, inner)
    with pytest.raises(SelfCheckError, match="differ by more than rounding"):
        TreeEngine(model, self_check=True).backward(TREE, lambda out, i: out.logprobs.sum())


def test_the_self_check_looks_at_states_in_float32() -> None:
    family = families.SUPPORTED["Qwen3.5"]
    model = families.with_lora(family, families.quantised(family, torch.bfloat16))
    report = TreeEngine(model).verify(TREE)
    assert report is not None and report.passed and next(model.parameters()).dtype == torch.bfloat16


def test_a_layer_loads_what_it_saves() -> None:
    one, other = families.quantised(ROW), families.quantised(ROW, seed=1)
    assert one.load_state_dict(other.state_dict(), strict=True).missing_keys == []
    for mine, theirs in zip(quantised_layers(one).values(), quantised_layers(other).values(), strict=True):
        assert torch.equal(whole_weight(mine), whole_weight(theirs))
    assert [name for name, _ in scales(one)] == [name for name, _ in scales(other)]


def test_a_copy_is_apart() -> None:
    model = families.quantised(ROW)
    again, name = copy.deepcopy(model), next(iter(quantised_layers(model)))
    before = whole_weight(model.get_submodule(name))
    again.load_state_dict(families.quantised(ROW, seed=1).state_dict())
    assert torch.equal(whole_weight(model.get_submodule(name)), before)
    assert not torch.equal(whole_weight(again.get_submodule(name)), before)


def test_what_does_not_belong_together_is_not_loaded() -> None:
    model, state = families.quantised(ROW), families.quantised(ROW).state_dict()
    name = next(name for name in state if name.endswith("q_proj.weight"))
    bare = {key: t for key, t in state.items() if not key.startswith(f"{name}.")}
    with pytest.raises(RuntimeError, match=r"Missing key.*q_proj.weight.absmax"):
        model.load_state_dict(bare)
    cut = {**state, f"{name}.quant_state.bitsandbytes__nf4": torch.zeros(3, dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match="describe no weight in 4 bit"):
        model.load_state_dict(cut)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(families.build(ROW).state_dict())


def test_costs_are_those_of_the_model_it_stands_for() -> None:
    plain, model = families.build(ROW, **WIDE), families.quantised(ROW, **WIDE)
    assert shape_of(model) == shape_of(plain)
    tree = PrefixTree.build(families.SEQUENCES)
    whole, less = (pass_memory(one, 8, 16, tree) for one in (plain, model))
    assert less.live_activations == whole.live_activations and less.path_cache == whole.path_cache
    assert less.gathered == 4 * 64 * 96  # the largest, read back
    linear = sum(elements(layer.weight) for layer in quantised_layers(model).values())
    held = whole.parameters - 4 * linear
    # Blocks of 256 scales are cut short in small matrices.
    assert held + linear / 2 < less.parameters < held + 0.55 * linear
    assert quantised_bytes(plain, 4) == pytest.approx(held + BYTES_EACH * linear, abs=100)


def refused(model: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TreeEngine(model)


def test_what_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    double = families.quantised(ROW)
    nn.Module.to(double, torch.float64)
    refused(double, "layers in 4 bit have no float64")
    models.make("gpt2", n_embd=64, n_layer=1, n_head=2).save_pretrained(tmp_path / "gpt2")
    families.build(ROW, **{**WIDE, "intermediate_size": 128}).save_pretrained(tmp_path / "qwen")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    def load(name: str, **options: Any) -> Any:
        config = BitsAndBytesConfig(**options)
        return AutoModelForCausalLM.from_pretrained(tmp_path / name, quantization_config=config)

    refused(load("qwen", load_in_8bit=True), "'.*q_proj' is in 8 bit, where hidden states are rounded too")
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    refused(load("qwen", **four, llm_int8_skip_modules=["model"]), "output projection 'lm_head' is in 4 bit")
    with pytest.raises(ValueError, match=r"is in 4 bit as fp4, stored as torch\.uint8; load it as nf4"):
        settle_quantised(load("qwen", load_in_4bit=True), "nf4")
    with pytest.raises(ValueError, match="was transformers' Conv1D"):
        settle_quantised(load("gpt2", **four))
    indexed = families.other("hy_v4")
    if indexed.type in CONFIG_MAPPING:
        families.build(indexed).save_pretrained(tmp_path / "indexed")
        refused(load("indexed", **four), r"indexer\.weights_proj' is in 4 bit, and HYV4ForCausalLM would round")
        kept = load("indexed", **four, llm_int8_skip_modules=["lm_head", "weights_proj"])
        assert TreeEngine(kept).indexers and any("indexer.wk" in name for name in quantised_layers(kept))
    packed = load("qwen", **four, bnb_4bit_use_double_quant=True).eval()
    with torch.no_grad():
        packed(torch.arange(9)[None])
    layer = next(iter(quantised_layers(packed).values()))
    if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):  # where the CPU has such products
        refused(packed, "was rounded to bfloat16 by a pass in evaluation mode")
