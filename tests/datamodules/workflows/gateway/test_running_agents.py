"""Agents as commands and services: where they find their session, what they answer, and how they end."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from app.batch import Trajectory
from datamodules.inference.protocol import GenerationRequest
from datamodules.processes.calls import CallFailed
from datamodules.prompts.base import Prompt
from datamodules.workflows.gateway import AgentWorkflow
from datamodules.workflows.gateway import workflow as workflow_module
from datamodules.workflows.gateway.agents import Door, ServiceAgent
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, Pool, ScriptedEngine, StandingStill, play
from tests.helpers.recorded_samples import byte_tokenizer

TOKENIZER = byte_tokenizer(WITH_CALLS)
TASK = Prompt(id="t", text="-n; $HOME `two` apples?", answer="6", metadata={"city": "Rome", "count": 2})

ASKS = """
import json, os, sys, urllib.request

def post(path, body):
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request))

def ask(text):
    found = post("/chat/completions", {"model": "any", "messages": [{"role": "user", "content": text}]})
    return found["choices"][0]["message"]["content"]

"""


def command(*lines: str) -> list[str]:
    return [sys.executable, "-c", ASKS + "\n".join(lines), "{text}", "{id}/{city}/{count}", '{"json": {"x": 1}}']


def run(
    agent: Any,
    replies: Any,
    logs: Path | None = None,
    reward: Any = None,
    engine: type[ScriptedEngine] = ScriptedEngine,
    **options: Any,
) -> tuple[ScriptedEngine, list[Trajectory]]:
    server = engine(TOKENIZER, replies)
    workflow = AgentWorkflow(agent, **{"max_new_tokens": 200, "workers": 1, **options})
    if logs is not None:
        workflow.log_to(logs)
    return server, play(workflow, server, TOKENIZER, TASK, reward)


def test_a_command_gets_the_task_and_answers_with_its_last_line() -> None:
    lines = [
        "said = ask(sys.argv[1])",
        "print('thinking')",
        "print(json.dumps([said, sys.argv[1:], json.load(sys.stdin)]), end='\\n\\n')",
        "print('to the log', file=sys.stderr)",
    ]
    asked = []

    def judge(prompt: Prompt, text: str) -> float:
        asked.append(text)
        return 0.5

    engine, found = run(command(*lines), ["six"], reward=judge)
    said, words, given = json.loads(asked[0])
    assert said == "six" and found[0].reward == 0.5
    assert words == [TASK.text, "t/Rome/2", '{"json": {"x": 1}}']
    assert given == {"id": "t", "text": TASK.text, "messages": [], "metadata": TASK.metadata}  # and not the answer
    assert TASK.text in TOKENIZER.decode(engine.seen[0].tokens)


def test_the_providers_clients_find_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_AGENTS_DISABLE_TRACING", raising=False)
    lines = [
        "begins = ('OPENAI_', 'ANTHROPIC_', 'GEMINI_', 'GOOGLE_')",
        "at = {name: os.environ[name] for name in os.environ if name.startswith(begins)}",
        "ask('x')",
        "one = at['OPENAI_API_KEY'] == at['ANTHROPIC_API_KEY'] == at.pop('GEMINI_API_KEY')",
        "one = one and at['ANTHROPIC_BASE_URL'] == at.pop('GOOGLE_GEMINI_BASE_URL')",
        "v1 = at['ANTHROPIC_BASE_URL'] + '/v1'",
        "same = v1 == at['OPENAI_BASE_URL'] == at['OPENAI_API_BASE'] == at['OPENAI_API_BASE_URL']",
        "hidden = at['OPENAI_API_KEY'] not in open('/proc/self/cmdline').read()",
        "told = at.pop('OPENAI_AGENTS_DISABLE_TRACING')",
        "print(1.5 if one and same and hidden and len(at) == 8 else 'no', told)",
    ]
    judged: list[str] = []
    run(command(*lines), ["x"], reward=lambda _, text: float(judged.append(text) is None))
    assert judged == ["1.5 1"]  # no framework sends the session's key and its traces anywhere
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "false")  # but where the run says so
    run(command(*lines), ["x"], reward=lambda _, text: float(judged.append(text) is None))
    assert judged[1:] == ["1.5 false"]


def test_addresses_of_the_runs_environment_lead_no_client_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """LangChain's clients, litellm and CAMEL prefer names of their own to those that the providers' packages know;
    LlamaIndex knows no others."""
    others = {"OPENAI_API_BASE": "OPENAI_BASE_URL", "ANTHROPIC_API_BASE": "ANTHROPIC_BASE_URL"}
    others |= {"OPENAI_API_BASE_URL": "OPENAI_BASE_URL"}
    others |= {"ANTHROPIC_API_URL": "ANTHROPIC_BASE_URL"}
    for name in others:
        monkeypatch.setenv(name, "http://127.0.0.1:9/v1")
    lines = ["ask('x')", f"print(float(all(os.environ[one] == os.environ[two] for one, two in {others}.items())))"]
    _, found = run(command(*lines), ["x"])
    assert found[0].reward == 1.0


def test_a_command_whose_last_line_is_a_number_gives_the_reward() -> None:
    _, found = run(command("ask('x')", "print(1.5)"), ["x"])
    assert found[0].reward == 1.5


def test_what_a_failed_command_printed_is_kept_and_shown(tmp_path: Path) -> None:
    lines = ["ask('x')", "print('first')", "print('no such fruit', file=sys.stderr)", "sys.exit(3)"]
    says = r"^the agent exited with code 3; it printed, at the end, .*no such fruit"
    with pytest.raises(CallFailed, match=says) as caught:
        run(command(*lines), ["x"], tmp_path)
    kept = Path(str(caught.value).split("all of it: ")[1].split(")")[0])
    assert kept.parent == tmp_path
    assert "first" in kept.read_text() and "no such fruit" in kept.read_text()


@pytest.mark.parametrize(
    ("last", "reward"),
    [
        ("sys.exit(3)", -0.5),
        ("sys.exit('no such fruit')", -0.5),
        ("raise ConnectionRefusedError('by the database')", None),
        ("import nothing_of_the_kind", None),
        ("sys.exit('httpx.ReadTimeout: timed out')", None),
        ("os.kill(os.getpid(), 9)", None),
    ],
)
def test_a_command_that_fails_after_a_reply_is_scored_as_told(last: str, reward: float | None, tmp_path: Path) -> None:
    """But where no reply of the model's can be why."""
    if reward is not None:
        _, found = run(command("ask('x')", last), ["x"], tmp_path, on_failure=-0.5)
        assert found[0].reward == reward and found[0].metadata["reward_failed"].startswith("exited with code")
        return
    with pytest.raises(CallFailed, match=r"^the agent (exited with code 1|was ended by SIGKILL)"):
        run(command("ask('x')", last), ["x"], tmp_path, on_failure=-0.5)


def test_an_agent_that_fails_without_a_word_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(CallFailed, match=r"exited with code 3$"):
        run(command("sys.exit(3)"), ["x"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["workers"]


class StillUntilAsked(StandingStill):
    """What an agent needs to come so far is not counted."""

    async def generate(self, request: GenerationRequest) -> Any:
        self.clock.resume()
        return await super().generate(request)


def test_a_command_ends_at_its_deadline_with_all_it_started(tmp_path: Path) -> None:
    lines = [
        "import subprocess, time",
        "one = subprocess.Popen(['sleep', '1000'], start_new_session=True)",
        "print(os.getpid(), one.pid, flush=True)",
        "ask('x')",
        "time.sleep(1000)",
    ]
    with pytest.raises(CallFailed, match=r"the agent was not over after 0\.5 s") as caught:
        run(command(*lines), ["x"], tmp_path, engine=StillUntilAsked, deadline_s=0.5)
    kept = Path(str(caught.value).split("all of it: ")[1].split(")")[0])
    pids = [int(one) for one in kept.read_text().split()]
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))


def test_what_a_command_leaves_running_ends_with_it() -> None:
    lines = [
        "import subprocess",
        "ask('x')",
        "print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)",
    ]
    _, found = run(command(*lines), ["x"])
    assert not psutil.pid_exists(int(found[0].reward))


@pytest.mark.parametrize(
    ("word", "says"),
    [("{answer}", "is not for the agent to see"), ("{town}", "is no field of the task; there are city, count, id")],
)
def test_a_field_that_is_not_there_is_named(word: str, says: str) -> None:
    with pytest.raises(CallFailed, match=says):
        run(["echo", word], ["x"])


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ("tests.no_such.agent", "is no function that can be imported"),
        ("solve 'it", "is no command"),
        ([], "is no command"),
        (["echo", ""], "is no command"),
        ("http://", "is no URL"),
    ],
)
def test_agents_that_cannot_be(agent: Any, says: str) -> None:
    with pytest.raises(ValueError, match=rf"AgentWorkflow\.agent: .*{says}"):
        AgentWorkflow(agent)


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_a_host_that_is_another_machines_is_named_before_the_run(host: str) -> None:
    workflow = AgentWorkflow(["echo", "1"], host=host)
    with pytest.raises(ValueError, match=rf"AgentWorkflow\.host: '{host}' is no address of this machine \("):
        workflow.prepare(TOKENIZER)


def test_a_program_that_cannot_be_started_is_named_before_the_run(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text("print(1)")
    for command, says in (
        ("no-such-program {text}", "there is no program 'no-such-program'; correct"),
        ([str(script), "{text}"], f"'{script}' is a file that cannot be started; put what runs it in front .python "),
    ):
        with pytest.raises(ValueError, match=rf"AgentWorkflow\.agent: {says}"):
            AgentWorkflow(command).prepare(TOKENIZER)
    with pytest.raises(CallFailed, match=str(TASK.metadata["city"])):  # which only the task names
        run(["{city}"], ["x"])


Handler = Callable[[dict[str, Any]], Awaitable[web.Response]]


@contextmanager
def serving(handler: Handler) -> Iterator[str]:
    """An agent service: another event loop, on a thread."""
    loop = asyncio.new_event_loop()
    opened: list[str] = []
    ready = threading.Event()

    async def answer(request: web.Request) -> web.Response:
        return await handler(await request.json())

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/solve", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        opened.append(f"http://127.0.0.1:{runner.addresses[0][1]}/solve")
        ready.set()
        while not done.is_set():
            await asyncio.sleep(0.02)
        await runner.cleanup()

    done = threading.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield opened[0]
    finally:
        done.set()
        thread.join(60)
        loop.close()


async def converse(given: dict[str, Any], status: int = 200) -> str:
    """The reply, or why there is none."""
    body = {"model": "any", "messages": [{"role": "user", "content": given["task"]["text"]}]}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {given['api_key']}"}) as client,
        client.post(f"{given['openai_base_url']}/chat/completions", json=body) as response,
    ):
        assert response.status == status
        found = await response.json()
        return str(found["choices"][0]["message"]["content"] if status == 200 else found["error"]["message"])


def test_a_service_is_given_the_task_and_answers_when_done() -> None:
    async def handler(given: dict[str, Any]) -> web.Response:
        assert given["anthropic_base_url"] + "/v1" == given["openai_base_url"]
        assert given["task"]["metadata"] == TASK.metadata and "answer" not in given["task"]
        return web.json_response({"answer": len(await converse(given))})

    with serving(handler) as url:
        _, found = run(url, ["seven"])
    assert found[0].reward == 5.0


def test_a_service_may_say_later_that_it_is_done() -> None:
    tasks = []

    async def work(given: dict[str, Any]) -> None:
        await converse(given)
        session = given["anthropic_base_url"]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {given['api_key']}"}) as client:
            await client.post(f"{session}/reward", json={"reward": 0.25})
            await client.post(f"{session}/end")

    async def handler(given: dict[str, Any]) -> web.Response:
        tasks.append(asyncio.create_task(work(given)))
        return web.Response(status=202)

    with serving(handler) as url:
        _, found = run(url, ["x"])
    assert found[0].reward == 0.25


def test_what_a_service_still_asks_when_it_has_answered_is_not_trained() -> None:
    class Endless(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> Any:
            if "a guess" in TOKENIZER.decode(request.tokens):
                asked.set()
                await asyncio.sleep(60.0)
            return await super().generate(request)

    asked = threading.Event()
    late = []

    async def handler(given: dict[str, Any]) -> web.Response:
        await converse(given)
        late.append(asyncio.create_task(converse({**given, "task": {"text": "a guess"}}, status=403)))
        await asyncio.to_thread(asked.wait, 60)
        return web.json_response({"answer": "six"})

    with serving(handler) as url:
        pool = Pool(lambda _, calls: float(len(calls)))
        (one,) = run(url, ["x"] * 2, reward=pool, judged="transcript", engine=Endless)[1]
        while not late[0].done():
            time.sleep(0.01)
    assert one.reward == 1.0 and one.metadata["abandoned_calls"] == 1
    assert late[0].result() == "the session has ended"


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (503, "out of fruit", "answered with status 503: out of fruit"),
        (200, "[1]", "answered with what is not an object"),
        (200, '{"answer": [1]}', "an answer that is list"),
        (302, "", "answered with status 302"),
    ],
)
def test_a_service_that_fails(status: int, body: str, says: str) -> None:
    async def handler(given: dict[str, Any]) -> web.Response:
        await converse(given)
        return web.Response(status=status, text=body + ("" if status != 503 else given["api_key"]))

    with serving(handler) as url, pytest.raises(CallFailed, match=says) as caught:
        run(url, ["x"])
    if status == 503:
        assert str(caught.value).endswith("out of fruit...")  # the key is left out


def door() -> Door:
    return Door("http://127.0.0.1:9", "key", asyncio.Event(), lambda: 0.0)


def test_a_service_that_goes_away_is_waited_for_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """Started anew in the middle of a run: the tasks it was not told of meanwhile are not lost."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"answer": (await request.json())["task"]["text"]})

    @asynccontextmanager
    async def up(port: int) -> AsyncIterator[int]:
        app = web.Application()
        app.router.add_post("/solve", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        yield runner.addresses[0][1]
        await runner.cleanup()

    async def episodes() -> list[str]:
        async with up(0) as port:
            service = ServiceAgent(f"http://127.0.0.1:{port}/solve", workers=1)
            found = [await service.run(door(), TASK, 30.0, None)]
        late = asyncio.create_task(service.run(door(), TASK, 30.0, None))
        while "takes no connection" not in caplog.text and not late.done():
            await asyncio.sleep(0.01)
        async with up(port):
            found.append(await late)
        return found

    assert asyncio.run(episodes()) == [TASK.text] * 2
    assert "answers again" in caplog.text


def test_a_service_that_stays_away_fails_when_patience_ends() -> None:
    async def handler(given: dict[str, Any]) -> web.Response:
        return web.json_response({"answer": "six"})

    async def ask() -> None:
        with serving(handler) as url:
            service = ServiceAgent(url, workers=1, patience_s=0.0)
            assert await service.run(door(), TASK, 10.0, None) == "six"
        await service.run(door(), TASK, 10.0, None)

    says = r"cannot be asked at .* for 0 s: .*; start the service, or correct its address"
    with pytest.raises(CallFailed, match=says):
        asyncio.run(ask())


def test_a_service_that_breaks_off_is_not_said_to_name_an_address() -> None:
    async def handler(given: dict[str, Any]) -> web.Response:
        raise asyncio.CancelledError  # as one that is killed: the connection closes

    with serving(handler) as url, pytest.raises(CallFailed, match=r"the agent broke off at .* is lost") as caught:
        run(url, ["x"])
    assert "base_url" not in str(caught.value)


def test_a_service_that_asks_elsewhere_is_told_where_its_session_is() -> None:
    async def handler(given: dict[str, Any]) -> web.Response:
        return web.json_response({"answer": "six"})

    with serving(handler) as url, pytest.raises(CallFailed, match=r"openai_base_url .* and api_key that are POSTed"):
        run(url, ["x"])


def test_a_service_that_is_gone_or_never_done() -> None:
    with pytest.raises(CallFailed, match=r"cannot be asked at http://127\.0\.0\.1:9/solve") as caught:
        run("http://127.0.0.1:9/solve", ["x"])
    assert "base_url" not in str(caught.value)  # it has not begun, so that it has not named one

    async def handler(given: dict[str, Any]) -> web.Response:
        return web.Response(status=202)

    with serving(handler) as url, pytest.raises(CallFailed, match=r"was not over after 0\.5 s"):
        run(url, ["x"], deadline_s=0.5)


def test_what_the_first_and_the_latest_printed_that_failed_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(workflow_module, "_MOST_KEPT", 2)
    for launch in (range(5), range(5, 9)):
        workflow = AgentWorkflow(["sh", "-c", "echo of {id} >&2; [ {id} = 3 ]"], max_new_tokens=200, workers=1)
        workflow.log_to(tmp_path)
        for k in launch:
            with pytest.raises(CallFailed):  # the one that ends well has asked for nothing
                play(workflow, ScriptedEngine(TOKENIZER, []), TOKENIZER, replace(TASK, id=str(k)), None)
        kept = sorted(path.read_text() for path in tmp_path.glob("*.log"))
        assert kept == [f"of {k}\n" for k in (0, 1, launch[-2] - (launch[-2] == 3), launch[-1])]
