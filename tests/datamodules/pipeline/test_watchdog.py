"""The watchdog: one clear line about what is pending where, then the configured action; never spam, never a guess."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from app.batch import Trajectory
from datamodules.inference.embedded import EmbeddedEngine
from datamodules.inference.protocol import GenerationRequest, ServerEngine
from datamodules.inference.sglang import SGLangEngine
from datamodules.pipeline import producer as producer_module
from datamodules.pipeline.limits import Limits
from datamodules.pipeline.producer import Producer
from datamodules.pipeline.watchdog import Stall, Watchdog
from datamodules.prompts import Prompt
from datamodules.rewards import RewardOptions, RewardPool
from datamodules.workflows import EpisodeEngine, RLVRWorkflow
from tests.datamodules.fake_engine import FakeEngine
from tests.datamodules.pipeline.producers import (
    Build,
    Collecting,
    Flow,
    Numbered,
    hang,
    ids,
    only,
    wait_until,
)
from tests.datamodules.rewards.reward_functions import misbehave
from tests.datamodules.test_rollout import rollouts
from tests.helpers.clock import Clock


class Servers(FakeEngine, ServerEngine):
    """Two servers by the number of the prompt; "b" hangs until it is restarted."""

    def __init__(self, stuck: bool = True) -> None:
        super().__init__(self._work)
        self.released: asyncio.Event | None = None
        self.stuck = stuck
        self.restarted: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    owns_servers = True

    def where(self, request_id: str) -> str:
        return "b" if int(re.split(r"[p#]", request_id)[1]) % 2 else "a"

    async def _work(self, request: GenerationRequest) -> None:
        self._loop = asyncio.get_running_loop()
        if self.where(request.request_id) == "b" and self.stuck:
            self.released = self.released or asyncio.Event()
            await self.released.wait()

    def restart(self, server: str) -> None:
        self.restarted.append(server)
        self.stuck = False
        assert self.released is not None and self._loop is not None
        self._loop.call_soon_threadsafe(self.released.set)


def stalled(producer: Producer, running: int = 1) -> float:
    """Waits until `running` groups hang and the others have arrived; the time then, in whole seconds: they add up."""
    wait_until(lambda: len(producer.stream.running()) == running and producer.gate.counters()["queued"] > 0)
    return math.ceil(time.monotonic())


def look(watchdog: Watchdog, now: float) -> None:
    """One look at a made-up time; gives the rollout thread the moment it needs to answer."""
    watchdog.look(now)
    if watchdog._ping_at is not None:
        watchdog._pong.wait(30.0)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "datamodules.pipeline.watchdog"]


def test_one_line_says_what_is_pending_where_and_then_ever_more_rarely(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Servers()
    producer = build(engine)
    trainer = Collecting(producer)
    now = stalled(producer)
    watchdog = Watchdog(Stall(100.0), Limits(), producer)
    look(watchdog, now)  # the clock starts here
    for seconds in range(1, 1000):
        look(watchdog, now + seconds)
    assert [re.search(r"arrived for (\d+).0 s", line).group(1) for line in lines(caplog)] == [
        "100",
        "200",
        "400",
        "800",
    ]
    assert re.fullmatch(
        r"nothing has arrived for 100\.0 s \(stall.after_s: 100\): 1 being played, the oldest: 'p1' \(\d+\.\d s,"
        r" 0 of 3 done, waits \d+\.\d s for reply 'p1#0/0' at b and 2 more\); gate: {'admitted': 2, .*} at version 0;"
        r" engine: {'alive': True, .*}; stall.action: warn",
        lines(caplog)[0],
    ), lines(caplog)[0]
    engine.restart("b")
    trainer.done()
    look(watchdog, now + 1001)
    look(watchdog, now + 1002)
    assert lines(caplog)[4:] == ["rollouts arrive again"]


def test_nothing_is_said_while_nothing_is_owed_or_things_arrive(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    producer = build()
    assert len(producer.collect(2, 60.0)) == 2
    wait_until(lambda: not producer.stream.running())
    watchdog = Watchdog(Stall(100.0), Limits(), producer)
    now = time.monotonic()
    for seconds in range(0, 2000, 50):  # the trainer trains; the gate is full
        look(watchdog, now + seconds)
    trainer = Collecting(build(Servers()))
    producer = trainer.producer
    now = stalled(producer)
    watchdog = Watchdog(Stall(100.0), Limits(), producer)
    for seconds in range(0, 2000, 50):
        producer.stream.arrivals.last = now + seconds - 60  # a reply, 60 seconds ago
        look(watchdog, now + seconds)
    assert lines(caplog) == []


def test_servers_that_wait_for_their_turn_owe_nothing(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    engine = Servers()
    engine.in_turns = paused = True
    health = engine.health
    engine.health = lambda: {**health(), "paused": paused}
    trainer = Collecting(build(engine))
    producer = trainer.producer
    now = stalled(producer)
    watchdog = Watchdog(Stall(100.0, "requeue"), Limits(), producer)
    for seconds in range(0, 1000, 50):  # the trainer computes
        look(watchdog, now + seconds)
    paused = False
    for seconds in range(1000, 1100, 50):
        look(watchdog, now + seconds)
    assert lines(caplog) == []
    look(watchdog, now + 1101)
    assert "nothing has arrived for 101.0 s" in lines(caplog)[0]


def test_requeue_plays_what_is_stuck_again_and_nothing_is_lost(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()

    async def stuck_at_first(request: GenerationRequest) -> None:
        if request.request_id in ("p1#0/0", "p1#2/0"):
            await hang()

    engine.before = stuck_at_first
    producer = build(engine)
    trainer = Collecting(producer)
    now = stalled(producer)
    watchdog = Watchdog(Stall(100.0, "requeue"), Limits(), producer)
    look(watchdog, now)
    look(watchdog, now + 101)
    trainer.done()
    assert ids(trainer.groups) == ["p0", "p1"]
    assert engine.running == 0  # the requests given up were cancelled
    assert {request.request_id for request in engine.seen} >= {"p1#0/0", "p1#0~1/0"}
    counters = producer.gate.counters()
    assert (counters["requeued"], counters["failed"], counters["trained"], counters["admitted"]) == (1, 0, 2, 3)
    producer.stream.check()
    assert lines(caplog)[0].endswith("stall.action: requeue")


def test_a_prompt_that_stalls_again_and_again_costs_its_group(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    producer = build(FakeEngine(only({1}, hang)))
    trainer = Collecting(producer)
    watchdog = Watchdog(Stall(100.0, "requeue", max_requeues=2), Limits(), producer)
    now = stalled(producer)
    look(watchdog, now)
    for attempt, idle in ((0, 101), (1, 201), (2, 401)):
        wait_until(lambda attempt=attempt: [one.attempt for one in producer.stream.running()] == [attempt])
        look(watchdog, now + idle)
    trainer.done()
    assert ids(trainer.groups) == ["p0", "p2"]
    counters = producer.gate.counters()
    assert (counters["requeued"], counters["failed"]) == (2, 1)
    assert "group dropped, prompt 'p1': RuntimeError: stalled again after being played 3 times" in caplog.text
    producer.stream.check()


def test_restart_server_restarts_the_one_that_is_waited_for(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    engine = Servers()
    producer = build(engine, batch_size=4)
    trainer = Collecting(producer, 4)
    now = stalled(producer, running=2)
    watchdog = Watchdog(Stall(100.0, "restart_server"), Limits(), producer)
    look(watchdog, now)
    look(watchdog, now + 101)
    trainer.done()
    assert engine.restarted == ["b"] and ids(trainer.groups) == ["p0", "p1", "p2", "p3"]
    assert lines(caplog)[0].endswith("stall.action: restart_server, b")
    assert producer.gate.counters()["requeued"] == 0


def test_stop_tells_the_trainer_at_once(build: Build) -> None:
    producer = build(Servers())
    trainer = Collecting(producer)
    now = stalled(producer)
    watchdog = Watchdog(Stall(100.0, "stop"), Limits(), producer)
    look(watchdog, now)
    look(watchdog, now + 101)
    trainer.done()
    assert "nothing has arrived for 101.0 s" in str(trainer.error) and "'p1'" in str(trainer.error)


def test_an_action_that_cannot_help_is_not_taken(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    engine = Servers()
    engine.health = lambda: {"alive": True, "paused": True}  # type: ignore[method-assign]
    producer = build(engine)
    trainer = Collecting(producer)
    now = stalled(producer)
    for action in ("requeue", "restart_server"):
        watchdog = Watchdog(Stall(100.0, action), Limits(), producer)  # type: ignore[arg-type]
        look(watchdog, now)
        look(watchdog, now + 101)
        assert lines(caplog)[-1].endswith(f"stall.action: {action} does nothing: the engine is paused")
    assert engine.restarted == [] and producer.gate.counters()["requeued"] == 0
    engine.restart("b")
    trainer.done()


def test_a_workflow_that_blocks_the_thread_is_named_with_its_line(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    blocked: list[int] = []

    class Blocking(Flow):
        async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
            blocked.append(threading.get_ident())
            release.wait(60.0)  # a mistake: everything else on the thread waits too
            return await super().run(engine, prompt)

    producer = build(workflow=Blocking())
    trainer = Collecting(producer)
    wait_until(lambda: bool(blocked) and sys._current_frames()[blocked[0]].f_code.co_name == "wait")
    watchdog = Watchdog(Stall(100.0, "requeue"), Limits(), producer)
    now = time.monotonic()
    watchdog.look(now)
    watchdog.look(now + 101)
    release.set()
    trainer.done()
    assert re.search(
        r"stuck for 101 s in wait \(.*threading\.py:\d+\) < wait \(.*\) < run \(.*test_watchdog\.py:\d+\): workflows"
        r" must await .*; stall.action: requeue does nothing: the rollout thread itself is stuck",
        lines(caplog)[0],
    ), lines(caplog)[0]


class Keeps(Flow):
    """Keeps the event loop, once, until it is released."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        self.keep()
        return await super().run(engine, prompt)

    def keep(self) -> None:
        self.begun.set()
        self.release.wait(60.0)


def test_a_workflow_that_keeps_the_event_loop_is_named_long_before_a_stall(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    workflow = Keeps()
    producer = build(workflow=workflow)
    trainer = Collecting(producer)
    assert workflow.begun.wait(60.0)
    watchdog = Watchdog(Stall(100.0), Limits(), producer)
    now = time.monotonic()
    for seconds in range(2):
        watchdog.look(now + seconds)
    assert lines(caplog) == []
    for seconds in range(2, 20):
        watchdog.look(now + seconds)
    workflow.release.set()
    trainer.done()
    assert len(lines(caplog)) == 1
    assert re.fullmatch(
        r"all rollouts wait for Keeps\.run \(.*test_watchdog\.py:\d+\) > Keeps\.keep \(.*test_watchdog\.py:\d+\), which"
        r" has kept their event loop for 2 s: workflows must await .* asyncio\.to_thread\(\.\.\.\)",
        lines(caplog)[0],
    ), lines(caplog)[0]


def keep_loop(
    producer: Producer, watchdog: Watchdog, now: float, keep: Callable[[], Any], release: Callable[[], Any]
) -> None:
    """Ten seconds, by made-up times, in which the event loop is inside of `keep`."""
    assert producer.loop is not None and producer.thread is not None and producer.thread.ident is not None
    thread, begun = producer.thread.ident, threading.Event()
    producer.loop.call_soon_threadsafe(begun.set)
    producer.loop.call_soon_threadsafe(keep)
    assert begun.wait(30.0)
    wait_until(lambda: sys._current_frames()[thread].f_code.co_name == "wait")
    for seconds in range(10):
        watchdog.look(now + seconds)
    release()
    assert watchdog._pong.wait(30.0)


def test_what_keeps_the_event_loop_again_is_told_ever_more_rarely(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Servers()
    producer = build(engine)
    trainer = Collecting(producer)
    now = stalled(producer)
    watchdog = Watchdog(Stall(10_000.0), Limits(collect_deadline_s=20_000.0), producer)
    for number in range(9):
        event = threading.Event()
        keep_loop(producer, watchdog, now + 100 * number, lambda event=event: event.wait(60.0), event.set)
    said = [re.search(r"for 2 s(?:, for the (\d)\. time)?:", line) for line in lines(caplog)]
    assert [one and one.group(1) for one in said] == [None, "2", "4", "8"], lines(caplog)
    engine.restart("b")
    trainer.done()


def test_a_loop_that_gets_no_time_and_one_busy_with_what_is_not_users_blames_nobody(
    build: Build, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Servers()
    producer = build(engine)
    trainer = Collecting(producer)
    now = stalled(producer)
    watchdog = Watchdog(Stall(10_000.0), Limits(collect_deadline_s=20_000.0), producer)
    event = threading.Event()
    keep_loop(producer, watchdog, now, event.wait, event.set)  # no frame but the library's
    monkeypatch.setattr(producer, "ping", lambda pong: None)  # the process was stopped, or the engine computes
    for seconds in range(100, 120):
        watchdog.look(now + seconds)
    assert lines(caplog) == []
    engine.restart("b")
    trainer.done()


def test_it_looks_on_a_thread_of_its_own(build: Build) -> None:
    producer = build(Servers())
    trainer = Collecting(producer)
    watchdog = Watchdog(Stall(0.2, "stop"), Limits(), producer)
    watchdog.start()
    trainer.done()
    watchdog.close()
    assert re.search(r"nothing has arrived for \d+\.\d s \(stall\.after_s: 0\.2\)", str(trainer.error)), trainer.error


def test_waits_for_a_reward_and_during_validation_are_in_the_table(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(count: int) -> Clock:
        """Time passes once so many wait for a reward."""
        return Clock(lambda: waited_for() == ["reward"] * count)

    def waited_for() -> list[str]:
        return [wait.what for one in producer.pending() for wait in list(one.waits.values())]

    hanging = Numbered({0: "hang", 1: "hang"})
    pool = RewardPool(misbehave, RewardOptions(deadline_s=60.0))
    producer = build(source=hanging, workflow=RLVRWorkflow(max_new_tokens=4), pool=pool, max_staleness=1)
    monkeypatch.setattr(producer_module, "awake", waits(12).monotonic)  # of three samples of four prompts
    with pytest.raises(
        TimeoutError, match=r"'p0' \(\d+\.\d s, 0 of 3 done, waits \d+\.\d s for reward 'p0#0' and 2 more"
    ):
        producer.collect(2, 60.0)
    prompt = Prompt(id="v", tokens=(3,), metadata={"reward": "hang"})
    monkeypatch.setattr(producer_module, "awake", waits(1).monotonic)
    monkeypatch.setattr(producer_module, "_INTERRUPT_POLL_S", 0.02)
    with pytest.raises(
        TimeoutError, match=r"'v' \(\d+\.\d s, 0 of 1 done, waits .* 'validation/v#0'\); training: 4 being"
    ):
        producer.evaluate([prompt], 1, 0.0, 60.0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Stall(after_s=0), "stall.after_s: 0"),
        (
            lambda: rollouts(stall=Stall(60), limits=Limits(collect_deadline_s=30)),
            "stall.after_s: 60 has no effect, limits.collect_deadline_s: 30",
        ),
        (lambda: Stall(action="panic"), "stall.action: 'panic', must be one of warn, requeue, restart_server, stop"),
        (lambda: Stall(max_requeues=3), "stall.max_requeues has no effect with stall.action: warn"),
        (lambda: Stall(max_requeues=0, action="requeue"), "stall.max_requeues: 0"),
        (
            lambda: rollouts(stall=Stall(action="restart_server"), engine=EmbeddedEngine()),
            "stall.action: restart_server .* EmbeddedEngine",
        ),
        (
            lambda: rollouts(stall=Stall(action="restart_server"), engine=SGLangEngine(["http://127.0.0.1:9"])),
            "stall.action: .* SGLangEngine",
        ),
    ],
)
def test_options_without_effect_are_refused_by_name(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_the_default_speaks_before_the_deadlines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Stall().seconds(Limits(episode_deadline_s=100.0, collect_deadline_s=60.0)) == 30.0
        assert rollouts(engine=Servers(), stall=Stall(action="restart_server")).stall.action == "restart_server"
