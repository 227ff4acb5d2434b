"""The heads by themselves: blocks kept, reused and recomputed give what autograd through all logits gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.tree import PrefixTree, TreeEngine
from app.tree.heads import Heads
from tests.app.tree import models

F64 = torch.float64
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
    monkeypatch.setattr(Heads, "_log_softmax", lambda self, *args: calls.append(args[2]) or inner(self, *args))
    hidden, targets = torch.randn(10, models.HIDDEN), torch.zeros(10, dtype=torch.int64)
    _, kept = heads.forward(hidden, targets, 1.0, frozenset(["logprobs"]), keep=True)
    assert calls == [slice(0, 4), slice(4, 8), slice(8, 10)]
    heads.backward(hidden, targets, 1.0, {"logprobs": torch.ones(10)}, kept)
    assert calls[3:] == [slice(4, 8), slice(0, 4)]


def test_scratch_is_reused_within_a_pass_and_given_back() -> None:
    model = models.make("qwen2")
    engine = TreeEngine(model, 4, 8)
    seen: set[int] = set()
    block = engine.heads._block

    def watched(which: int, like: Tensor) -> Tensor:
        found = block(which, like)
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
