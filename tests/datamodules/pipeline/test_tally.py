"""Rewards and lengths of everything that finished, whatever becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from app.batch import UNTRAINABLE_CALLS, Trajectory
from datamodules.filters import Custom
from datamodules.groups import Group
from datamodules.pipeline.gate import StalenessGate
from datamodules.pipeline.stream import Stream
from datamodules.pipeline.tally import Tally
from tests.datamodules.pipeline.producers import Factory


def group(*rewards: float, tokens: int = 2, turns: int = 1) -> Group:
    def turn(episode: int, reward: float) -> Trajectory:
        made: dict[str, Any] = {
            "tokens": [3] * (tokens + 1),
            "loss_mask": [False] + [True] * tokens,
            "behavior_logprobs": [-1.0] * (tokens + 1),
            "versions": [-1] + [0] * tokens,
        }
        return Trajectory(**made, reward=reward, group_id=0, episode_id=episode)

    return Group(0, "p", 0, [turn(episode, reward) for episode, reward in enumerate(rewards) for _ in range(turns)])


def test_a_tally_by_hand() -> None:
    tally = Tally()
    assert tally.take() == {}
    for one in (group(1.0, 0.1 + 0.9), group(0.0, 0.5, turns=3), group(1.0, 0.0), group(0.0, 0.0, tokens=8)):
        tally.finished(one)
    tally.stale(group(1.0, 0.0, tokens=10))
    expected = {"reward": 3.5 / 8, "length": (4 + 12 + 4 + 16) / 8, "solved": 1 / 4, "unsolved": 2 / 4}
    expected["flat"] = 2 / 4  # a sum of parts counts as what it is to rounding
    assert tally.take() == pytest.approx({**expected, "stale_length": 10.0})
    assert tally.take() == {}
    strict = Tally(solved_at=2.0)
    strict.finished(group(1.0))
    assert strict.take() == {"reward": 1.0, "length": 2.0, "solved": 0.0, "unsolved": 1.0, "flat": 1.0}


def test_filtered_groups_count() -> None:
    """The filter keeps high rewards, so that those trained on say nothing of the policy."""
    seen: list[float] = []

    def high(one: Group) -> str | None:
        mean = sum(t.reward for t in one.trajectories) / len(one.trajectories)
        seen.append(mean)
        return None if mean > 7 else "low"

    factory = Factory()
    try:
        producer = factory(max_staleness=0, group_filter=Custom(high))
        taken = producer.collect(2, 30.0)
        found = producer.stream.worth()
    finally:
        factory.close()
    kept = sum(t.reward for one in taken for t in one.trajectories) / 6
    assert len(seen) > 2 and found["reward"] == pytest.approx(sum(seen) / len(seen)) and found["reward"] + 0.5 < kept
    assert found["length"] == 2.0 and found["solved"] == 1.0  # digits and the end of sequence; rewards of 2 to 11


def test_episodes_that_are_cut_off_count_though_their_group_is_filtered_out() -> None:
    """What a filter drops is often what was cut off, whose rewards are all 0."""
    stream = Stream(StalenessGate(2, 0, 100), 2)
    stream.restore(0, {})
    for move, reasons in ((stream.finish, ("stop", "length")), (stream.filter, ("length", "length"))):
        pending, one = stream.admit(), group(1.0, 0.0, turns=2)
        assert pending is not None
        for turn in one.trajectories:
            turn.finish_reason = reasons[turn.episode_id]
        move(pending, one)
    counters = stream.gate.counters()
    assert (counters["accepted"], counters["dropped_filtered"], counters["truncated"]) == (1, 1, 3)


def test_the_books_balance_whatever_a_tally_finds() -> None:
    """A fault of it ends the run, whose last checkpoint must miss no prompt."""
    stream = Stream(StalenessGate(2, 0, 100), 1)
    stream.restore(0, {})
    for move in (stream.finish, stream.filter):
        pending, odd = stream.admit(), group(1.0)
        assert pending is not None
        odd.trajectories[0].metadata[UNTRAINABLE_CALLS] = "none"
        with pytest.raises(TypeError):
            move(pending, odd)
        stream.check()
