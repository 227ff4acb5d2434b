"""Runs a case through the engine and through the dense oracle, and compares everything there is to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.tree import PrefixTree, TreeEngine
from app.tree.planning import layout as layout_module
from tests.app.tree import oracle
from tests.app.tree.cases import Case
from tests.app.tree.losses import SequenceLoss


@contextmanager
def masked_block(rows: int) -> Iterator[None]:
    """Tiny chunks would always be one masked block; smaller blocks make them several merged parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "MASKED_BLOCK", rows)
        yield


def build(case: Case) -> PrefixTree:
    return PrefixTree.build(case.sequences, scored=case.scored, keys=case.keys, share=case.share)


def take_grads(model: nn.Module, head: nn.Module | None = None) -> dict[str, Tensor | None]:
    """The accumulated gradients by name, which are cleared."""
    named = oracle.parameters(model, head)
    grads = {name: p.grad for name, p in named.items()}
    for p in named.values():
        p.grad = None
    return grads


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """What a pass has no business changing."""
    return {
        "attention": model.config._attn_implementation,
        "training": [m.training for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "weights": [p.detach().clone() for p in model.parameters()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "grad_enabled": torch.is_grad_enabled(),
    }


def assert_unchanged(model: PreTrainedModel, before: dict[str, Any]) -> None:
    after = snapshot(model)
    for old, new in zip(before.pop("weights"), after.pop("weights")):
        assert torch.equal(old, new)
    assert before == after


def assert_forward(
    model: PreTrainedModel, head: nn.Module, case: Case, want: Sequence[str], tolerance: float, **engine: Any
) -> None:
    """Every column of every sequence, with exact zeros where nothing is scored."""
    expected = oracle.dense_forward(model, case.sequences, case.scored, case.temperatures, head)
    out = TreeEngine(model, case.chunk_tokens, case.live_tokens, value_head=head, **engine).forward(
        build(case), want=want, temperatures=as_tensor(case.temperatures)
    )
    for name in ("logprobs", "entropy", "values"):
        columns = getattr(out, name)
        if name not in want:
            assert columns is None
            continue
        assert [len(column) for column in columns] == case.lengths
        assert torch.equal(out.flat(name), torch.cat(columns))
        for i, (got, dense) in enumerate(zip(columns, expected)):
            reference = getattr(dense, name).detach()
            assert not got.requires_grad
            assert (got - reference).abs().max() <= tolerance * max(1.0, float(reference.abs().max())), (name, i)
            unscored = (
                torch.ones(len(got), dtype=torch.bool) if case.scored is None else torch.from_numpy(case.scored[i])
            )
            unscored = ~unscored
            unscored[0] = True
            assert (got[unscored] == 0).all(), (name, i)


def assert_backward(
    model: PreTrainedModel,
    head: nn.Module,
    case: Case,
    kind: str,
    want: Sequence[str],
    tolerance: float,
    batched: bool,
    floor: float = 0.0,
    exact: tuple[PreTrainedModel, nn.Module] | None = None,
    **engine: Any,
) -> None:
    """The summed loss and the gradient of every parameter; each sequence's loss is called exactly once.

    `tolerance` is relative to the largest gradient, or to `floor` where all are smaller. A case that misses it may
    still be right: by the same weights in float64 (`exact`) the engine may be ten times as far from the truth as dense
    is (two draws of the same rounding; a wrong engine is off by thousands).
    """
    loss = SequenceLoss(kind, case.lengths, case.seed, want)
    total, expected = oracle.dense_backward(model, case.sequences, loss, case.scored, case.temperatures, head)
    loss.calls.clear()
    take_grads(model, head)
    engine = {"self_check": False, **engine}  # it compares with dense execution, as this does
    got_total = TreeEngine(model, case.chunk_tokens, case.live_tokens, value_head=head, **engine).backward(
        build(case),
        loss.batched if batched else loss,
        want=want,
        batched=batched,
        temperatures=as_tensor(case.temperatures),
    )
    got = take_grads(model, head)
    assert sorted(loss.calls) == list(range(len(case.sequences)))
    assert isinstance(got_total, float)
    assert abs(got_total - total) <= tolerance * max(1.0, abs(total)) * len(case.sequences)
    error, where = oracle.relative_error(got, expected, floor)
    if error > tolerance and exact is not None:
        _, truth = oracle.dense_backward(exact[0], case.sequences, loss, case.scored, case.temperatures, exact[1])
        error, where = oracle.relative_error(got, truth, floor)
        tolerance = max(tolerance, 10 * oracle.relative_error(expected, truth, floor)[0])
    assert error <= tolerance, f"{error:.2e} in {where}, of at most {tolerance:.2e}"


def as_tensor(temperatures: list[float] | None) -> Tensor | None:
    return None if temperatures is None else torch.tensor(temperatures, dtype=torch.float64)
