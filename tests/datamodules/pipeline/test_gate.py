"""The staleness gate and the stream's books around it: never beyond the bound, never starved, books that add up."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.pending import Pending
from datamodules.pipeline.gate import StalenessGate, unaccounted
from datamodules.pipeline.stream import Stream
from tests.datamodules.pipeline.simulation import EVENTS, Simulation, group_of


@pytest.mark.slow
def test_forty_thousand_random_events_never_exceed_the_bound_and_never_starve() -> None:
    """Slow episodes, failures, filters, stalls, surplus, publishes and crashes, in 65 runs of all shapes of gate."""
    rng = random.Random(0)
    ever: Counter[str] = Counter()
    oldest: dict[int, int] = {}
    while sum(ever[name] for name in EVENTS) < 40_000:
        staleness = rng.choice([0, 0, 1, 2, 4])
        simulation = Simulation(rng, rng.randint(1, 6), staleness, rng.randint(1, 24), rng.choice([1.0, 1.5, 2.0]))
        for _ in range(1000):
            simulation.step()
        simulation.finish_a_batch()
        oldest[staleness] = max(oldest.get(staleness, 0), simulation.ever.pop("oldest"))
        ever.update(simulation.ever)
    assert all(ever[name] > 50 for name in (*EVENTS, "surplus", "stale")), ever
    assert oldest == {0: 0, 1: 1, 2: 2, 4: 4}  # and all of the bound is used


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    max_concurrent=st.one_of(st.none(), st.integers(1, 12)),
    over_sampling=st.floats(1.0, 3.0),
)
def test_no_shape_of_gate_starves(
    seed: int, batch_size: int, max_staleness: int, max_concurrent: int | None, over_sampling: float
) -> None:
    simulation = Simulation(random.Random(seed), batch_size, max_staleness, max_concurrent, over_sampling)
    for _ in range(200):
        simulation.step()
    simulation.finish_a_batch()


def test_the_gate_uses_all_of_its_bound() -> None:
    simulation = Simulation(random.Random(0), 2, 3, 100)
    for _ in range(20):
        while simulation.admit():
            pass
        while simulation.playing:
            simulation.finish()
        simulation.train()
    assert simulation.ever["oldest"] == 3 and simulation.ever["stale"] == 0


def test_synchronous_admits_exactly_one_batch_a_version() -> None:
    gate = StalenessGate(batch_size=3, max_staleness=0)
    for version in range(4):
        assert [gate.admit() for _ in range(4)] == [version] * 3 + [None]
        for _ in range(3):
            gate.finish()
        gate.collect(3)
        assert gate.admit() is None  # trained on, but the weights are not out yet
        gate.publish(version + 1)


def test_over_sampling_starts_more_and_gives_the_slowest_back() -> None:
    stream = Stream(StalenessGate(batch_size=4, max_staleness=0, over_sampling=1.5), group_size=2)
    assert stream.gate.max_concurrent == 6
    first = [stream.admit() for _ in range(7)]
    assert first.pop() is None
    playing = [one for one in first if one is not None]
    assert [one.index for one in playing] == list(range(6))
    for number in (5, 1, 4):
        assert stream.finish(playing[number], group_of(playing[number])) == []
    surplus = stream.finish(playing[2], group_of(playing[2]))
    assert [one.index for one in surplus] == [0, 3]
    assert stream.finish(playing[0], group_of(playing[0])) == []  # it came too late and changes nothing
    assert stream.admit() is None
    taken = stream.take(4)
    assert taken is not None and [group.index for group in taken] == [1, 2, 4, 5]
    stream.gate.publish(1)
    again = [stream.admit() for _ in range(6)]
    assert [(one.index, one.attempt) for one in again if one] == [(0, 1), (3, 1), (6, 0), (7, 0), (8, 0), (9, 0)]
    counters = stream.gate.counters()
    assert (counters["requeued"], counters["admitted"], counters["trained"]) == (2, 12, 4)
    stream.check()


def batch_times(over_sampling: float, batches: int) -> tuple[list[float], set[int], Stream]:
    """Of a synchronous run in which every fiftieth prompt takes ten times as long: seconds a batch, by a clock of its
    own, and the prompts that were trained."""
    stream = Stream(StalenessGate(batch_size=8, max_staleness=0, over_sampling=over_sampling), group_size=2)
    rng, now, began, times, trained = random.Random(0), 0.0, 0.0, list[float](), set[int]()
    playing: list[tuple[float, int, Pending]] = []
    while len(times) < batches:
        while (one := stream.admit()) is not None:
            seconds = rng.uniform(0.8, 1.2) * (10 if one.index % 50 == 7 else 1)
            heapq.heappush(playing, (now + seconds, stream.gate.counters()["admitted"], one))
        now, _, one = heapq.heappop(playing)
        stream.finish(one, group_of(one))
        stream.check()
        if (taken := stream.take(8)) is not None:
            trained |= {group.index for group in taken}
            stream.release()
            times.append(now - began)
            began = now
            stream.gate.publish(len(times))
    return times, trained, stream


def test_slow_prompts_are_trained_beside_each_other_and_do_not_take_the_spare_places() -> None:
    """Given back to be played first, they filled all of them, and a batch took as long as without over-sampling."""
    plain, _, _ = batch_times(1.0, 400)
    times, trained, stream = batch_times(1.5, 400)
    assert sum(times[200:]) < 0.6 * sum(plain[200:])
    long = sum(one > 5.0 for one in times)
    assert 3 <= long <= 20 and long < 0.4 * sum(one > 5.0 for one in plain)
    slow = {index for index in range(7, max(trained), 50)}
    assert len(slow - trained) <= 3 * 8 and len(slow & trained) > 30, "all but the last are trained"
    assert len(stream.state_dict()["unfinished"]) <= 8 * 4


def test_a_long_round_goes_on_from_a_checkpoint() -> None:
    """What is played to the end there is given up neither by the books that follow."""
    _, _, stream = batch_times(1.5, 60)
    while not any(one.kept for one in stream.running()):
        if (one := stream.admit()) is None:
            one = min(stream.running(), key=lambda one: (one.index % 50 == 7, one.index))
            stream.finish(one, group_of(one))
            if stream.take(8) is not None:
                stream.release()
                stream.gate.publish(stream.gate.version + 1)
    again = Stream(StalenessGate(batch_size=8, max_staleness=0, over_sampling=1.5), group_size=2)
    again.restore(stream.gate.version, stream.state_dict())
    again.check()
    while again.take(8) is None:
        while again.admit() is not None:
            pass
        one = again.running()[0]
        again.finish(one, group_of(one))
        again.check()


def test_without_over_sampling_nothing_is_surplus() -> None:
    stream = Stream(StalenessGate(batch_size=2, max_staleness=1), group_size=2)
    playing = [one for _ in range(4) if (one := stream.admit()) is not None]
    assert len(playing) == 4
    assert [stream.finish(one, group_of(one)) for one in playing] == [[]] * 4


def test_what_is_slow_is_not_stale_where_no_weights_change() -> None:
    """Rolled out and not trained on, every batch passes as a version; else only quick episodes would be left."""
    stream = Stream(StalenessGate(batch_size=1, max_staleness=1), group_size=2)
    slow, quick = stream.admit(), stream.admit()
    assert slow is not None and quick is not None
    for version in range(1, 5):
        stream.finish(quick, group_of(quick))
        assert stream.take(1) is not None
        stream.release()
        stream.gate.publish(version)
        stream.renew()
        again = stream.admit()
        assert again is not None
        quick = again
    stream.finish(slow, group_of(slow))
    (taken,) = stream.take(1) or [None]
    assert taken is not None and taken.index == slow.index and taken.admitted_at == 4
    assert stream.gate.counters()["dropped_stale"] == 0
    stream.check()


@pytest.mark.parametrize("drop", ["failed", "filtered", "skipped", "rested", "requeued", "stale"])
def test_every_drop_gives_its_place_back_and_is_counted(drop: str) -> None:
    gate = StalenessGate(batch_size=1, max_staleness=0, max_concurrent=1)
    assert gate.admit() == 0 and gate.room() == 0
    if drop == "stale":
        gate.finish()
        gate.drop_stale()
    else:
        gate.drop(drop)  # type: ignore[arg-type]
    assert gate.room() == 1 and gate.admit() == 0
    name = {"filtered": "dropped_filtered", "stale": "dropped_stale"}.get(drop, drop)
    counted = {key: count for key, count in gate.counters().items() if count}
    assert counted == {"admitted": 2, "running": 1, name: 1}
    assert unaccounted(gate.counters()) == 0


def test_a_policy_that_starts_at_a_later_version_has_no_credit() -> None:
    gate = StalenessGate(batch_size=4, max_staleness=1, max_concurrent=1000)
    gate.open(version=100)
    assert gate.room() == 8
    assert gate.counters()["accepted"] == 0


def test_resume_keeps_counters_and_places() -> None:
    gate = StalenessGate(batch_size=2, max_staleness=1, max_concurrent=10)
    for _ in range(4):
        gate.admit()
    for _ in range(3):
        gate.finish()
    gate.drop("failed")
    gate.collect(2)
    gate.publish(1)
    again = StalenessGate(batch_size=2, max_staleness=1, max_concurrent=10)
    again.open(1, queued=1, counters=gate.counters())
    assert again.counters() == gate.counters()
    assert again.room() == gate.room() == 3


def test_a_batch_under_way_counts_as_trained() -> None:
    gate = StalenessGate(batch_size=2, max_staleness=1)
    for _ in range(3):
        gate.admit()
        gate.finish()
    gate.collect(2)
    again = StalenessGate(batch_size=2, max_staleness=1)
    again.open(0, queued=1, counters=gate.counters(), under_way=True)
    assert again.room() == gate.room() == 1
    assert again.counters() == gate.counters()
    other = StalenessGate(batch_size=2, max_staleness=1)
    other.open(100, queued=1, under_way=True)  # by a run whose counters are not known
    assert other.room() == 1


def test_books_that_do_not_balance_are_noticed() -> None:
    assert unaccounted({**StalenessGate(1, 0).counters(), "admitted": 5, "trained": 3}) == 2
    stream = Stream(StalenessGate(batch_size=2, max_staleness=0), group_size=2)
    stream.admit()
    stream.check()
    stream._running.clear()
    with pytest.raises(RuntimeError, match="books do not balance: 1 prompts dealt, 0 to be played again, 0 running"):
        stream.check()


def test_impossible_moves_raise() -> None:
    gate = StalenessGate(batch_size=1, max_staleness=0, max_concurrent=1)
    for move in (gate.finish, lambda: gate.drop("failed"), gate.drop_stale, lambda: gate.collect(1)):
        with pytest.raises(RuntimeError, match="cannot leave"):
            move()
    gate.publish(2)
    with pytest.raises(ValueError, match="version 1 after 2"):
        gate.publish(1)
    for name, arguments in (
        ("batch_size", (0, 0, 1)),
        ("max_staleness", (1, -1, 1)),
        ("max_concurrent", (1, 0, 0)),
        ("over_sampling", (1, 0, 1, 0.9)),
    ):
        with pytest.raises(ValueError, match=name):
            StalenessGate(*arguments)
