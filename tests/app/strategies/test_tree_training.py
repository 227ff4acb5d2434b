"""1, 2 and 4 ranks train what plain torch trains on dense sequences, however odd the batch."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.app.strategies import tree_jobs as jobs
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_model import HYBRID_LAYERS
from tests.helpers.tiny_policy import source
from tests.modules.ranks.training_jobs import train

START = 170.0  # seconds: four processes import everything the first time


@pytest.fixture
def pools(one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool) -> list[RankPool]:
    return [one_rank, two_ranks, four_ranks]


def _largest_difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert len(got) == len(expected)
    return max(float((got[name].double() - expected[name].double()).abs().max()) for name in got)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "optimizer"), [("episodes", "sgd"), ("episodes", "adamw"), ("one", "sgd"), ("identical", "adamw")]
)
def test_five_steps_are_those_of_plain_torch(pools: list[RankPool], kind: str, optimizer: str) -> None:
    tolerance = {"sgd": 1e-6, "adamw": 1e-2 * jobs.LEARNING_RATE}[optimizer]
    expected = jobs.imitate_plainly(kind, optimizer)
    assert _largest_difference(expected, jobs.untrained()) > 100 * tolerance
    for pool in pools:
        for got in pool.run(jobs.imitate, START, devices=pool.size, kind=kind, optimizer=optimizer):
            assert _largest_difference(got, expected) < tolerance, f"{pool.size} ranks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "minibatches", "epochs"),
    [(3, 3, 2), (1, 4, 1)],  # the second: three episodes in four minibatches, one of them empty
)
def test_minibatches_and_epochs_do_not_depend_on_ranks(
    pools: list[RankPool], groups: int, minibatches: int, epochs: int
) -> None:
    arguments = {"groups": groups, "minibatches": minibatches, "epochs": epochs}
    [expected] = pools[0].run(jobs.reinforce, START, devices=1, **arguments)
    for got in pools[2].run(jobs.reinforce, START, devices=4, **arguments):
        assert _largest_difference(got, expected) < 1e-6


ALGORITHMS = {
    "a critic of its own": {"kind": "two", "module": "critic", "critic": "initial", "minibatches": 2, "epochs": 2},
    "whole steps": {"kind": "pairs", "objective": "dpo", "reference": source(), "minibatches": 2},
    "fewer sequences than ranks": {"kind": "one", "objective": "m2po", "minibatches": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "group_size", "sharded"),
    [
        ("a critic of its own", 1, False),
        ("a critic of its own", 2, True),
        ("whole steps", 2, False),
        ("fewer sequences than ranks", 1, False),
        ("fewer sequences than ranks", 2, True),
    ],
)
def test_four_ranks_train_and_log_what_one_does(
    name: str, group_size: int, sharded: bool, pools: list[RankPool]
) -> None:
    _trains_what_one_does(pools, ALGORITHMS[name], group_size, sharded)


@pytest.mark.slow
def test_a_critic_of_a_hybrid(pools: list[RankPool]) -> None:
    """Ranks of their own: groups refuse states."""
    _trains_what_one_does(pools, {"kind": "two", "module": "critic", "critic": "initial", "model": HYBRID_LAYERS})


def _trains_what_one_does(
    pools: list[RankPool], run: dict[str, Any], group_size: int = 1, sharded: bool = False
) -> None:
    [(expected, steps, validation)] = pools[0].run(train, START, devices=1, **run)
    for got, got_steps, got_validation in pools[2].run(
        train, START, devices=4, group_size=group_size, sharded=sharded, **run
    ):
        # The ranks of a group add up in float32 what belongs to each other's rows; parameters reach 0.6.
        assert _largest_difference(got, expected) < (1e-6 if group_size == 1 else 4e-6)
        for mine, theirs in zip(got_steps, steps, strict=True):
            assert mine.keys() == theirs.keys()
            same = {metric: value for metric, value in theirs.items() if metric != "tokens/s"}
            assert {metric: mine[metric] for metric in same} == pytest.approx(same, rel=1e-4, abs=1e-6)
        assert got_validation == pytest.approx(validation, rel=1e-5)
