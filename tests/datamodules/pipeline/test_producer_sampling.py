"""Dynamic sampling and over-sampling with the real producer, and a storm of everything at once."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import threading
from typing import Any

import pytest

from app.batch import LEFT_OUT, Trajectory
from datamodules.filters import Filters, GroupFilter, NoSignal
from datamodules.groups import Group
from datamodules.inference.protocol import GenerationError, GenerationRequest
from datamodules.pipeline.gate import unaccounted
from datamodules.pipeline.limits import Limits
from datamodules.pipeline.rest import Rest
from datamodules.prompts import Prompt
from datamodules.workflows import EpisodeEngine
from tests.datamodules.fake_engine import FakeEngine
from tests.datamodules.pipeline.producers import Build, Flow, Numbered, hang, ids, only, through_a_file, wait_until


class EqualRewards(Flow):
    """All samples of every third prompt get the same reward."""

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        (one,) = await super().run(engine, prompt)
        one.reward = 1.0 if int(prompt.id[1:]) % 3 == 0 else random.random()
        return [one]


class Everything:
    def reason(self, group: Group) -> str | None:
        return "not my taste"


class Broken:
    def reason(self, group: Group) -> str | None:
        raise KeyError("colour")


class Keeps:
    """By a word that is no reason, and not None."""

    def reason(self, group: Group) -> Any:
        return False


# ---- dynamic sampling


def test_filtered_groups_are_counted_named_and_replaced(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    producer = build(workflow=EqualRewards(), batch_size=4, group_filter=NoSignal())
    with caplog.at_level(logging.INFO):
        assert ids(producer.collect(4, 60.0)) == ["p1", "p2", "p4", "p5"]
    counters = producer.gate.counters()
    assert (counters["dropped_filtered"], counters["admitted"], counters["failed"]) == (2, 6, 0)
    assert "group filtered out, prompt 'p0': no signal: the rewards of its 3 episodes are all 1" in caplog.text
    producer.stream.check()


class Circle(Numbered):
    """Six prompts, again and again."""

    def deal(self, index: int) -> Prompt:
        return super().deal(index % 6)


def turns(build: Build, batches: int, **options: Any) -> list[list[str]]:
    """The prompts of six turns each that were played, sorted; two of six never have a signal."""
    played: list[str] = []

    class Noting(EqualRewards):
        async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
            played.append(prompt.id)
            return await super().run(engine, prompt)

    producer = build(workflow=Noting(), source=Circle(), group_filter=NoSignal(), batch_size=4, **options)
    for version in range(1, batches + 1):
        before = len(played)
        producer.collect(4, 60.0)
        played[before:] = [*sorted(set(played[before:])), "|"]
        producer.publish(version)
    producer.stream.check()
    return ["".join(part.split("|")).split() for part in " ".join(played).split("|")][:batches]


def test_prompts_without_signal_sit_out_ever_more_turns(build: Build) -> None:
    """p0 and p3 are dealt in every turn, and played in the first, third and seventh; then in every fourth."""
    always, tired = ["p1", "p2", "p4", "p5"], [f"p{k}" for k in range(6)]
    seen = turns(build, 16, limits=Limits(rest=3))
    assert [number for number, played in enumerate(seen) if played != always] == [0, 2, 6, 10, 14]
    assert all(seen[number] == tired for number in (0, 2, 6, 10, 14))
    assert turns(build, 4) == [tired] * 4


def test_rest_is_part_of_the_checkpoint_and_ends_with_a_signal(build: Build) -> None:
    options: dict[str, Any] = {"source": Circle(), "group_filter": NoSignal(), "batch_size": 4}
    producer = build(workflow=EqualRewards(), limits=Limits(rest=7), **options)
    producer.collect(4, 60.0)
    state = through_a_file(producer.state_dict())
    assert state["rest"] == {"p0": [1, 1], "p3": [1, 1]}
    again = build(workflow=EqualRewards(), limits=Limits(rest=7), version=1, state=state, **options)
    assert ids(again.collect(4, 60.0)) == ["p1", "p2", "p4", "p5"] and again.gate.counters()["rested"] == 2
    again.publish(2)
    assert ids(again.collect(4, 60.0)) == ["p1", "p2", "p4", "p5"] and again.gate.counters()["dropped_filtered"] == 4
    assert again.state_dict()["rest"] == {"p0": [2, 3], "p3": [2, 3]}
    lively = build(limits=Limits(rest=1), version=3, state=through_a_file(again.state_dict()), **options)
    assert ids(lively.collect(4, 60.0)) == ["p1", "p2", "p4", "p5"]  # what is longer than the bound is cut
    lively.publish(4)
    assert ids(lively.collect(4, 60.0)) == ["p0", "p1", "p2", "p3"] and lively.state_dict()["rest"] == {}
    lively.stream.check()


def test_what_rests_is_forgotten_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datamodules.pipeline.rest._REMEMBERED", 2)
    rest = Rest(7)
    for prompt in ("a", "b", "a", "c"):
        rest.filtered(prompt)
    assert [rest.passes(prompt) for prompt in ("a", "b", "c", "c")] == [True, False, True, False]


def test_filtering_everything_is_no_endless_loop(build: Build) -> None:
    producer = build(group_filter=Everything(), limits=Limits(max_filtered=20))
    said = r"20 groups in a row \(limits.max_filtered\) were filtered out, the last one of prompt 'p19': not my taste;"
    with pytest.raises(RuntimeError, match=said):
        producer.collect(2, 60.0)
    assert producer.gate.counters()["dropped_filtered"] == 20


def test_a_filter_that_fails_costs_the_group(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    producer = build(group_filter=Broken(), limits=Limits(max_failures=3))
    with pytest.raises(RuntimeError, match=r"3 groups in a row \(limits.max_failures\) .* 'p2': KeyError: 'colour'"):
        producer.collect(2, 60.0)
    assert "group dropped, prompt 'p0': KeyError: 'colour'" in caplog.text
    producer = build(group_filter=Keeps(), limits=Limits(max_failures=3))
    with pytest.raises(RuntimeError, match=r"'p2': TypeError: Keeps.reason returned False for prompt 'p2'; it must"):
        producer.collect(2, 60.0)


def test_skipping_everything_is_no_endless_loop(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    class Long(Numbered):
        def deal(self, index: int) -> Prompt:
            return Prompt(id=f"p{index}", text="1" * 30)

    monkeypatch.setattr("datamodules.pipeline.limits._MAX_SKIPPED", 50)
    producer = build(source=Long(), max_context=16, long_prompts="skip")
    with pytest.raises(RuntimeError, match="50 prompts in a row were too long for the model's context and skipped"):
        producer.collect(2, 60.0)
    assert producer.gate.counters()["skipped"] == 50


class FirstTeachesNothing(GroupFilter):
    """Leaves out of training the first episode of each group."""

    def reason(self, group: Group) -> str | None:
        return None

    def left_out(self, group: Group) -> dict[int, str]:
        return {group.trajectories[0].episode_id: "is the first"}


def test_single_episodes_are_left_out(build: Build) -> None:
    producer = build(group_filter=Filters([NoSignal(), FirstTeachesNothing()]))
    for group in producer.collect(2, 60.0):
        assert [one.metadata.get(LEFT_OUT) for one in group.trajectories] == ["is the first", None, None]
    assert producer.stream.worth()["left_out"] == pytest.approx(1 / 3)
    lone = build(group_filter=FirstTeachesNothing(), group_size=1, limits=Limits(max_filtered=2))
    with pytest.raises(
        RuntimeError, match="all of its 1 episodes are left out: is the first; nothing is left to train"
    ):
        lone.collect(2, 60.0)


# ---- over-sampling


def test_the_first_to_finish_are_taken_and_the_rest_played_first_in_the_next_batch(build: Build) -> None:
    slow = {0, 3}

    async def hold(request: GenerationRequest) -> None:
        if int(re.split(r"[p#]", request.request_id)[1]) in slow:
            await hang()

    engine = FakeEngine(hold)
    producer = build(engine, batch_size=4, over_sampling=1.5)
    assert ids(producer.collect(4, 60.0)) == ["p1", "p2", "p4", "p5"]
    wait_until(lambda: engine.running == 0)  # the surplus was cancelled in the engine too
    assert producer.state_dict()["unfinished"] == [0, 3]
    slow.clear()
    producer.publish(1)
    assert {"p0", "p3"} <= set(ids(producer.collect(4, 60.0)))
    counters = producer.gate.counters()
    assert counters["requeued"] >= 2 and counters["failed"] == 0 and unaccounted(counters) == 0
    producer.stream.check()


def test_surplus_survives_a_restart(build: Build) -> None:
    producer = build(FakeEngine(only({0, 3}, hang)), batch_size=4, over_sampling=1.5)
    taken = ids(producer.collect(4, 60.0))
    wait_until(lambda: not producer.stream.running())
    again = build(batch_size=4, over_sampling=1.5, version=1, state=through_a_file(producer.state_dict()))
    taken += ids(again.collect(4, 60.0))
    assert {"p0", "p3"} <= set(taken) and len(set(taken)) == 8
    assert again.gate.counters()["requeued"] >= 2 and unaccounted(again.gate.counters()) == 0


# ---- all of it at once


class Storm:
    """An engine whose replies take 0 to 3 turns of the event loop, fail or hang, and the oddest groups."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.events = 0

    async def before(self, request: GenerationRequest) -> None:
        self.events += 1
        luck = self.rng.random()
        if luck < 0.01:
            raise GenerationError("bad luck")
        if luck < 0.015:
            await hang()
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)

    def reason(self, group: Group) -> str | None:
        return "bad luck" if self.rng.random() < 0.1 else None


@pytest.mark.parametrize(("max_staleness", "over_sampling"), [(0, 1.0), (0, 1.5), (2, 1.0), (2, 1.34)])
def test_a_storm_of_events_crashes_and_checkpoints_at_random_moments(
    build: Build, max_staleness: int, over_sampling: float
) -> None:
    """Every few batches the process "dies" and goes on from a checkpoint taken in mid-flight, weights and all."""
    rng = random.Random(max_staleness)
    storm = Storm(max_staleness)
    options: dict[str, Any] = {
        "batch_size": 3,
        "max_staleness": max_staleness,
        "max_concurrent": 7,
        "over_sampling": over_sampling,
        "limits": Limits(max_failures=1000),
        "group_filter": storm,
    }
    producer = build(FakeEngine(storm.before), **options)
    version, trained = 0, dict[int, int]()
    saved: Any = (0, {}, dict(trained))
    crashes = taken_up = 0
    while storm.events < 2500:
        groups = _collect(producer, 3)
        for group in groups:
            assert group.index not in trained, "trained twice"
            assert 0 <= version - group.admitted_at <= max_staleness, "beyond the bound"
            assert len(group.trajectories) == 3, "not whole"
            trained[group.index] = version
        producer.stream.check()
        if rng.random() < 0.3:  # in mid-flight, the batch not yet trained on
            saved = (version, through_a_file(producer.state_dict(groups)), dict(trained.items() - _of(groups, version)))
        elif rng.random() < 0.3:  # some of the batch's steps being done, the others follow after a crash
            saved = (version, through_a_file(producer.state_dict(under_way=groups)), dict(trained))
        version += 1
        producer.player.engine.version = version
        producer.publish(version)
        if rng.random() < 0.3:  # in mid-flight, at the end of a batch
            saved = (version, through_a_file(producer.state_dict()), dict(trained))
        if rng.random() < 0.15:
            crashes += 1
            producer.close()
            version, state, trained = saved[0], saved[1], dict(saved[2])
            producer = build(FakeEngine(storm.before), version=version, state=state, **options)
            producer.stream.check()
            if state and "under_way" in state:
                taken_up += 1
                assert {(group.index, version) for group in producer.stream.taken} <= trained.items()
                version += 1
                producer.player.engine.version = version
                producer.publish(version)
    assert crashes > 2 and taken_up > 0
    producer.close()
    counters = producer.gate.counters()
    state = producer.state_dict()
    kept = {group[0] for group in state["ready"].get("groups", [])} | set(state["unfinished"])
    gone = counters["dropped_stale"] + counters["dropped_filtered"] + counters["failed"]
    assert counters["trained"] == len(trained) and not kept & trained.keys()
    assert state["position"] == len(trained) + len(kept) + gone  # every prompt dealt: trained, dropped or in the state
    assert gone > 0


def _of(groups: list[Group], version: int) -> set[tuple[int, int]]:
    return {(group.index, version) for group in groups}


def _collect(producer: Any, count: int) -> list[Group]:
    """Collects; whenever nothing moves any more, everything that hangs is played again."""
    done = threading.Event()

    def release() -> None:
        seen = -1
        while not done.wait(0.05):
            now = producer.gate.counters()["admitted"] + producer.stream.ready
            if now == seen:
                producer.requeue_stalled(1000)
            seen = now

    helper = threading.Thread(target=release)
    helper.start()
    try:
        groups: list[Group] = producer.collect(count, 60.0)
        return groups
    finally:
        done.set()
        helper.join()
