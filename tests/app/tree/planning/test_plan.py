"""Properties of execution plans, checked by an interpreter of our own that only counts: no model, no torch.

What a plan promises (app/tree/planning/plan.py): every token that a scored one depends on forward with gradient exactly
once and the others never, children before parents, both budgets kept, the live path always the one the next chunk hangs
below; whatever packing, predictor and checkpointing it was made with.
"""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tree import PrefixTree
from app.tree.attention.part_attention import PartBackend
from app.tree.planning.cost import ModelShape
from app.tree.planning.layer_shapes import HeadShape
from app.tree.planning.packing import Packing
from app.tree.planning.plan import ExecutionPlan
from app.tree.planning.planner import plan
from app.tree.planning.timing import CPU_RATES, TimeModel
from tests.app.tree.cases import Case, cases

SHAPE = ModelShape(2, 16, 31, (HeadShape(4, 2, 4),) * 2, (24, 24))
PARTS = PartBackend()
PREDICTORS = (None, TimeModel(SHAPE, CPU_RATES, PARTS))
shares = st.sampled_from([1.0, 0.6, 0.25])
packings = st.sampled_from([None, *(dict(join=j, even=e, order=o) for j in (True, False) for e in (True, False)
                            for o in ("heaviest", "longest"))])  # fmt: skip


def build(case: Case) -> PrefixTree:
    return PrefixTree.build(case.sequences, case.scored, keys=case.keys, share=case.share)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Case, ExecutionPlan]:
    """A case and a plan for it, made in any of the ways there are."""
    case, share = draw(cases()), draw(shares)
    kind = draw(packings)
    packing = None if kind is None else Packing(min(case.chunk_tokens, case.live_tokens), **kind)
    predictor = draw(st.sampled_from(PREDICTORS))
    return case, plan(build(case), case.chunk_tokens, case.live_tokens, predictor, share, packing)


def needed(tree: PrefixTree) -> set[int]:
    """Tokens that some scored token comes after, by definition."""
    found: set[int] = set()
    for token in tree.scored_tokens.tolist():
        found.update(path_to(tree, int(tree.token_parent[token])))
    return found


def path_to(tree: PrefixTree, token: int) -> list[int]:
    """Tree tokens from the root to `token`, included."""
    path = []
    while token >= 0:
        path.append(token)
        token = int(tree.token_parent[token])
    return path[::-1]


def piece_tokens(execution: ExecutionPlan, chunk: int, piece: int) -> list[int]:
    run = execution.chunks[chunk].pieces[piece]
    return list(range(run.start, run.stop))


@given(plans())
def test_chunks_partition_what_has_to_run_into_connected_pieces(made: tuple[Case, ExecutionPlan]) -> None:
    case, execution = made
    tree = execution.tree
    seen: list[int] = []
    for index, chunk in enumerate(execution.chunks):
        assert 1 <= chunk.tokens == sum(piece.tokens for piece in chunk.pieces)
        assert chunk.tokens <= min(case.chunk_tokens, execution.chunk_tokens)
        assert execution.live_cost(chunk) <= case.live_tokens
        assert not chunk.checkpoint or execution.share < 1
        assert chunk.parent < index
        above = -1 if chunk.parent < 0 else execution.chunks[chunk.parent].pieces[chunk.parent_piece].stop - 1
        for position, piece in enumerate(chunk.pieces):
            run = range(piece.start, piece.stop)
            seen.extend(run)
            assert piece.parent < position
            expected = above if piece.parent < 0 else chunk.pieces[piece.parent].stop - 1
            assert tree.token_parent[piece.start] == expected
            assert all(tree.token_parent[token] == token - 1 for token in run[1:])
            if piece.parent < 0:
                assert chunk.path_tokens == tree.token_depth[piece.start]
    assert sorted(seen) == sorted(needed(tree)) and tree.num_needed_tokens == len(seen)
    assert all(
        execution.token_chunk[t] == i
        for i, c in enumerate(execution.chunks)
        for p in c.pieces
        for t in range(p.start, p.stop)
    )
    assert (execution.token_chunk == -1).sum() == tree.num_tokens - len(seen)
    assert execution.longest_path == max((chunk.path_tokens for chunk in execution.chunks), default=0)


@given(plans())
def test_interpreting_the_steps(made: tuple[Case, ExecutionPlan]) -> None:
    """Replays the plan: who has a graph, whose keys and values exist, what lies on the live path."""
    case, execution = made
    tree, chunks = execution.tree, execution.chunks
    graphs: set[int] = set()
    has_keys: set[int] = set()  # tokens with keys and values
    forwards = np.zeros(tree.num_tokens, int)
    finished: set[int] = set()
    live_path: list[tuple[int, int]] = []
    peak = extra = 0
    for step in execution.steps:
        chunk = chunks[step.chunk]
        if step.action in ("forward", "anchor"):
            below = -1 if chunk.parent < 0 else chunks[chunk.parent].pieces[chunk.parent_piece].stop - 1
            on_path = [token for where in live_path for token in piece_tokens(execution, *where)]
            assert on_path == path_to(tree, below)
            assert set(on_path) <= has_keys
        if step.action == "forward":
            assert step.chunk not in graphs and step.chunk not in finished
            graphs.add(step.chunk)
            tokens = [t for p in range(len(chunk.pieces)) for t in piece_tokens(execution, step.chunk, p)]
            forwards[tokens] += 1
            has_keys |= set(tokens)
            extra += len(tokens) * chunk.checkpoint
            cost = [
                ceil(execution.share * chunks[c].tokens) if chunks[c].checkpoint else chunks[c].tokens for c in graphs
            ]
            peak = max(peak, sum(cost))
        elif step.action == "anchor":
            tokens = [t for p in chunk.anchors for t in piece_tokens(execution, step.chunk, p)]
            assert all(chunk.pieces[p].parent < 0 or chunk.pieces[p].parent in chunk.anchors for p in chunk.anchors)
            has_keys |= set(tokens)
            extra += len(tokens)
        elif step.action == "push":
            assert set(piece_tokens(execution, step.chunk, step.piece)) <= has_keys
            live_path.append((step.chunk, step.piece))
        elif step.action == "pop":
            assert live_path.pop() == (step.chunk, step.piece)
        elif step.action == "backward":
            children = {index for index, other in enumerate(chunks) if other.parent == step.chunk}
            assert children <= finished
            graphs.remove(step.chunk)
            finished.add(step.chunk)
        else:
            pytest.fail(f"unknown step {step}")
    assert set(np.flatnonzero(forwards)) == needed(tree) and forwards.max(initial=0) <= 1
    assert finished == set(range(len(chunks))) and not graphs and not live_path
    assert peak <= case.live_tokens
    assert peak == execution.peak_live_tokens
    assert extra == execution.extra_forward_tokens


@given(cases())
def test_room_for_everything_recomputes_nothing(case: Case) -> None:
    tree = build(case)
    execution = plan(tree, case.chunk_tokens, tree.num_tokens)
    assert execution.extra_forward_tokens == 0
    assert all(step.action != "anchor" for step in execution.steps)
    whole = plan(tree, tree.num_tokens, tree.num_tokens)
    assert [chunk.tokens for chunk in whole.chunks] == [tree.num_needed_tokens] * (tree.num_needed_tokens > 0)


@given(cases(), st.integers(1, 30))
def test_a_larger_live_budget_never_recomputes_more(case: Case, more: int) -> None:
    """With the chunks unchanged, room only turns recomputed chunks into kept ones."""
    tree = build(case)
    chunk_tokens = min(case.chunk_tokens, case.live_tokens)
    small = plan(tree, chunk_tokens, case.live_tokens)
    large = plan(tree, chunk_tokens, case.live_tokens + more)
    assert large.extra_forward_tokens <= small.extra_forward_tokens


@given(cases(shares=("tree",)))
def test_plan_is_deterministic_and_printable(case: Case) -> None:
    tree = build(case)
    one = plan(tree, case.chunk_tokens, case.live_tokens)
    other = plan(
        PrefixTree.build(case.sequences[::-1], case.scored and case.scored[::-1], keys=case.keys and case.keys[::-1]),
        case.chunk_tokens,
        case.live_tokens,
    )
    assert one.chunks == other.chunks and one.steps == other.steps
    text = str(one)
    assert len(text.splitlines()) == 3 + min(len(one.chunks), 61)
    assert f"{tree.num_tokens:,} in the tree" in text


def test_one_token_budgets_on_a_deep_comb_need_no_recursion() -> None:
    spine = np.arange(1200)
    tree = PrefixTree.build([np.append(spine[:n], 7000) for n in range(1, 1200)])
    execution = plan(tree, 1, 1)
    assert len(execution.chunks) == tree.num_needed_tokens == 1199  # no leaf but the last spine token's has to run
    assert execution.peak_live_tokens == 1


def test_short_branches_are_packed_together() -> None:
    """Eight branches of two tokens to run under one stem: two chunks of eight, not eight of two."""
    tree = PrefixTree.build([[1] * 20 + [i, 2, 3] for i in range(2, 10)])
    execution = plan(tree, chunk_tokens=8, live_tokens=1000)
    leaves = [chunk for chunk in execution.chunks if not chunk.anchors]
    assert sorted(chunk.tokens for chunk in leaves) in ([8, 8], [4, 8, 8])


def test_empty_tree() -> None:
    execution = plan(PrefixTree.build([]), 4, 4)
    assert execution.chunks == () and execution.steps == ()
    assert (execution.extra_forward_tokens, execution.peak_live_tokens, execution.longest_path) == (0, 0, 0)
    assert str(execution)


@pytest.mark.parametrize("name", ["chunk_tokens", "live_tokens"])
@pytest.mark.parametrize("value", [0, -5])
def test_budgets_below_one_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        plan(PrefixTree.build([[1]]), **{"chunk_tokens": 4, "live_tokens": 4, name: value})


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_that_means_nothing_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        plan(PrefixTree.build([[1, 2]]), 4, 4, share=share)


@given(plans(), st.sampled_from([0.6, 0.25]))
def test_the_cheapest_candidate_is_taken(made: tuple[Case, ExecutionPlan], share: float) -> None:
    """No plan that the fixed rules would make is predicted to take less time."""
    case, execution = made
    model = PREDICTORS[1]
    chosen = plan(execution.tree, case.chunk_tokens, case.live_tokens, model, share)
    assert chosen.seconds == pytest.approx(model.predict(chosen.tree, chosen.chunks))
    for join in (True, False):
        fixed = Packing(min(case.chunk_tokens, case.live_tokens, max(1, chosen.tree.num_needed_tokens)), join=join)
        other = plan(execution.tree, case.chunk_tokens, case.live_tokens, model, share, fixed)
        assert chosen.seconds <= other.seconds * (1 + 1e-9)


def test_checkpointing_replaces_a_long_recompute() -> None:
    """A stem of 100 fits beside its branches of 40 only if these are checkpointed: 40 tokens run again, not 100."""
    tree = PrefixTree.build([[1] * 100 + [i] + [2] * 20 for i in (3, 4)])
    packing = Packing(100, join=False)
    tight = plan(tree, 100, 139, packing=packing)
    assert tight.extra_forward_tokens == 100 and not any(chunk.checkpoint for chunk in tight.chunks)
    shared = plan(tree, 100, 139, packing=packing, share=0.5)
    assert shared.extra_forward_tokens == 40 and shared.peak_live_tokens == 120
    assert "checkpointed" in str(shared) and "run twice" in str(tight)


def test_chunks_larger_than_the_live_budget_need_checkpointing() -> None:
    """Ten live tokens and many branches of one token: with checkpointing one chunk of 40 beats four of ten."""
    tree = PrefixTree.build([[1, 2, 3, i, 5] for i in range(10, 47)])
    model = TimeModel(SHAPE, CPU_RATES, PARTS)
    plain, checkpointed = plan(tree, 40, 10, model), plan(tree, 40, 10, model, 0.25)
    assert plain.chunk_tokens == 10 and len(plain.chunks) == 4
    assert checkpointed.chunk_tokens == 40 and [chunk.checkpoint for chunk in checkpointed.chunks] == [True]
    assert checkpointed.seconds < plain.seconds


DEGENERATE = {
    "5,000 tokens one after the other, each the end of a sequence": [np.arange(n) for n in range(1, 5001)],
    "a comb of 5,000 levels": [np.append(np.arange(n), 9000) for n in range(1, 5001)],
    "a comb whose spine ends everywhere too": [
        *(np.append(np.arange(n), 9000) for n in range(1, 2501)),
        *(np.arange(n) for n in range(1, 2501)),
    ],
    "20,000 identical": [np.arange(30)] * 20_000,
    "20,000 disjoint": list(np.stack([np.arange(20_000), np.arange(20_000) % 7, np.arange(20_000) % 3], axis=1)),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_trees(name: str) -> None:
    sequences = DEGENERATE[name]
    tree = PrefixTree.build(sequences)
    assert (tree.sequence_length == [len(s) for s in sequences]).all()
    ends = tree.tokens[tree.sequence_last_token]
    assert (ends == [s[-1] for s in sequences]).all()
    starts = tree.segment_start[tree.sequence_segment]
    assert (
        (starts < tree.sequence_length) & (tree.sequence_length <= starts + tree.segment_length[tree.sequence_segment])
    ).all()
    for some in (sequences[0], sequences[len(sequences) // 2], sequences[-1]):
        index = next(i for i, s in enumerate(sequences) if s is some)
        assert (tree.tokens[tree.sequence_tokens([index])] == some).all()
    execution = plan(tree, 512, 1024, TimeModel(SHAPE, CPU_RATES, PARTS), 0.25)
    assert sum(chunk.tokens for chunk in execution.chunks) == tree.num_needed_tokens
    assert execution.peak_live_tokens <= 1024
    assert sum(step.action == "backward" for step in execution.steps) == len(execution.chunks)
