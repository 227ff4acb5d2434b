"""Validation beside training rollouts: held back, bypassing the gate, reproducible."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from app.batch import Trajectory
from datamodules.inference import clock as clock_module
from datamodules.inference.protocol import GenerationRequest
from datamodules.pending import Pending
from datamodules.pipeline import producer as producer_module
from datamodules.pipeline.player import EpisodePlayer, Pause
from datamodules.prompts import Prompt
from datamodules.prompts.tokenizers import load_tokenizer
from datamodules.workflows import EpisodeEngine
from tests.datamodules.fake_engine import VOCABULARY, FakeEngine
from tests.datamodules.pipeline.producers import Build, Flow, fail, hang, ids
from tests.helpers.clock import Clock

# ---- validation


def test_validation_holds_training_and_bypasses_the_gate(build: Build) -> None:
    class TwoTurns(Flow):
        async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
            await super().run(engine, prompt)
            return await super().run(engine, prompt)

    during_validation: list[str] = []

    async def slow(request: GenerationRequest) -> None:
        if not request.request_id.startswith("validation/") and producer.evaluating:
            during_validation.append(request.request_id)
        await asyncio.sleep(0.05)

    engine = FakeEngine(slow)
    producer = build(engine, workflow=TwoTurns(), max_staleness=5, max_concurrent=2)
    producer.collect(2, 60.0)
    prompts = [Prompt(id=f"v{i}", tokens=(3, 15)) for i in range(100)]
    groups = producer.evaluate(prompts, 2, 0.5, 30.0)
    assert not during_validation
    assert ids(groups) == [f"v{i}" for i in range(100)]
    assert all(len(group.trajectories) == 2 for group in groups)
    assert {r.temperature for r in engine.seen if r.request_id.startswith("validation/")} == {0.5}
    assert groups[0].trajectories[0].temperature == 0.5
    assert producer.gate.counters()["failed"] == 0
    assert len(producer.collect(2, 60.0)) == 2  # and training goes on


class Held:
    """Holds episodes for a hundred seconds that a test need not live through; a minute is the deadline of one.

    Both clocks are moved on: the event loop's, by which deadlines are, and the one of what they do not count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moved_s = 0.0
        monkeypatch.setattr(clock_module, "awake", self.awake)

    def awake(self) -> float:
        return time.monotonic() + self.moved_s

    async def play(self, workflow: Flow, samples: int) -> list[list[Trajectory]]:
        loop, unpaused, table = asyncio.get_running_loop(), asyncio.Event(), Pending("p")
        now = loop.time
        loop.time = lambda: now() + self.moved_s  # type: ignore[method-assign]
        player = EpisodePlayer(workflow, FakeEngine(), load_tokenizer(f"char:{VOCABULARY}"), None, deadline_s=60.0)
        prompt, pause = Prompt(id="p", tokens=(3, 15)), Pause(unpaused)
        playing = [
            asyncio.create_task(player.play(prompt, name=f"p#{k}", seed="0", sample=k, pause=pause, pending=table))
            for k in range(samples)
        ]
        while not any(one.what == "resume" for one in table.waits.values()):
            await asyncio.sleep(0)
        self.moved_s = 100.0
        await asyncio.sleep(0.3)  # deadlines are looked at meanwhile
        unpaused.set()
        return await asyncio.gather(*playing)


def test_time_an_episode_is_held_does_not_count_against_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [len(one) for one in asyncio.run(Held(monkeypatch).play(Flow(), 1))] == [1]


def test_who_waits_for_a_peer_that_is_held_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the episodes of a group do that are judged together."""
    finished = asyncio.Event()

    class Together(Flow):
        async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
            if engine.sample == 0:
                await finished.wait()
                return await super().run(engine, prompt)
            found = await super().run(engine, prompt)  # held before its request
            finished.set()
            return found

    assert [len(one) for one in asyncio.run(Held(monkeypatch).play(Together(), 2))] == [1, 1]


def test_synchronous_rollouts_are_never_played_beside_validation(build: Build) -> None:
    beside: list[str] = []

    async def slow(request: GenerationRequest) -> None:
        validates = request.request_id.startswith("validation/")
        for _ in range(3):
            if producer.stream._running if validates else producer.evaluating:
                beside.append(request.request_id)
            await asyncio.sleep(0.02)

    producer = build(FakeEngine(slow), batch_size=4)
    for version in range(1, 4):
        producer.collect(4, 60.0)
        producer.publish(version)  # the next batch is admitted at once
        producer.evaluate([Prompt(id=f"v{i}", tokens=(3, 15)) for i in range(5)], 1, 0.0, 60.0)
    assert not beside


def test_validation_is_reproducible_and_greedy_replies_have_a_temperature(build: Build) -> None:
    prompts = [Prompt(id=f"v{i}", tokens=(3, 15)) for i in range(10)]

    def evaluate() -> list[list[int]]:
        groups = build().evaluate(prompts, 1, 0.0, 60.0)
        assert {one.temperature for group in groups for one in group.trajectories} == {1.0}
        return [one.tokens.tolist() for group in groups for one in group.trajectories]

    assert evaluate() == evaluate()


def test_validation_may_end_while_its_waiter_looks_up(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "_INTERRUPT_POLL_S", 0.0)  # it does nothing else
    producer, prompts, interval = build(), [Prompt(id="v", tokens=(3, 15))], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            assert ids(producer.evaluate(prompts, 1, 0.0, 30.0)) == ["v"]
    finally:
        sys.setswitchinterval(interval)


def test_failing_validation_episodes_are_left_out_and_counted(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    async def before(request: GenerationRequest) -> None:
        if "v1#" in request.request_id or "all" in request.request_id:
            await fail()

    producer = build(FakeEngine(before))
    prompts = [Prompt(id=f"v{i}", tokens=(3, 15)) for i in range(4)]
    assert ids(producer.evaluate(prompts, 1, 0.0, 60.0)) == ["v0", "v2", "v3"]
    assert "validation: 1 of 4 episodes failed and are left out; the first: prompt 'v1'" in caplog.text
    with pytest.raises(RuntimeError, match="1 of 1 episodes failed; the first: prompt 'all'"):
        producer.evaluate([Prompt(id="all", tokens=(3,))], 1, 0.0, 60.0)


def test_validation_that_takes_too_long_says_what_is_pending(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time passes once the others have been played."""

    def is_left() -> bool:
        return len(engine.seen) == 3 and [one.prompt_id for one in list(producer.evaluating.values())] == ["v1"]

    async def before(request: GenerationRequest) -> None:
        if "v1#" in request.request_id:
            await hang()

    engine = FakeEngine(before)
    producer = build(engine)
    prompts = [Prompt(id=f"v{i}", tokens=(3, 15)) for i in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(producer_module, "awake", Clock(is_left).monotonic)
        patch.setattr(producer_module, "_INTERRUPT_POLL_S", 0.02)
        with pytest.raises(TimeoutError, match=r"not finished after 60 s .*1 being played, the oldest: 'v1'"):
            producer.evaluate(prompts, 1, 0.0, 60.0)
    assert len(producer.collect(2, 60.0)) == 2
