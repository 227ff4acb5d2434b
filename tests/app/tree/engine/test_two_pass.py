"""Losses that couple sequences of the batch: a forward, the loss of all outputs, then backward from its gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from app.tree import FlatOutputs, PrefixTree, TreeEngine
from tests.app.tree import models, oracle
from tests.app.tree.cases import Case, cases
from tests.app.tree.parity import as_tensor, assert_unchanged, build, snapshot, take_grads

F64 = torch.float64
WANT = ("logprobs", "entropy", "values")


def standardised(logprobs: Tensor, entropy: Tensor, values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Log-ratios standardised over the batch, clipped, times a batch-wide softmax of summed values: no sequence's part
    is a function of that sequence alone."""
    ratio = (logprobs - logprobs.mean()) / (logprobs.var(unbiased=False) + 1).sqrt()
    lengths = cu_seqlens.diff().tolist()
    sums = torch.stack([part.sum() for part in (ratio + 0.1 * entropy).split(lengths)])
    weights = torch.softmax(torch.stack([part.mean() for part in values.split(lengths)]), 0)
    return (weights * torch.tanh(sums / 4)).sum() + (ratio.clamp(-1, 1) ** 2).mean()


def of_flat(out: FlatOutputs) -> Tensor:
    return standardised(out.logprobs, out.entropy, out.values, out.cu_seqlens)


def dense(model, case_or_sequences, scored, temperatures, head) -> tuple[float, dict[str, Tensor]]:
    """The same by autograd through all dense sequences at once."""
    sequences = case_or_sequences
    outs = oracle.dense_forward(model, sequences, scored, temperatures, head)
    columns = [torch.cat([getattr(out, name) for out in outs]) for name in WANT]
    bounds = torch.tensor([0, *np.cumsum([len(s) for s in sequences])])
    loss = standardised(*columns, bounds)
    named = oracle.parameters(model, head)
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return float(loss.detach()), {
        name: torch.zeros_like(p) if grad is None else grad for (name, p), grad in zip(named.items(), grads)
    }


@pytest.mark.parametrize("name", models.FLOAT64_CLEAN)
@settings(settings.default, max_examples=settings.default.max_examples // 5)
@given(case=cases())
def test_a_coupled_loss_is_exact(name: str, case: Case) -> None:
    model, head = models.shared(name, F64)
    take_grads(model, head)
    total, expected = dense(model, case.sequences, case.scored, case.temperatures, head)
    before = snapshot(model)
    engine = TreeEngine(model, case.chunk_tokens, case.live_tokens, value_head=head, self_check=False)
    got = engine.backward_coupled(build(case), of_flat, want=WANT, temperatures=as_tensor(case.temperatures))
    assert_unchanged(model, before)
    assert got == pytest.approx(total, rel=1e-9, abs=1e-9)
    error, where = oracle.relative_error(take_grads(model, head), expected, floor=1e-3)
    assert error < 1e-9, where


SEQUENCES = [np.array(s) for s in ([3, 1, 4, 1, 5, 9], [3, 1, 4, 2], [3, 1], [7], [2, 7, 1, 8, 2, 8])]


def test_gradients_by_hand_as_lists_or_flat() -> None:
    """`forward`, any computation, `backward_from`: what `backward_coupled` does, in the user's own steps."""
    model, head = models.make("phi", F64), models.value_head(F64)
    engine, tree = TreeEngine(model, 4, 6, value_head=head), PrefixTree.build(SEQUENCES)
    _, expected = dense(model, SEQUENCES, None, None, head)
    out = engine.forward(tree, want=WANT)
    leaves = out.with_gradient()
    of_flat(leaves).backward()
    assert not out.logprobs[0].requires_grad and all(p.grad is None for p in model.parameters())
    lengths = [len(s) for s in SEQUENCES]
    flat = {name: getattr(leaves, name).grad for name in WANT}
    for grads in (flat, {name: grad.split(lengths) for name, grad in flat.items()}):
        engine.backward_from(tree, grads)
        assert oracle.relative_error(take_grads(model, head), expected)[0] < 1e-9


def test_unscored_positions_take_no_gradient() -> None:
    model = models.make("phi", F64)
    scored = [np.zeros(len(s), bool) for s in SEQUENCES]
    scored[0][3] = True
    tree = PrefixTree.build(SEQUENCES, scored)
    ones = torch.ones(tree.num_dense_tokens, dtype=F64)
    TreeEngine(model, 4, 6).backward_from(tree, {"logprobs": ones})
    _, expected = oracle.dense_backward(model, SEQUENCES, lambda out, i: out.logprobs.sum(), scored)
    assert oracle.relative_error(take_grads(model), expected)[0] < 1e-9


def test_losses_without_gradient_and_empty_trees() -> None:
    model = models.make("phi", F64)
    engine = TreeEngine(model, 4, 6)
    assert engine.backward_coupled(PrefixTree.build(SEQUENCES), lambda out: torch.ones(())) == 1.0
    assert engine.backward_coupled(PrefixTree.build([]), lambda out: out.logprobs.sum()) == 0.0
    engine.backward_from(PrefixTree.build([]), {"logprobs": []})
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_wrong_gradients_are_refused_by_name() -> None:
    engine, tree = TreeEngine(models.make("phi", F64), 4, 6), PrefixTree.build(SEQUENCES)
    with pytest.raises(ValueError, match=r"grads\['logprobs'\].*19 in all.*\(3,\)"):
        engine.backward_from(tree, {"logprobs": torch.zeros(3)})
    with pytest.raises(ValueError, match="want"):
        engine.backward_from(tree, {"logits": torch.zeros(19)})
    with pytest.raises(ValueError, match="scalar"):
        engine.backward_coupled(tree, lambda out: out.logprobs)
