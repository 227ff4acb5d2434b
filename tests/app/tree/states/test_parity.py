"""Layers that carry a state, over random trees and every plan, against every sequence alone: float64 throughout."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.tree import PrefixTree, TreeEngine
from app.tree.planning.packing import Packing
from app.tree.planning.plan import ExecutionPlan
from app.tree.planning.planner import plan
from tests.app.tree import oracle
from tests.app.tree.cases import Case, cases
from tests.app.tree.engine import test_two_pass
from tests.app.tree.losses import KINDS, SequenceLoss
from tests.app.tree.parity import as_tensor, assert_forward, assert_unchanged, build, snapshot, take_grads
from tests.app.tree.states import hybrids

EXACT = 1e-11
WANT = ("logprobs", "entropy", "values")
MANY = 10**6
FEW = settings(settings.default, max_examples=settings.default.max_examples // 5)

PLANS: dict[str, tuple[int, int, float]] = {  # tokens a chunk, live tokens, share of a checkpointed one
    "one chunk": (MANY, MANY, 1.0),
    "kept": (5, MANY, 1.0),
    "run twice": (5, 5, 1.0),
    "one-token chunks": (1, 1, 1.0),
    "one-token chunks, kept": (1, MANY, 1.0),
    "checkpointed": (6, 2, 0.3),
}


class PlannedEngine(TreeEngine):
    """Plans as named, instead of the cheapest."""

    planned = "one chunk"

    def plan(self, tree: PrefixTree) -> ExecutionPlan:
        chunk, live, share = PLANS[self.planned]
        return plan(tree, chunk, live, share=share, packing=Packing(min(chunk, max(live, int(live / share)))))


def engine(planned: str, model, head) -> PlannedEngine:
    made = PlannedEngine(model, value_head=head, self_check=False)
    made.planned = planned
    return made


@pytest.mark.parametrize(("name", "planned"), [*(("qwen3_5_text", one) for one in PLANS), ("nemotron_h", "run twice")])
@settings(FEW)
@given(case=cases(), kind=st.sampled_from(sorted(KINDS)))
def test_backward(name: str, planned: str, case: Case, kind: str) -> None:
    """Every plan of a delta rule, and the hardest one of a state space."""
    check_backward(name, planned, case, kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in hybrids.OPTIONS if name != "qwen3_5_text"])
@settings(max_examples=settings.default.max_examples // 3)
@given(case=cases(), kind=st.sampled_from(sorted(KINDS)), planned=st.sampled_from(sorted(PLANS)))
def test_backward_of_every_family(name: str, case: Case, kind: str, planned: str) -> None:
    check_backward(name, planned, case, kind)


def check_backward(name: str, planned: str, case: Case, kind: str) -> None:
    model, head = hybrids.shared_exact(name)
    loss = SequenceLoss(kind, case.lengths, case.seed, WANT)
    total, expected = oracle.dense_backward(model, case.sequences, loss, case.scored, case.temperatures, head)
    take_grads(model, head)
    before = snapshot(model)
    got = engine(planned, model, head).backward(build(case), loss, want=WANT, temperatures=as_tensor(case.temperatures))
    assert_unchanged(model, before)
    assert got == pytest.approx(total, rel=EXACT, abs=EXACT)
    error, where = oracle.relative_error(take_grads(model, head), expected, floor=1e-3)
    assert error < EXACT, where


@pytest.mark.parametrize("name", hybrids.QUICK)
@settings(FEW)
@given(case=cases())
def test_forward(name: str, case: Case) -> None:
    model, head = hybrids.shared_exact(name)
    assert_forward(model, head, case, WANT, EXACT)


@pytest.mark.parametrize("name", hybrids.QUICK)
@settings(FEW)
@given(case=cases())
def test_a_coupled_loss(name: str, case: Case) -> None:
    model, head = hybrids.shared_exact(name)
    take_grads(model, head)
    _, expected = test_two_pass.dense(model, case.sequences, case.scored, case.temperatures, head)
    TreeEngine(model, case.chunk_tokens, case.live_tokens, value_head=head, self_check=False).backward_coupled(
        build(case), test_two_pass.of_flat, want=WANT, temperatures=as_tensor(case.temperatures)
    )
    error, where = oracle.relative_error(take_grads(model, head), expected, floor=1e-3)
    assert error < EXACT, where
