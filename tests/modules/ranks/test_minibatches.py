"""How batches are cut: every sequence once, whole groups, the same on all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.batch import RolloutBatch
from app.exchange import OneProcess
from app.tree import PrefixTree
from modules.ranks import RankWork, build_tree, split_minibatches
from tests.helpers.tiny_policy import make_batch


def rank_shares(batch: RolloutBatch, ranks: int, tree: PrefixTree | None = None) -> list[list[int]]:
    exchange = OneProcess()
    exchange.size = exchange.parts = ranks
    work = RankWork(exchange, "tree", lambda name: pytest.fail(name))
    return work.shares(batch, range(len(batch)), tree)


shapes = st.tuples(st.integers(1, 5), st.integers(2, 4), st.integers(1, 8), st.integers(0, 5))


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(1, 4))
def test_every_sequence_once_whole_units_and_deterministic(shape: tuple[int, int, int, int], ranks: int) -> None:
    groups, episodes, count, seed = shape
    batch = make_batch(seed, groups=groups, episodes=episodes)
    split = split_minibatches(batch, count, (seed, 1, 0))
    assert len(split) == count
    assert sorted(i for part in split for i in part) == list(range(len(batch)))
    assert split == split_minibatches(batch, count, (seed, 1, 0))
    assert all(part == sorted(part) for part in split)
    unit = batch.group_ids if groups >= count else batch.episode_ids
    for name in unit.unique().tolist():
        assert len({m for m, part in enumerate(split) for i in part if unit[i] == name}) == 1
    sizes = [len({int(unit[i]) for i in part}) for part in split]
    assert max(sizes) - min(sizes) <= 1  # equal numbers of units, none left out
    for part in filter(None, split):
        shares = rank_shares(batch.select(part), ranks)
        assert len(shares) == ranks and sorted(i for share in shares for i in share) == list(range(len(part)))


def test_groups_stay_whole_where_an_objective_needs_them() -> None:
    batch = make_batch(groups=2)
    parts = split_minibatches(batch, 4, (0,), whole_groups=True)
    assert sorted(map(len, parts)) == [0, 0, len(batch) // 2, len(batch) // 2]
    assert all(len(batch.group_ids[part].unique()) == 1 for part in parts if part)
    assert all(split_minibatches(batch, 4, (0,)))


def test_the_order_of_sequences_in_a_rank_share_is_that_of_the_batch() -> None:
    batch = make_batch(groups=4)
    shares = rank_shares(batch, 3)
    assert shares == [sorted(share) for share in shares] == rank_shares(batch, 3, build_tree(batch, "tree"))


def test_epochs_shuffle_anew() -> None:
    batch = make_batch(groups=8)
    splits = [split_minibatches(batch, 4, (0, 0, epoch)) for epoch in range(4)]
    assert any(split != splits[0] for split in splits)


def test_more_ranks_than_sequences() -> None:
    batch = make_batch(groups=1, episodes=2).select([0])
    assert sorted(map(len, rank_shares(batch, 3))) == [0, 0, 1]


def test_ranks_get_subtrees_of_similar_cost() -> None:
    batch = make_batch(groups=6, episodes=4)
    tokens = [build_tree(batch.select(share), "tree").num_tokens for share in rank_shares(batch, 2)]
    assert max(tokens) < 0.65 * sum(tokens)


def test_trees_share_only_at_equal_temperature() -> None:
    one = build_tree(make_batch(groups=2, temperatures=(1.0,)), "tree")
    two = build_tree(make_batch(groups=2, temperatures=(1.0, 0.5)), "tree")
    assert two.num_tokens == one.num_tokens + 4  # the common system prompt, once for each temperature


def test_only_trained_tokens_are_scored() -> None:
    batch: RolloutBatch = make_batch()
    tree = build_tree(batch, "none")
    assert len(tree.scored_tokens) == int(batch.loss_mask.sum())
