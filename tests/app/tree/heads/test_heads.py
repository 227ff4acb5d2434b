"""The heads by themselves: blocks kept, reused and recomputed give what autograd through all logits gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

from app.tree import PrefixTree, TreeEngine, triton_lacks
from app.tree.heads import Heads
from app.tree.heads import heads as heads_module
from tests.app.tree import models

F64, LOW = torch.float64, (torch.bfloat16, torch.float16)
ROWS = 11


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> dict[str, Tensor]:
    logp = torch.log_softmax(hidden @ weight.t() / temperature[:, None], -1)
    return {"logprobs": logp[torch.arange(ROWS), targets], "entropy": -(logp.exp() * logp).sum(-1)}


@pytest.mark.parametrize("wanted", [("logprobs",), ("entropy",), ("logprobs", "entropy")])
@pytest.mark.parametrize("head_tokens", [1, 4, ROWS, "auto"])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("hooked", [False, True])  # a hook sends the projection through autograd
def test_against_autograd(wanted: tuple[str, ...], head_tokens: int | str, keep: bool, hooked: bool) -> None:
    model = models.make("phi", F64)
    model.lm_head.bias = None
    if hooked:
        model.lm_head.register_forward_hook(lambda *_: None)
    heads, weight = Heads(model, None, head_tokens), model.lm_head.weight
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, models.HIDDEN, generator=random, dtype=F64)
    targets = torch.randint(0, model.config.vocab_size, (ROWS,), generator=random)
    temperature = torch.rand(ROWS, generator=random, dtype=F64) + 0.5
    grads = {name: torch.randn(ROWS, generator=random, dtype=F64) for name in wanted}
    leaf = hidden.clone().requires_grad_()
    expected = reference(leaf, weight, targets, temperature)
    loss = sum((expected[name] * grads[name]).sum() for name in wanted)
    want_hidden, want_weight = torch.autograd.grad(loss, [leaf, weight])
    for repeat in (1, 2):  # scratch of the first time serves the second
        outputs, kept = heads.forward(hidden, targets, temperature, frozenset(wanted), keep)
        assert (kept is not None) == keep
        for name in wanted:
            assert (outputs[name] - expected[name]).abs().max() < 1e-12
        got = heads.backward(hidden, targets, temperature, dict(grads), kept)
        assert (got - want_hidden).abs().max() < 1e-12
        assert (weight.grad - repeat * want_weight).abs().max() < 1e-11


def test_the_kept_block_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.make("qwen2")
    heads, calls = Heads(model, None, 4), []
    inner = Heads._log_softmax
    monkeypatch.setattr(Heads, "_log_softmax", lambda self, *args: calls.append(len(args[0])) or inner(self, *args))
    hidden, targets = torch.randn(10, models.HIDDEN), torch.zeros(10, dtype=torch.int64)
    _, kept = heads.forward(hidden, targets, 1.0, frozenset(["logprobs"]), keep=True)
    assert calls == [4, 4, 2]
    heads.backward(hidden, targets, 1.0, {"logprobs": torch.ones(10)}, kept)
    assert calls[3:] == [4, 4]


def test_scratch_is_reused_within_a_pass_and_given_back() -> None:
    model = models.make("qwen2")
    engine = TreeEngine(model, 4, 8)
    seen: set[int] = set()
    block = engine.heads._block

    def watched(name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        found = block(name, like, dtype)
        seen.add(found.untyped_storage().data_ptr())
        return found

    engine.heads._block = watched  # type: ignore[method-assign]
    engine.backward(PrefixTree.build([list(range(20)), [0, 1, 5, 6]]), lambda out, i: out.logprobs.sum())
    assert 2 <= len(seen) <= 6  # two blocks, replaced when a chunk has more rows; not two a chunk
    assert not engine.heads._scratch


def test_entropy_without_gradient_costs_backward_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entropy that is wanted for a log line, detached in the loss, takes no part in the heads' backward."""
    model, named = models.make("qwen2"), []
    inner = Heads.backward
    monkeypatch.setattr(
        Heads, "backward", lambda self, *args, **kw: named.append(frozenset(args[3])) or inner(self, *args, **kw)
    )
    tree = PrefixTree.build([[1, 2, 3, 4], [1, 2, 5]])
    for used in (False, True):
        named.clear()

        def loss(out, i, used=used):
            entropy = out.entropy if used else out.entropy.detach()
            return out.logprobs.sum() + entropy.sum()

        TreeEngine(model, 8, 8).backward(tree, loss, want=("logprobs", "entropy"))
        assert set(named) == {frozenset(["logprobs"] + ["entropy"] * used)}


def test_entropy_asks_for_no_product_but_the_projection() -> None:
    """Matrix products may be told to round to TF32 or bf16; of entropies that would be an error of 1e-3."""

    class Products(TorchDispatchMode):
        seen: list[tuple[int, ...]]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func).split(".")[1] in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot"):
                self.seen.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    model = models.make("qwen2")
    heads, vocabulary = Heads(model, None, 4), model.config.vocab_size
    hidden, targets = torch.randn(ROWS, models.HIDDEN), torch.zeros(ROWS, dtype=torch.int64)
    with Products() as products:
        products.seen = []
        heads.forward(hidden, targets, 1.0, frozenset(["entropy"]))
        heads.backward(hidden, targets, 1.0, {"entropy": torch.ones(ROWS)})
    blocks = {(4, models.HIDDEN), (3, models.HIDDEN)}  # by the projection
    gradients = {(4, vocabulary), (3, vocabulary), (vocabulary, models.HIDDEN)}
    assert blocks <= set(products.seen) <= blocks | gradients


def rounded_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, grads: dict[str, Tensor], dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """In float64 but for logits, which are rounded to `dtype`: outputs, and gradients of hidden states and weight."""
    hidden, weight = hidden.double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = hidden @ weight.t()
    logits = logits + (logits.detach().to(dtype).double() - logits.detach())
    logp = torch.log_softmax(logits / temperature.double()[:, None], -1)
    found = {"logprobs": logp[torch.arange(ROWS), targets], "entropy": -(logp.exp() * logp).sum(-1)}
    loss = sum((found[name] * grad.double()).sum() for name, grad in grads.items())
    grad_hidden, grad_weight = torch.autograd.grad(loss, [hidden, weight])
    return {name: x.detach() for name, x in found.items()}, grad_hidden, grad_weight


BOTH = ("logprobs", "entropy")


@pytest.mark.parametrize(
    "way, dtype, autocast, wanted",  # kernels take their time in the interpreter
    [
        *(("plain", dtype, False, names) for dtype in LOW for names in (("logprobs",), BOTH, ("entropy",))),
        ("plain", torch.float32, True, BOTH),
        ("fused", torch.bfloat16, False, ("logprobs",)),
        ("fused", torch.float32, True, ("entropy",)),
        ("fused", torch.float32, False, BOTH),
    ],
)
def test_weight_gradients_of_low_precision_are_summed_in_float32(
    way: str,
    dtype: torch.dtype,
    autocast: bool,
    wanted: tuple[str, ...],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In place, whatever the block: no [V, H] is made, and sums over blocks are not rounded."""
    if way == "fused":
        request.getfixturevalue("interpreted")
        monkeypatch.setattr(heads_module, "_has_kernels", lambda device: True)
        monkeypatch.setattr(heads_module._fused_operators(), "_BLOCK", 16)  # two steps for 31 tokens
    low = torch.bfloat16 if autocast else dtype
    model = models.make("phi", dtype)
    model.lm_head.bias = None
    weight = model.lm_head.weight
    weight.grad_dtype = torch.float32
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, models.HIDDEN, generator=random).to(dtype)
    targets = torch.randint(0, model.config.vocab_size, (ROWS,), generator=random)
    temperature = torch.rand(ROWS, generator=random) + 0.5
    grads = {name: torch.randn(ROWS, generator=random) for name in wanted}
    given: Tensor | float = temperature if len(wanted) > 1 else 0.7
    told = temperature if len(wanted) > 1 else torch.full((ROWS,), 0.7)
    want, want_hidden, want_weight = rounded_reference(hidden.to(low), weight.to(low), targets, told, grads, low)
    heads = Heads(model, None, 6)
    with torch.autocast("cpu", low, enabled=autocast):
        assert heads.way(hidden) == way
        outputs, kept = heads.forward(hidden, targets, given, frozenset(wanted), keep=True)
        got = heads.backward(hidden, targets, given, grads, kept)
    assert heads._scratch["logits"].dtype == low
    rounding = 1e-5 + 8 * torch.finfo(low).eps * (low != torch.float32)  # a sum may round a logit to its neighbour
    for name in wanted:
        assert outputs[name].dtype == torch.float32
        assert (outputs[name] - want[name]).abs().max() < rounding
    assert got.dtype == dtype and weight.grad.dtype == torch.float32
    assert (got - want_hidden).abs().max() < rounding * want_hidden.abs().max()
    assert (weight.grad - want_weight).abs().max() < rounding * want_weight.abs().max()


def test_blocks_are_sized_by_device_and_counted() -> None:
    """Thousands of rows on a GPU for vocabularies of today, within 1.25 GiB of all that a block is."""
    for vocabulary in (151_936, 248_320):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                Qwen3Config(vocab_size=vocabulary, hidden_size=64, num_hidden_layers=1), dtype=torch.bfloat16
            )
        cpu, gpu = Heads(model, None, "auto"), Heads(model, None, "auto", torch.device("cuda"))
        assert cpu.head_tokens == 128 * 2**20 // (4 * vocabulary)
        assert gpu.head_tokens > 500 and gpu.block_bytes(gpu.head_tokens) <= 1280 * 2**20
        kernels = {False: 10, True: 2}[triton_lacks() is None]
        assert gpu.block_bytes(1) == kernels * vocabulary
        model.lm_head.register_forward_hook(lambda *_: None)  # through autograd, with [V, H] to be added up
        assert gpu.block_bytes(1) > 6 * model.lm_head.weight.numel()
