"""The stream over restarts: nothing lost, nothing twice."""

from __future__ import annotations

import torch

from tests.datamodules.fake_engine import FakeEngine
from tests.datamodules.pipeline.producers import Build, hang, ids, only, through_a_file, wait_until

# ---- state


def test_the_stream_goes_on_without_loss_or_repetition(build: Build) -> None:
    """Stops at a moment with finished, running and failed groups; what follows must be every other prompt once."""
    engine = FakeEngine(only({5, 7}, hang))
    producer = build(engine, batch_size=2, max_staleness=3)
    taken = producer.collect(2, 60.0)
    wait_until(lambda: producer.gate.counters()["queued"] == 4)
    engine.version = 1
    producer.publish(1)
    wait_until(lambda: producer.gate.counters()["queued"] == 6)
    state = producer.state_dict()
    assert state["unfinished"] == [5, 7] and state["position"] == 10
    state = through_a_file(state)

    again = build(FakeEngine(), batch_size=2, max_staleness=3, version=1, state=state)
    assert again.gate.counters() == {**producer.gate.counters(), "running": 0, "admitted": 8}
    for version in range(1, 5):
        taken += again.collect(2, 60.0)
        again.publish(version + 1)
    numbers = [group.index for group in taken]
    assert sorted(numbers) == list(range(10))
    restored = [group for group in taken if group.index in (2, 3)]
    original = [group for group in producer.stream._ready if group.index in (2, 3)]
    for mine, theirs in zip(restored, original):
        for a, b in zip(mine.trajectories, theirs.trajectories):
            assert torch.equal(a.tokens, b.tokens) and torch.equal(a.behavior_logprobs, b.behavior_logprobs)
            assert torch.equal(a.versions, b.versions) and torch.equal(a.loss_mask, b.loss_mask)
            assert (a.reward, a.episode_id, a.metadata) == (b.reward, b.episode_id, b.metadata)


def test_groups_of_newer_weights_or_another_size_are_played_again(build: Build) -> None:
    producer = build(batch_size=2, max_staleness=1, version=3)
    producer.collect(2, 60.0)
    wait_until(lambda: producer.gate.counters()["queued"] == 2)
    state = producer.state_dict()
    for options in ({"version": 1}, {"version": 3, "group_size": 2}):
        again = build(batch_size=2, max_staleness=1, state=state, **options)
        groups = again.collect(2, 60.0)
        assert ids(groups) == ["p2", "p3"]
        assert [group.admitted_at for group in groups] == [options["version"]] * 2


def test_groups_in_training_are_saved_as_if_not_collected(build: Build) -> None:
    producer = build(batch_size=2)
    groups = producer.collect(2, 60.0)
    again = build(batch_size=2, state=producer.state_dict(in_training=groups))
    assert ids(again.collect(2, 60.0)) == ["p0", "p1"]


def test_what_finished_groups_were_worth_is_told_by_the_run_that_goes_on(build: Build) -> None:
    """Of a synchronous stream the next batch may be finished when the state is taken: nothing else would be told."""
    engine = FakeEngine()
    producer = build(engine, batch_size=2)
    producer.collect(2, 60.0)
    producer.stream.worth()
    engine.version = 1
    producer.publish(1)
    wait_until(lambda: producer.gate.counters()["queued"] == 2)
    again = build(batch_size=2, version=1, state=through_a_file(producer.state_dict()))
    again.collect(2, 60.0)
    worth = producer.stream.worth()
    assert worth["reward"] > 0 and again.stream.worth() == worth and again.stream.worth() == {}
