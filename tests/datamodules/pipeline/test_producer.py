"""The producer against an engine that is slow, fails or hangs on demand."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from app.batch import Trajectory
from datamodules.filters import GroupFilter
from datamodules.groups import Group, to_batch
from datamodules.inference.protocol import GenerationRequest
from datamodules.pipeline import producer as producer_module
from datamodules.pipeline.limits import FailureLimits, Limits
from datamodules.prompts import ArithmeticPrompts, Prompt
from datamodules.rewards import RewardOptions, RewardPool
from datamodules.workflows import EpisodeEngine, RLVRWorkflow
from datamodules.workflows.base import Misfit
from tests.datamodules.fake_engine import FakeEngine
from tests.datamodules.pipeline.producers import (
    Build,
    Collecting,
    Flow,
    Numbered,
    fail,
    hang,
    ids,
    only,
    skip,
    wait_until,
)
from tests.datamodules.rewards.reward_functions import misbehave

# ---- order, ids, seeds
from tests.helpers.clock import Clock


def test_synchronous_batches_come_in_prompt_order_and_are_reproducible(build: Build) -> None:
    async def slow(request: GenerationRequest) -> None:  # later prompts finish first
        await asyncio.sleep(0.02 / (1 + len(request.tokens) + request.tokens[0]))

    def roll() -> list[Any]:
        engine = FakeEngine(slow)
        producer = build(engine, batch_size=4)
        seen = []
        for version in range(4):
            groups = producer.collect(4, 60.0)
            assert [group.admitted_at for group in groups] == [version] * 4
            seen.append([(g.prompt_id, [t.tokens.tolist() for t in g.trajectories]) for g in groups])
            engine.version = version + 1
            producer.publish(version + 1)
        requested = [request.request_id for request in engine.seen]
        assert requested == sorted(requested, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
        return seen

    first = roll()
    assert [name for batch in first for name, _ in batch] == [f"p{i}" for i in range(16)]
    assert first == roll()


def test_ids_are_unique_and_groups_whole(build: Build) -> None:
    producer = build(batch_size=5, max_staleness=2)
    groups = producer.collect(5, 60.0) + producer.collect(5, 60.0)
    batch = to_batch(groups)
    assert batch.group_ids.unique().numel() == 10
    assert batch.episode_ids.unique().numel() == 30
    assert all(len(group.trajectories) == 3 for group in groups)
    assert all(one.group_id == group.index for group in groups for one in group.trajectories)
    replies = [one.tokens[-2].item() for group in groups for one in group.trajectories]
    assert len(set(replies)) > 5  # samples have seeds of their own


def test_runs_ahead_within_the_bound_and_drops_what_grew_old(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    producer = build(engine, batch_size=2, max_staleness=1)
    producer.collect(2, 60.0)
    wait_until(lambda: producer.gate.counters()["queued"] == 2)
    time.sleep(0.05)
    counted = {name: count for name, count in producer.gate.counters().items() if count}
    assert counted == {"admitted": 4, "accepted": 4, "trained": 2, "queued": 2}
    producer.publish(2)  # the two queued ones are two versions old
    with caplog.at_level(logging.INFO):
        groups = producer.collect(2, 60.0)
    assert [group.admitted_at for group in groups] == [2, 2]
    assert producer.gate.counters()["dropped_stale"] == 2
    assert "2 groups dropped as stale at version 2: 'p2' (version 0)" in caplog.text


def test_no_more_than_max_concurrent_groups_run(build: Build) -> None:
    most = 0

    async def watch(request: GenerationRequest) -> None:
        nonlocal most
        await asyncio.sleep(0.001)
        most = max(most, engine.running)

    engine = FakeEngine(watch)
    producer = build(engine, batch_size=8, max_concurrent=2)
    assert len(producer.collect(8, 60.0)) == 8
    assert most == 2 * 3


# ---- failures


def test_a_failing_sample_costs_its_group_only(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    async def fail_once() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            await fail()
        await asyncio.sleep(0.01)

    engine = FakeEngine(only({1}, fail_once))
    producer = build(engine, batch_size=3)
    assert ids(producer.collect(3, 60.0)) == ["p0", "p2", "p3"]
    assert producer.gate.counters()["failed"] == 1
    assert "group dropped, prompt 'p1': GenerationError: the server caught fire" in caplog.text
    assert engine.running == 0  # its other samples were cancelled


def test_a_bad_reward_costs_its_group_only(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    producer = build(
        batch_size=4,
        source=Numbered({1: "segfault"}),
        workflow=RLVRWorkflow(max_new_tokens=4),
        pool=RewardPool(misbehave),
    )
    groups = producer.collect(4, 60.0)
    assert ids(groups) == ["p0", "p2", "p3", "p4"]
    assert all(one.reward == 1.0 for group in groups for one in group.trajectories)  # the length of one digit
    assert producer.gate.counters()["failed"] == 1
    assert "group dropped, prompt 'p1': RewardError: reward of prompt 'p1' was lost: its worker" in caplog.text


def test_an_episode_that_never_ends_costs_its_group_only(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    producer = build(FakeEngine(only({0}, hang)), episode_deadline_s=60.0)
    trainer = Collecting(producer)
    wait_until(lambda: producer.stream.ready == 1)
    skip(producer, 60.0)
    trainer.done()
    assert ids(trainer.groups) == ["p1", "p2"]
    assert "'p0': EpisodeError: the episode was not over after 60 s" in caplog.text


class Wrong(Flow):
    """Returns what no one can train on, for one prompt."""

    def __init__(self, wrong: Any) -> None:
        self.wrong = wrong

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        result = await super().run(engine, prompt)
        return self.wrong(result) if prompt.id == "p0" else result


def _with(**fields: Any) -> Callable[[list[Trajectory]], list[Trajectory]]:
    def change(result: list[Trajectory]) -> list[Trajectory]:
        for name, value in fields.items():
            setattr(result[0], name, value)
        return result

    return change


def _raising(error: BaseException) -> Callable[[list[Trajectory]], list[Trajectory]]:
    def throw(result: list[Trajectory]) -> list[Trajectory]:
        raise error

    return throw


class Strange(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("not even a text")


_LOOP: list[Any] = []
_LOOP.append(_LOOP)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (_raising(asyncio.CancelledError()), r"'p0': EpisodeError: Wrong\.run raised CancelledError$"),
        (_raising(SystemExit(4)), r"'p0': EpisodeError: Wrong\.run raised SystemExit: 4$"),
        (_raising(KeyboardInterrupt()), r"'p0': EpisodeError: Wrong\.run raised KeyboardInterrupt$"),
        (_raising(Strange()), r"'p0': EpisodeError: Wrong\.run raised Strange$"),
        (_raising(ValueError("x" * 10**6)), r"'p0': ValueError: x{1000,2000}\.\.\. at test_producer.py:\d+$"),
        (_raising(ValueError("half \ud83d")), r"'p0': ValueError: half \\ud83d at test_producer.py:\d+$"),
        (_with(metadata={("a", 1): 2}), r"metadata: its key \('a', 1\) is a tuple, which JSON cannot have as a key"),
        (_with(metadata={"a": [{b"k": 1}]}), r"metadata\['a'\]: its key b'k' is a bytes"),
        (_with(metadata={"a": _LOOP}), r"metadata\['a'\]: nested more than 50 levels deep"),
        (_with(metadata=None), r"metadata: must be a dictionary, this is a NoneType"),
        (lambda result: [], "Wrong.run returned an empty list"),
        (lambda result: result[0], "Wrong.run returned Trajectory"),
        (_with(reward=float("nan")), "rewards: nan"),
        (_with(tokens=torch.tensor([3, 15, 99, 1])), "id 99 .* is outside the model's vocabulary of 16"),
        (_with(behavior_logprobs=torch.full((4,), float("-inf"))), "behavior_logprobs: -inf"),
    ],
)
def test_what_cannot_be_trained_on_costs_its_group_only(
    build: Build, caplog: pytest.LogCaptureFixture, wrong: Any, said: str
) -> None:
    producer = build(workflow=Wrong(wrong))
    assert ids(producer.collect(2, 60.0)) == ["p1", "p2"]
    assert re.search(said, caplog.text, re.MULTILINE), caplog.text
    assert producer.gate.counters()["failed"] == 1
    producer.stream.check()
    with pytest.raises(RuntimeError, match=r"every episode failed|1 of 1 episodes failed"):
        producer.evaluate([Prompt(id="p0", text="0=", tokens=(3,))], 1, 0.0, 60.0)


def test_halves_of_characters_in_metadata_are_escaped(build: Build) -> None:
    told = {"said \ud83d": ["half \ud83d", {"deep": ("\ud83d", 1.5)}], "object": object}
    producer = build(workflow=Wrong(_with(metadata=told)))
    (group, _) = producer.collect(2, 60.0)
    assert group.trajectories[0].metadata == {
        "said \\ud83d": ["half \\ud83d", {"deep": ["\\ud83d", 1.5]}],
        "object": object,
    }


class CancelsItself(Flow):
    """Its own task is cancelled by what it awaits, as cancel scopes of some libraries do."""

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        if prompt.id == "p0":
            inner = asyncio.create_task(hang())
            await asyncio.sleep(0)
            inner.cancel()
            await inner
        return await super().run(engine, prompt)


class ExitsInATask(Flow):
    """A task of its own leaves by sys.exit, twice: once somebody waits for it."""

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        if prompt.id == "p0":
            unwatched = asyncio.create_task(self.leave())
            await asyncio.gather(self.leave(), hang())
            await unwatched
        return await super().run(engine, prompt)

    async def leave(self) -> None:
        await asyncio.sleep(0)
        raise SystemExit(4)


class Exits(GroupFilter):
    """A filter that leaves by sys.exit for one group."""

    def reason(self, group: Group) -> str | None:
        if group.prompt_id == "p0":
            raise SystemExit("no more")
        return None


def test_a_cancellation_that_nobody_asked_for_and_an_exit_cost_their_group(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    producer = build(workflow=CancelsItself())
    assert ids(producer.collect(2, 60.0)) == ["p1", "p2"]
    producer = build(workflow=ExitsInATask())
    assert ids(producer.collect(2, 60.0)) == ["p1", "p2"]
    producer = build(group_filter=Exits())
    assert ids(producer.collect(2, 60.0)) == ["p1", "p2"]
    assert "'p0': EpisodeError: CancelsItself.run raised CancelledError" in caplog.text
    assert "'p0': EpisodeError: ExitsInATask.run raised SystemExit: 4" in caplog.text
    assert "'p0': SystemExit: no more" in caplog.text


def test_a_reward_no_one_asks_for_is_an_error(build: Build) -> None:
    producer = build(workflow=Flow(), pool=RewardPool(misbehave), limits=Limits(max_failures=2))
    with pytest.raises(RuntimeError, match=r"a reward is configured and Flow\.run never asked for it"):
        producer.collect(2, 60.0)


def test_failing_forever_stops_with_the_reason(build: Build) -> None:
    producer = build(FakeEngine(only(set(range(1000)), fail)), limits=Limits(max_failures=5))
    with pytest.raises(RuntimeError, match=r"5 groups in a row .* prompt 'p\d+': GenerationError: the server caught"):
        producer.collect(2, 60.0)


def test_what_fails_in_one_way_from_the_start_is_not_tried_on(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    producer = build(FakeEngine(only(set(range(1000)), fail)), limits=Limits(max_failures=32))
    said = r"the first 8 groups were dropped, all in the same way, .* 'p\d+': GenerationError: the server caught fire"
    with pytest.raises(RuntimeError, match=said):
        producer.collect(2, 60.0)
    dropped = [record.getMessage() for record in caplog.records if "group dropped" in record.getMessage()]
    assert [re.sub(r"'p\d+'|:\d+$", "'p'", one) for one in dropped] == [
        "group dropped, prompt 'p': GenerationError: the server caught fire at producers.py'p'",
        *(f"group dropped, prompt 'p': the same, {count} in a row" for count in (2, 4, 8)),
    ]


@pytest.mark.parametrize(
    ("worked", "late", "reasons"),
    [
        (True, False, ["down"] * 31),
        (False, True, ["down"] * 31),
        (False, False, [f"down {k}" for k in range(31)]),
        (False, False, ["odd", *["down"] * 30]),
    ],
)
def test_what_may_get_better_is_tried_as_often_as_it_is_allowed(worked: bool, late: bool, reasons: list[str]) -> None:
    limits = FailureLimits(Limits(max_failures=32))
    if worked:
        limits.came_through()
    assert [limits.failed(f"p{k}", reason, late) for k, reason in enumerate(reasons)] == [None] * 31
    assert "32 groups in a row" in str(limits.failed("p", "down", late))


def test_paths_ids_and_details_make_no_other_failure() -> None:
    limits = FailureLimits(Limits())
    found = [
        limits.failed(f"p{k}", f"CallFailed: of p{k}: ValueError at a.py:3 (all of it: /run/{k:016x}.log); it said {k}")
        for k in range(8)
    ]
    assert found[:7] == [None] * 7 and "the first 8 groups" in str(found[7])


class Unfit(Flow):
    """Its model does not fit, which shows in the third prompt."""

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        if prompt.id in ("p2", "v2"):
            raise Misfit("tools: they are not shown")
        return await super().run(engine, prompt)


def test_a_model_that_does_not_fit_stops_at_once(build: Build) -> None:
    producer = build(workflow=Unfit(), limits=Limits(max_failures=1000))
    assert ids(producer.collect(2, 60.0)) == ["p0", "p1"]
    producer.publish(1)
    with pytest.raises(RuntimeError, match="the rollout producer failed: prompt 'p2': tools: they are not shown"):
        producer.collect(2, 60.0)
    producer = build(workflow=Unfit())
    with pytest.raises(RuntimeError, match="validation: prompt 'v2': tools: they are not shown"):
        producer.evaluate([Prompt(id=f"v{k}", tokens=(3, 15)) for k in range(4)], 1, 0.0, 60.0)


def test_a_dead_engine_stops_at_once(build: Build) -> None:
    engine = FakeEngine(only(set(range(1000)), fail))
    engine.alive = False
    producer = build(engine, limits=Limits(max_failures=1000))
    with pytest.raises(RuntimeError, match="the inference engine has failed; prompt 'p0': GenerationError"):
        producer.collect(2, 60.0)


def test_prompts_too_long_cost_their_group_or_are_passed_over(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    class Growing(Numbered):
        def deal(self, index: int) -> Prompt:
            return Prompt(id=f"p{index}", text="1" * (20 if index % 2 else 2))

    producer = build(source=Growing(), max_context=16)
    assert ids(producer.collect(2, 60.0)) == ["p0", "p2"]
    assert producer.gate.counters()["failed"] == 1 and "prompt 'index 1': PromptTooLong: prompt 'p1'" in caplog.text
    producer = build(source=Growing(), max_context=16, long_prompts="skip")
    assert ids(producer.collect(2, 60.0)) == ["p0", "p2"]
    assert producer.gate.counters()["failed"] == 0


# ---- waiting


def test_a_wait_that_is_too_long_says_what_is_pending(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = build(FakeEngine(only({1}, hang)))
    monkeypatch.setattr(producer_module, "awake", Clock(lambda: producer.stream.ready == 1).monotonic)
    with pytest.raises(
        TimeoutError,
        match=r"1 of 2 groups are ready after 60 s \(limits.collect_deadline_s\); 1 being played, the oldest: 'p1'"
        r" \(\d+\.\d s, 0 of 3 done, waits \d+\.\d s for reply 'p1#\d/0' and 2 more\); gate: .*'accepted': 1.*"
        r" engine: {'alive': True",
    ):
        producer.collect(2, 60.0)


def test_the_trainer_learns_at_once_that_the_producer_died(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = build(FakeEngine(only({0}, hang)))
    loop = producer.loop
    assert loop is not None

    def break_books() -> None:
        def broken() -> int:
            raise ZeroDivisionError("books burnt")

        producer.gate.admit = broken  # type: ignore[method-assign]

    loop.call_later(0.1, break_books)
    loop.call_later(0.2, producer._awake.set)
    with pytest.raises(RuntimeError, match="the rollout producer failed: books burnt"):
        producer.collect(2, 60.0)
    with pytest.raises(RuntimeError, match="books burnt"):
        producer.evaluate([Prompt(id="v", tokens=(3,))], 1, 0.0, 60.0)


def test_close_cancels_what_runs(build: Build) -> None:
    engine = FakeEngine(only(set(range(1000)), hang))
    producer = build(engine)
    with pytest.raises(TimeoutError):
        producer.collect(2, 0.05)
    wait_until(lambda: engine.running == 6)
    producer.close()
    assert engine.running == 0
    producer.close()
    with pytest.raises(RuntimeError, match="not running"):
        producer.collect(2, 1.0)


def test_arithmetic_end_to_end_with_a_worker_reward(build: Build) -> None:
    producer = build(
        source=ArithmeticPrompts(digits=1),
        workflow=RLVRWorkflow(max_new_tokens=4),
        pool=RewardPool(misbehave, RewardOptions(workers=2)),
        batch_size=8,
        max_staleness=1,
    )
    batch = to_batch(producer.collect(8, 60.0))
    assert batch.rewards.tolist() == [1.0] * 24
    assert batch.metadata[0].keys() == {"completion", "answer"}
    assert all(len(m["completion"]) == 1 for m in batch.metadata)  # no special tokens in the text
    assert batch.loss_mask.sum() == 48 and (batch.versions[batch.loss_mask] == 0).all()


def test_a_run_that_is_asked_to_end_waits_neither_for_rollouts_nor_for_validation(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = build(FakeEngine(only({0}, hang)))
    monkeypatch.setattr("app.interruption.pending", lambda: 15 if producer.stream.running() else None)
    assert producer.collect(2, 30.0) == []
    ahead = build(max_staleness=1)
    monkeypatch.setattr("app.interruption.pending", lambda: None)
    assert len(ahead.collect(2, 30.0)) == 2
    wait_until(lambda: ahead.stream.ready >= 2)
    monkeypatch.setattr("app.interruption.pending", lambda: 15)
    assert ahead.collect(2, 30.0) == [] and ahead.stream.ready >= 2, "nothing is taken that no step would train on"
    validating = build(FakeEngine(lambda request: hang()))
    monkeypatch.setattr("app.interruption.pending", lambda: 15 if validating.evaluating else None)
    assert validating.evaluate([Prompt(id="v", tokens=(3, 15))], 1, 0.0, 30.0) == []
