"""Predicted times: counts of work by hand, and orders that any reasonable prediction has to give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.tree import PrefixTree
from app.tree.attention import BACKENDS
from app.tree.attention.part_attention import PartBackend
from app.tree.calibrate import measure_rates
from app.tree.planning import work
from app.tree.planning.cost import ModelShape
from app.tree.planning.layer_shapes import HeadShape
from app.tree.planning.layout import layout
from app.tree.planning.packing import Packing
from app.tree.planning.planner import plan
from app.tree.planning.timing import CPU_RATES, GPU_RATES, TimeModel
from app.tree.planning.work import count_work
from tests.app.tree import models
from tests.app.tree.cases import Case, cases
from tests.app.tree.planning.test_plan import build

SHAPE = ModelShape(2, 64, 512, (HeadShape(4, 2, 16),) * 2, (128, 128))
PARTS = PartBackend()


def test_counts_of_a_fork_by_hand() -> None:
    """A stem of 4 and two branches of 3 (the last token of each never runs), chunks of 4 and no room to keep one."""
    tree = PrefixTree.build([[1, 2, 3, 4, i, 6, 7] for i in (5, 8)])
    execution = plan(tree, 4, 4, packing=Packing(4, join=False))
    assert [chunk.tokens for chunk in execution.chunks] == [4, 4]  # the stem; both branches of two
    found = count_work(tree, execution.chunks, PARTS)
    assert (found.tokens, found.tokens_again, found.runs, found.runs_again) == (8, 4, 2, 1)
    assert found.pairs == 4 * 5 // 2 + 4 * 4 + 4 * 4  # stem; branches by path; branches in one masked block
    assert found.pairs_again == 4 * 5 // 2
    assert (found.parts, found.parts_again, found.path, found.scored) == (3, 1, 4, 9)
    kept = count_work(tree, plan(tree, 4, 8, packing=Packing(4, join=False)).chunks, PARTS)
    assert (kept.tokens_again, kept.pairs_again, kept.runs_again, kept.parts_again) == (0, 0, 0, 0)


@given(cases(), st.sampled_from([1.0, 0.5]))
def test_counts_agree_with_the_plan(case: Case, share: float) -> None:
    tree = build(case)
    execution = plan(tree, case.chunk_tokens, case.live_tokens, share=share)
    found = count_work(tree, execution.chunks, PARTS)
    assert found.tokens == tree.num_needed_tokens and found.tokens_again == execution.extra_forward_tokens
    depths = [int(tree.token_depth[t]) + 1 for c in execution.chunks for p in c.pieces for t in range(p.start, p.stop)]
    assert found.pairs >= sum(depths)  # masked blocks compute hidden pairs too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "_EXACT_PIECES", -1)
        estimate = count_work(tree, execution.chunks, PARTS)
    assert estimate.pairs == sum(depths) and estimate.tokens_again == found.tokens_again


@pytest.mark.parametrize("rates", [CPU_RATES, GPU_RATES])
def test_recomputing_and_splitting_cost_time(rates) -> None:
    stem = list(range(300))
    tree = PrefixTree.build([[*stem, 1, i, *range(40)] for i in range(40)])
    model = TimeModel(SHAPE, rates, PARTS)

    def seconds(chunk: int, live: int, share: float = 1.0, join: bool = True) -> float:
        return model.predict(tree, plan(tree, chunk, live, share=share, packing=Packing(chunk, join)).chunks)

    whole = seconds(2000, 2000)
    assert seconds(20, 2000) > seconds(100, 2000) > whole
    assert seconds(100, 100) > seconds(100, 2000)
    assert seconds(2000, 1000, share=0.5) > whole


def test_rates_are_measured_on_the_models_shapes() -> None:
    model = models.make("qwen3")
    before = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    rates = measure_rates(model, repeats=1)
    assert torch.equal(torch.get_rng_state(), state), "the trainer's stream moved"
    assert all(value > 0 for value in vars(rates).values())
    assert rates.layer < 0.1 and 1e6 < rates.linear < 1e15
    assert all((p == q).all() and p.grad is None for p, q in zip(model.parameters(), before))


def test_calls_and_pairs_are_those_of_the_backend() -> None:
    """Forty short branches below a stem in one chunk: by parts masked blocks, packed squares in one call beside one
    over what is above each fork, or all in one."""
    tree = PrefixTree.build([[*range(300), 1, i, *range(40)] for i in range(40)])
    chunks = plan(tree, 4000, 4000, packing=Packing(4000)).chunks
    by_parts, packed, joined = (count_work(tree, chunks, BACKENDS[name]) for name in ("sdpa", "flash", "flex"))
    assert (packed.runs, joined.parts) == (1, 1) and packed.parts < by_parts.parts
    assert packed.parts == 1 + sum(not part.causal for part in layout(chunks[0], None, 0).parts)
    visible = sum(int(tree.token_depth[p.start : p.stop].sum()) + p.tokens for p in chunks[0].pieces)
    assert packed.pairs == joined.pairs == visible < by_parts.pairs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "_EXACT_PIECES", -1)
        rough = [count_work(tree, chunks, BACKENDS[name]).parts for name in ("sdpa", "flash", "flex")]
    assert rough[2] == 1 and rough[1] >= packed.parts / 2 and rough[0] >= by_parts.parts / 2
