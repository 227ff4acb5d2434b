"""MCP servers as tools: real ones, over standard input and output and over HTTP; one that dies is told and replaced."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")

from datamodules.processes.calls import CallFailed, DeadlinePassed
from datamodules.prompts.base import Prompt
from datamodules.workflows import ToolWorkflow
from datamodules.workflows.adapters.mcp_tools import MCPTools
from datamodules.workflows.tools import Toolbox, ToolsLost
from tests.datamodules.workflows.scripted_engine import CHATML, ScriptedEngine, play
from tests.helpers.recorded_samples import byte_tokenizer

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
TOKENIZER = byte_tokenizer(CHATML)
PROMPT = Prompt(id="p", messages=({"role": "user", "content": "2+3?"},), answer="5")


def a_call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def results(engine: ScriptedEngine, request: int = 1) -> list[str]:
    before = len(engine.seen[request - 1].tokens) + len(engine.responses[request - 1].tokens)
    told = str(TOKENIZER.decode(engine.seen[request].tokens[before:]))
    return [piece.split("\n</tool>")[0] for piece in told.split("<tool>\n")[1:]]


async def said(tools: Toolbox, name: str, **arguments: Any) -> str:
    """The result, or the error and what it says."""
    try:
        return str(await tools.call(name, arguments))
    except (CallFailed, ToolsLost) as error:
        return f"{type(error).__name__}: {error}"


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"{condition} is not so after {seconds:g} s"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def url() -> Iterator[str]:
    """Of a server that runs already."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    process = subprocess.Popen([*SERVER, str(port)], stderr=subprocess.DEVNULL)

    def listens() -> bool:
        assert process.poll() is None, "the server ended"
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(listens, 60.0)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def test_an_agent_uses_the_tools_of_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARBORIST_TEST_TOKEN", "hidden")
    tools = MCPTools(command=SERVER, deny=["count"], variables={"PLAIN": "seen"})
    workflow = ToolWorkflow(tools, max_new_tokens=900, tool_deadlines_s={"sleep": 0.1})
    workflow.log_to(tmp_path)
    calls = [a_call("add", a=2, b=3), a_call("add", a="2", b=3), a_call("count"), a_call("secret"), a_call("picture")]
    calls += [a_call("fail", why="it is closed"), a_call("sleep", seconds=60.0), a_call("flood", megabytes=2)]
    # The deadline of the calls does not count until there is a server.
    workflow.prepare(TOKENIZER)
    engine = ScriptedEngine(TOKENIZER, [a_call("add", a=1, b=1), "".join(calls), "5"], max_context=9000)
    (whole,) = play(workflow, engine, TOKENIZER, PROMPT, lambda prompt, reply: float(reply == prompt.answer))
    told = results(engine, 2)
    assert told[0] == "5" and "'2' is not of type 'integer'" in told[1]
    assert told[2].startswith("Error: there is no tool 'count'; there are: add, secret")
    assert told[3] == "None seen"
    assert told[4] == "a square:\n[image of type image/png, which is no text]"
    assert told[5].startswith("Error: fail failed: ") and told[6] == "Error: sleep did not answer within 0.1 s"
    assert told[7] == "Error: flood failed: returned 2.0 million characters, more than 1 million"
    assert whole.reward == 1.0 and whole.metadata["failed_calls"] == 2 and whole.metadata["timed_out_calls"] == 1
    assert '"name": "add"' in TOKENIZER.decode(engine.seen[0].tokens)
    assert '"name": "count"' not in TOKENIZER.decode(engine.seen[0].tokens)


def test_arguments_that_cannot_be_sent_cost_their_own_call_alone() -> None:
    tools = MCPTools(command=SERVER)

    def nested(depth: int) -> Any:
        return [nested(depth - 1)] if depth else 1

    async def story() -> list[str]:
        first = await said(tools, "count")
        whys = ["half \ud83d", nested(300), nested(220), {"\ud83d": 1}]
        bad = [said(tools, "fail", why=one) for one in whys]
        found = await asyncio.gather(said(tools, "sleep", seconds=0.5), *bad)
        return [first, *found, await said(tools, "count")]

    try:
        first, slept, *failed, second = asyncio.run(story())
    finally:
        tools.stop()
    assert slept == "woke" and first.replace("1 in", "2 in") == second
    assert all(one.startswith("CallFailed: its arguments cannot be sent as JSON: ") for one in failed)


def test_a_shared_server_that_dies_is_told_and_started_anew(tmp_path: Path) -> None:
    tools = MCPTools(command=SERVER)
    tools.log_to(tmp_path)

    async def story() -> list[str]:
        first = await said(tools, "count")
        child = await said(tools, "child")
        found = await asyncio.gather(said(tools, "sleep", seconds=60.0), said(tools, "die"))
        second = await said(tools, "count")
        return [first, child, *found, second, await said(tools, "flood", megabytes=6)]

    first, child, *lost, second, flood = asyncio.run(story())
    assert lost == ["CallFailed: its server exited with code 3"] * 2
    assert first.startswith("1 in ") and second.startswith("1 in ") and first != second
    assert flood == "CallFailed: its server was ended: it sent a message of more than 4 MB"
    assert any("the last words" in log.read_text() for log in tmp_path.iterdir())
    tools.stop()
    for pid in (first.split()[-1], second.split()[-1], child):
        wait_until(lambda pid=pid: gone(int(pid)))  # type: ignore[misc]


def test_a_shared_server_that_hangs_is_started_anew() -> None:
    tools = MCPTools(command=SERVER)

    async def story() -> list[str]:
        found = [await said(tools, "count")]
        for _ in range(3):
            with pytest.raises(DeadlinePassed):
                await tools.call_within(0.05, "sleep", {"seconds": 60.0})
        return [*found, await said(tools, "count")]

    hung, other = asyncio.run(story())
    assert other.startswith("1 in ") and other != hung
    tools.stop()
    wait_until(lambda: gone(int(hung.split()[-1])))


def test_calls_that_are_given_up_do_not_end_the_server_of_all_episodes() -> None:
    tools = MCPTools(command=SERVER)

    async def story() -> list[str]:
        found = [await said(tools, "count")]
        others = asyncio.create_task(said(tools, "sleep", seconds=1.0))
        given_up = [asyncio.create_task(tools.call_within(60.0, "sleep", {"seconds": 60.0})) for _ in range(4)]
        await asyncio.sleep(0.2)
        for one in given_up:
            one.cancel()
        await asyncio.wait(given_up)
        return [*found, await others, await said(tools, "count")]

    try:
        first, others, second = asyncio.run(story())
    finally:
        tools.stop()
    assert others == "woke" and second == first.replace("1 in", "2 in")


def test_an_episodes_own_server_keeps_its_state_and_takes_the_episode_with_it() -> None:
    tools = MCPTools(command=SERVER, each="episode")

    async def story() -> list[str]:
        one, other = tools.open(PROMPT), tools.open(PROMPT)
        counts = [*await asyncio.gather(said(one, "count"), said(other, "count")), await said(one, "count")]
        died = [await said(one, "die"), await said(one, "count")]
        left = await said(other, "count")
        await other.close()  # type: ignore[attr-defined]
        return [*counts, *died, left]

    first, other, again, died, after, left = asyncio.run(story())
    assert [first[0], other[0], again[0], left[0]] == ["1", "1", "2", "2"] and first[1:] == again[1:] != other[1:]
    assert "exited with code 3" in died and died.startswith("ToolsLost: the episode's MCP server")
    assert after.startswith("ToolsLost")
    wait_until(lambda: gone(int(left.split()[-1])))
    wait_until(lambda: gone(int(first.split()[-1])))


def test_servers_of_episodes_go_on_with_the_files_of_those_that_are_over(tmp_path: Path) -> None:
    tools = MCPTools(command=SERVER, each="episode")
    tools.log_to(tmp_path)
    tools.prepare()

    async def story() -> list[str]:
        ended = []
        for call in ("die", "count", "die"):
            boxes = [tools.open(PROMPT), tools.open(PROMPT)]
            await asyncio.gather(*(said(one, "count") for one in boxes))
            ended += [await said(one, call) for one in boxes]
            for one in boxes:
                await one.close()  # type: ignore[attr-defined]
        return ended

    ended = asyncio.run(story())
    assert len(list(tmp_path.iterdir())) == 2  # as many as ran at a time
    assert [one.count("the last words") for one in ended] == [1, 1, 0, 0, 1, 1]  # its own, each
    assert "".join(log.read_text() for log in tmp_path.iterdir()).count("the last words") == 4


def test_an_episodes_own_server_that_does_not_answer_any_more_is_not_replaced_by_an_empty_one() -> None:
    tools = MCPTools(command=SERVER, each="episode")

    async def story() -> str:
        own = tools.open(PROMPT)
        try:
            assert (await said(own, "count")).startswith("1")
            for _ in range(3):
                with pytest.raises(DeadlinePassed):
                    await own.call_within(0.05, "sleep", {"seconds": 60.0})  # type: ignore[attr-defined]
            return await said(own, "count")
        finally:
            await own.close()  # type: ignore[attr-defined]

    assert asyncio.run(story()).startswith("ToolsLost: the MCP server")


def test_lost_tools_cost_the_episode(tmp_path: Path) -> None:
    """What cannot be reached is not the model's fault, and no answer to it."""
    tools = MCPTools(command=[sys.executable, "-c", "import sys; sys.exit('no licence')"])
    tools.log_to(tmp_path)
    with pytest.raises(ValueError, match=r"the MCP server python\S* exited with code 1; it printed, .*no licence"):
        tools.prepare()
    with pytest.raises(ToolsLost, match=r"exited with code 1; it printed, .*no licence"):
        asyncio.run(tools.call("add", {}))
    silent = MCPTools(command=["sleep", "100"], start_deadline_s=0.5)
    with pytest.raises(ValueError, match=r"the MCP server sleep did not greet within 0.5 s"):
        silent.prepare()
    with pytest.raises(ValueError, match="exited with code 127"):
        MCPTools(command="no-such-program").prepare()
    with pytest.raises(ValueError, match=r"the MCP server http://127\.0\.0\.1:9/mcp was lost: .*connection"):
        MCPTools(url="http://127.0.0.1:9/mcp", start_deadline_s=20.0).prepare()


def test_a_server_at_a_url(url: str) -> None:
    tools = MCPTools(url=url, allow=["add", "count", "die", "flood", "sleep"])
    tools.prepare()
    assert [one["function"]["name"] for one in tools.tools] == ["add", "count", "flood", "sleep", "die"]
    with pytest.raises(ValueError, match=r"MCPTools.deny: the server has no tool 'subtract'; it has add, count"):
        MCPTools(url=url, deny=["subtract"]).prepare()

    async def story() -> list[str]:
        found = [await said(tools, "add", a=2, b=3), (await said(tools, "count"))[0]]
        found.append(await said(tools, "flood", megabytes=6))
        found.append(await said(tools, "add", a=4, b=3))
        found += await asyncio.gather(said(tools, "sleep", seconds=60.0), said(tools, "die"))
        found.append(await said(tools, "add", a=1, b=1))
        return found

    sums, counts, flood, again, *lost, unreachable = asyncio.run(story())
    assert (sums, counts, again) == ("5", "1", "7")
    assert flood.startswith("CallFailed: ")
    assert all(one.startswith("CallFailed: ") for one in lost), lost
    assert unreachable.startswith(f"ToolsLost: the MCP server {url} was lost: "), unreachable


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "give either command"),
        ({"command": "a", "url": "http://b"}, "give either command"),
        ({"command": ""}, "MCPTools.command: names no program"),
        ({"url": "b"}, "MCPTools.url: 'b'"),
        ({"url": "http://b", "memory_mb": 5.0}, "MCPTools.memory_mb: has no effect with url"),
        ({"command": "a", "header_variables": {"A": "B"}}, "MCPTools.header_variables: has no effect with command"),
        ({"command": "a", "allow": ["b"], "deny": ["c"]}, "allow or deny, not both"),
        ({"command": "a", "each": "call"}, "MCPTools.each: 'call'"),
        ({"command": "a", "start_deadline_s": 0.0}, "MCPTools.start_deadline_s: 0.0"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        MCPTools(**options)


def test_headers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARBORIST_TEST_TOKEN", raising=False)
    with pytest.raises(ValueError, match="Authorization: the environment variable ARBORIST_TEST_TOKEN is not set"):
        MCPTools(url="http://127.0.0.1:9/mcp", header_variables={"Authorization": "ARBORIST_TEST_TOKEN"}).prepare()
