"""`partition`: every sequence once, never worse than the best contiguous cut (by brute force), and the balance on real
data."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.tree import PrefixTree, partition
from tests.app.tree import brute
from tests.app.tree.cases import Case, cases


def part_cost(case: Case, indices, prefix_cost) -> float:
    keys = None if case.keys is None else [case.keys[i] for i in indices]
    return brute.tree_cost(brute.trie([case.sequences[i] for i in indices], keys), prefix_cost)


def best_maximum(case: Case, num_parts: int, prefix_cost, token_limit: float = math.inf) -> float:
    """Smallest maximum over all contiguous cuts of the sequences in depth-first order, by trying them all."""
    names, keys = brute.words(case.sequences), case.keys or [0] * len(case.sequences)
    order = sorted(range(len(names)), key=lambda i: (keys[i], names[i]))
    costs = {
        (a, b): part_cost(case, order[a:b], prefix_cost)
        if sum(len(case.sequences[i]) for i in order[a:b]) <= token_limit
        else math.inf
        for a, b in itertools.combinations(range(len(order) + 1), 2)
    }
    best = [0.0] + [math.inf] * len(order)  # best maximum of the first n sequences in the parts allowed so far
    for _ in range(num_parts):
        best = [min([best[n]] + [max(best[a], costs[a, n]) for a in range(n)]) for n in range(len(best))]
    return best[-1]


@given(cases(shares=("tree",)), st.integers(1, 6))
def test_no_contiguous_cut_is_better(case: Case, num_parts: int) -> None:
    tree = PrefixTree.build(case.sequences, keys=case.keys)
    for cost, prefix_cost in [
        (None, brute.default_cost),
        (lambda n: n * 1.0, float),
        (lambda n: n + n.astype(float) ** 2, lambda n: n + float(n) ** 2),
    ]:
        parts = partition(tree, num_parts, cost=cost)
        assert len(parts) == num_parts
        assert sorted(itertools.chain(*parts)) == list(range(tree.num_sequences))
        slowest = max(part_cost(case, part, prefix_cost) for part in parts)
        assert slowest <= best_maximum(case, num_parts, prefix_cost) * (1 + 1e-6)


@given(cases(shares=("tree",)), st.integers(1, 6), st.integers(1, 60))
def test_no_contiguous_cut_within_a_limit_of_tokens_is_better(case: Case, num_parts: int, limit: int) -> None:
    tree = PrefixTree.build(case.sequences, keys=case.keys)
    # A sequence and its prefixes stay together, which trying single sequences does not know: skip where that matters.
    assume(len(tree.leaf_sequences) == tree.num_sequences)
    best = best_maximum(case, num_parts, brute.default_cost, limit)
    try:
        parts = partition(tree, num_parts, token_limit=limit)
    except ValueError as error:
        assert best == math.inf and f"token_limit={limit}: " in str(error)
        assert f"cannot be cut into {num_parts} parts" in str(error)
        return
    assert all(sum(len(case.sequences[i]) for i in part) <= limit for part in parts)
    assert max(part_cost(case, part, brute.default_cost) for part in parts) <= best * (1 + 1e-6)


@given(cases(shares=("tree",)), st.integers(1, 6), st.integers(1, 90), st.data())
def test_what_is_to_be_together_is_within_the_limit_too(case: Case, num_parts: int, limit: int, data) -> None:
    tree = PrefixTree.build(case.sequences, keys=case.keys)
    together = np.array(
        data.draw(st.lists(st.integers(5, 9), min_size=tree.num_sequences, max_size=tree.num_sequences))
    )
    parts = partition(tree, num_parts, together=together)
    try:
        parts = partition(tree, num_parts, token_limit=limit, together=together)
        assert all(sum(len(case.sequences[i]) for i in part) <= limit for part in parts)
    except ValueError as error:
        assert f"token_limit={limit}: " in str(error)
    assert sorted(itertools.chain(*parts)) == list(range(tree.num_sequences))
    for number in set(together.tolist()):
        assert sum(any(together[i] == number for i in part) for part in parts) == 1
    assert partition(tree, num_parts, together=np.arange(tree.num_sequences)) == partition(tree, num_parts)


def test_no_contiguous_cut_between_those_that_are_together_is_better() -> None:
    for seed in range(20):
        draw = np.random.default_rng(seed)
        groups = np.repeat(np.arange(8), draw.integers(1, 5, 8))
        starts = [[k, *draw.integers(0, 9, draw.integers(20))] for k in range(8)]
        sequences = [np.array([*starts[group], *draw.integers(0, 9, draw.integers(1, 20))]) for group in groups]
        sequences = [np.append(sequence, 100 + i) for i, sequence in enumerate(sequences)]  # none extends another
        case = Case(sequences, None, None, "tree", 1, 1, 0)
        limit = int(sum(map(len, sequences)) / 3 * 1.5)
        costs = [math.inf]
        for cuts in itertools.combinations_with_replacement(range(9), 2):
            parts = [np.flatnonzero((groups >= a) & (groups < b)) for a, b in itertools.pairwise((0, *cuts, 8))]
            if all(sum(len(sequences[i]) for i in part) <= limit for part in parts):
                costs.append(max(part_cost(case, part, brute.default_cost) for part in parts))
        parts = partition(PrefixTree.build(sequences), 3, token_limit=limit, together=groups)
        assert max(part_cost(case, part, brute.default_cost) for part in parts) <= min(costs) * (1 + 1e-6)
        assert all(
            len({k for k, part in enumerate(parts) if set(part) & set(own)}) == 1
            for own in (np.flatnonzero(groups == group) for group in range(8))
        )


@given(cases(), st.integers(1, 9))
def test_parts_keep_depth_first_order_and_prefixes_with_their_extension(case: Case, num_parts: int) -> None:
    tree = PrefixTree.build(case.sequences, keys=case.keys, share=case.share)
    parts = partition(tree, num_parts=num_parts)
    place = {i: k for k, i in enumerate(tree.sorted_sequences.tolist())}
    places = [[place[i] for i in part] for part in parts]
    assert sorted(itertools.chain(*places)) == list(range(tree.num_sequences))
    assert all(part == sorted(part) for part in places)
    firsts = [part[0] for part in places if part]
    assert firsts == sorted(firsts) and not any(places[len(firsts) :])  # empty ones last
    assert all(isinstance(i, int) for part in parts for i in part)
    leaves = set(tree.leaf_sequences.tolist())
    names, keys = brute.words(case.sequences), case.keys or [0] * len(case.sequences)
    for part in parts:
        for i in set(part) - leaves:
            assert any(keys[i] == keys[j] and names[j][: len(names[i])] == names[i] for j in set(part) & leaves)
    assert partition(tree, num_parts=num_parts) == parts


def test_fewer_leaves_than_parts_gives_empty_parts() -> None:
    tree = PrefixTree.build([[1, 2, 3], [1, 2], [4]])
    parts = partition(tree, num_parts=5)
    assert sorted(len(part) for part in parts) == [0, 0, 0, 1, 2]
    assert sorted(map(sorted, parts)) == [[], [], [], [0, 1], [2]]


def test_empty_tree_gives_empty_parts() -> None:
    assert partition(PrefixTree.build([]), num_parts=3) == [[], [], []]


def test_one_part_holds_everything() -> None:
    assert sorted(partition(PrefixTree.build([[1, 2], [3], [1, 4]]), num_parts=1)[0]) == [0, 1, 2]


def test_equal_leaves_are_dealt_evenly() -> None:
    tree = PrefixTree.build([[i, 1, 2] for i in range(12)])
    assert [len(part) for part in partition(tree, num_parts=4)] == [3, 3, 3, 3]


def test_costly_leaves_that_are_neighbours_are_dealt() -> None:
    tree = PrefixTree.build([[1] * 3, [2] * 3, [3], [4]])
    assert partition(tree, num_parts=2) == [[0, 2], [1, 3]]  # contiguous: 3 and 5 tokens
    assert partition(tree, num_parts=2, token_limit=4) == [[0, 2], [1, 3]]  # contiguous: none
    with pytest.raises(ValueError, match="at most 3 of them inseparable"):
        partition(tree, num_parts=2, token_limit=3)


def test_long_sequences_that_fork_are_split_better_than_contiguously() -> None:
    """Trees like those of episodes: a wrong guess of what a part has already would be worse than a contiguous cut."""
    gains = []
    for seed in range(30):
        draw = np.random.default_rng(seed)
        sequences = [draw.integers(0, 50, draw.integers(1, 30))]
        for _ in range(17):
            before = sequences[draw.integers(len(sequences))]
            kept = before[: draw.integers(len(before) + 1)]
            sequences.append(np.concatenate([kept, draw.integers(0, 50, draw.integers(1, 30))]))
        case = Case(sequences, None, None, "tree", 1, 1, 0)
        parts = partition(PrefixTree.build(sequences), num_parts=5, cost=lambda n: n * 1.0)
        slowest = max(part_cost(case, part, float) for part in parts)
        gains.append(best_maximum(case, 5, float) / slowest)
    assert min(gains) > 1 - 1e-6 and max(gains) > 1.05


@pytest.mark.parametrize("num_parts", [0, -1])
def test_no_parts_is_refused(num_parts: int) -> None:
    with pytest.raises(ValueError, match="num_parts"):
        partition(PrefixTree.build([[1]]), num_parts=num_parts)


@pytest.fixture(scope="module")
def airline_turns() -> list[np.ndarray]:
    """Every assistant turn (prompt so far + turn) of tasks 0-7, four trials each."""
    path = Path(os.environ.get("ARBORIST_DATA", "")) / "tau" / "airline_tokens.npz"
    if "ARBORIST_DATA" not in os.environ or not path.exists():
        pytest.skip(f"needs {path} (set ARBORIST_DATA)")
    data = np.load(path)
    whole = {
        i: np.concatenate([data["system_ids"], data["ids"][data["offsets"][i] : data["offsets"][i + 1]]])
        for i in np.flatnonzero(data["task"] < 8)
    }
    assert len(whole) == 32
    return [whole[i][:end] for i, end in zip(data["turn_traj"], data["turn_end"]) if i in whole]


@pytest.mark.parametrize(("num_parts", "expected"), [(2, 1.026), (4, 1.078), (8, 1.182)])
def test_balance_on_airline_turns(airline_turns, num_parts: int, expected: float) -> None:
    """(cost of the slowest part) x (parts) / (cost of the whole tree): what sharing lost to the cut costs."""
    tree = PrefixTree.build(airline_turns)

    def cost(part_tree: PrefixTree) -> float:
        return part_tree.num_tokens + part_tree.num_attention_pairs / 8192

    parts = partition(tree, num_parts=num_parts)
    assert sorted(itertools.chain(*parts)) == list(range(len(airline_turns)))
    slowest = max(cost(PrefixTree.build([airline_turns[i] for i in part])) for part in parts)
    assert slowest * num_parts / cost(tree) == pytest.approx(expected, abs=0.01)
