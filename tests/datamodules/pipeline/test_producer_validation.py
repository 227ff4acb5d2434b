"""Validation beside training rollouts: held back, bypassing the gate, reproducible."""

from __future__ import annotations

import asyncio
import sys

import pytest

from app.batch import Trajectory
from datamodules.inference.protocol import GenerationRequest
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


def test_time_an_episode_is_held_does_not_count_against_its_deadline() -> None:
    async def play() -> list[Trajectory]:
        unpaused = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, unpaused.set)
        player = EpisodePlayer(Flow(), FakeEngine(), load_tokenizer(f"char:{VOCABULARY}"), None, deadline_s=0.5)
        return await player.play(Prompt(id="p", tokens=(3, 15)), name="p#0", seed="0", pause=Pause(unpaused))

    assert len(asyncio.run(play())) == 1


def test_who_waits_for_a_peer_that_is_held_is_not_late() -> None:
    """As the episodes of a group do that are judged together."""
    finished = asyncio.Event()

    class Together(Flow):
        async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
            if engine.sample == 0:
                await finished.wait()
                return await super().run(engine, prompt)
            await asyncio.sleep(0.2)
            found = await super().run(engine, prompt)  # held before its request
            finished.set()
            return found

    async def play() -> list[list[Trajectory]]:
        unpaused = asyncio.Event()
        asyncio.get_running_loop().call_later(1.5, unpaused.set)
        player = EpisodePlayer(Together(), FakeEngine(), load_tokenizer(f"char:{VOCABULARY}"), None, deadline_s=0.8)
        prompt, pause = Prompt(id="p", tokens=(3, 15)), Pause(unpaused)
        return await asyncio.gather(
            *(player.play(prompt, name=f"p#{k}", seed="0", sample=k, pause=pause) for k in range(2))
        )

    assert [len(one) for one in asyncio.run(play())] == [1, 1]


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
        patch.setattr(producer_module, "time", Clock(is_left))
        with pytest.raises(TimeoutError, match=r"not finished after 60 s .*1 being played, the oldest: 'v1'"):
            producer.evaluate(prompts, 1, 0.0, 60.0)
    assert len(producer.collect(2, 60.0)) == 2
