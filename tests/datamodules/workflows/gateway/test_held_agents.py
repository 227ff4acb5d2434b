"""Time in which an agent's calls are held, or the engine stands still, is not its own: deadlines do not count it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from datamodules.inference.protocol import GenerationRequest, GenerationResponse
from datamodules.pending import Pending
from datamodules.pipeline.player import EpisodePlayer, Pause
from datamodules.processes.calls import CallFailed
from datamodules.processes.deadline import deadline
from datamodules.workflows.gateway import AgentWorkflow
from tests.datamodules.workflows.gateway import agents
from tests.datamodules.workflows.gateway.test_running_agents import TASK, TOKENIZER, command, converse, serving
from tests.datamodules.workflows.scripted_engine import Pool, StandingStill, play

DEADLINE_S = 0.5
SLOW = ["import time", f"time.sleep({3 * DEADLINE_S})", "print(ask('first'))"]
HANGING = [*SLOW, "print(ask('second'))", "time.sleep(60)"]
LATE = r"the agent was not over after 0.5 s"


class StillUntilAskedTwice(StandingStill):
    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        if self.seen:
            self.clock.resume()
        return await super().generate(request)


def run(agent: Any) -> Any:
    workflow = AgentWorkflow(agent, max_new_tokens=20, workers=1, deadline_s=DEADLINE_S)
    return play(workflow, StillUntilAskedTwice(TOKENIZER, ["one", "two"]), TOKENIZER, TASK, lambda prompt, text: 1.0)


@pytest.mark.parametrize("agent", [agents.slow, command(*SLOW)], ids=["function", "command"])
def test_an_engine_that_stands_still_makes_no_agent_late(agent: Any) -> None:
    assert len(run(agent)) == 1


@pytest.mark.parametrize("agent", [agents.hanging, command(*HANGING)], ids=["function", "command"])
def test_an_agent_is_late_once_it_goes_on(agent: Any) -> None:
    with pytest.raises(CallFailed, match=LATE):
        run(agent)


@pytest.mark.parametrize("asks", [1, 2])
def test_a_service_is_given_the_same_time(asks: int) -> None:
    async def handler(given: dict[str, Any]) -> web.Response:
        await asyncio.sleep(3 * DEADLINE_S)
        said = [await converse(given) for _ in range(asks)]
        await asyncio.sleep(60.0 if asks == 2 else 0.0)
        return web.json_response({"answer": said[-1]})

    with serving(handler) as url:
        if asks == 1:
            assert len(run(url)) == 1
            return
        with pytest.raises(CallFailed, match=LATE):
            run(url)


def test_calls_that_are_held_make_no_agent_late() -> None:
    engine = StillUntilAskedTwice(TOKENIZER, ["one", "two"])
    workflow = AgentWorkflow(command("print(ask('first'))"), max_new_tokens=20, workers=1, deadline_s=DEADLINE_S)
    workflow.prepare(TOKENIZER)
    player = EpisodePlayer(workflow, engine, TOKENIZER, Pool(lambda prompt, text: 1.0), deadline_s=DEADLINE_S)  # type: ignore[arg-type]
    task = replace(TASK, tokens=workflow.encode(TASK))

    async def episode() -> None:
        unpaused, table = asyncio.Event(), Pending("t")
        playing = asyncio.create_task(player.play(task, name="t", seed="s", pause=Pause(unpaused), pending=table))
        async with asyncio.timeout(60):
            while not any(one.what == "resume" for one in table.waits.values()):
                await asyncio.sleep(0.02)
        engine.clock.resume()  # from here on nothing but the hold is not counted
        await asyncio.sleep(3 * DEADLINE_S)
        engine.clock.pause()
        unpaused.set()
        assert len(await playing) == 1

    try:
        asyncio.run(episode())
    finally:
        workflow.close()


@pytest.mark.parametrize(
    ("held", "is_late"), [(None, True), (lambda: 7.0, True), (time.monotonic, False)], ids=["no", "before", "meanwhile"]
)
def test_only_what_is_held_meanwhile_is_not_counted(held: Callable[[], float] | None, is_late: bool) -> None:
    async def wait() -> bool:
        try:
            async with deadline(0.05, held, look_s=0.01) as limit:
                await asyncio.sleep(60.0 if is_late else 0.2)
        except TimeoutError:
            return limit.expired()
        return limit.expired()

    assert asyncio.run(wait()) is is_late
