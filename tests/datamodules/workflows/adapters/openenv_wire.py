"""What a real OpenEnv server says, recorded, and a server that says it again to whoever asks the same.

    python -m tests.datamodules.workflows.adapters.openenv_wire PYTHON     # records it anew; PYTHON has openenv-core

Promises: every line of the recording is the real server's; whoever asks otherwise than it was asked gets no answer.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
from aiohttp import web

HERE = Path(__file__).parent
RECORDING = HERE / "openenv_wire.json"
START_S = 120.0


def reset(**fields: Any) -> dict[str, Any]:
    return {"type": "reset", "data": fields}


def step(**action: Any) -> dict[str, Any]:
    return {"type": "step", "data": action}


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return step(type="call_tool", tool_name=tool, arguments=arguments)


# By kind of server: sessions, each from its beginning. After the step to 99 nothing came for a second.
ASKED: dict[str, list[list[dict[str, Any]]]] = {
    "guess": [
        [reset(seed=4), step(number="7"), step(number="x"), step(number="4")],
        [reset(seed=4), step(number=4)],
        [reset(seed=4), step(number="13"), step(number="4")],
        [reset(seed=4), step(number="77")],
        [reset(seed=4), step(number="55")],
        [reset(seed=4), step(number="99")],
        [reset(seed=4), step(number=7), step(number=4)],
        [step(type="list_tools")],
    ],
    "echo": [
        [reset(seed=4), step(message="ab"), step(message='\u00e9 "\n')],
        [reset(), step(message=""), step(message="x")],
        [reset(), step(text="ab"), step(message="ab")],
    ],
    "tools": [
        [step(type="list_tools")],
        [reset(), call("add", a=2, b=3), call("fail"), call("add", a=1, b=1)],
    ],
}


@contextmanager
def real(python: str, kind: str, sessions: int) -> Iterator[str]:
    """The address of a server of the package, with environments of `openenv_server.py`."""
    command = [python, str(HERE / "openenv_server.py"), kind, str(sessions)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(20)


async def say(url: str, session: list[dict[str, Any]]) -> list[str | None]:
    """The answers as they came; None for none within a second."""
    found: list[str | None] = []
    async with aiohttp.ClientSession() as client, client.ws_connect(f"{url}/ws") as socket:
        for message in session:
            await socket.send_json(message)
            try:
                patience = 1.0 if message == step(number="99") else START_S
                found.append(await asyncio.wait_for(socket.receive_str(), patience))
            except TimeoutError:
                found.append(None)
        await socket.send_json({"type": "close"})
        while (await asyncio.wait_for(socket.receive(), START_S)).type is aiohttp.WSMsgType.TEXT:
            pass
    return found


async def record(url: str, kind: str) -> dict[str, Any]:
    """All that is in the recording of a kind."""
    async with aiohttp.ClientSession() as client, client.get(f"{url}/schema") as answer:
        schema = await answer.text()
    said = [list(zip(session, await say(url, session), strict=True)) for session in ASKED[kind]]
    async with aiohttp.ClientSession() as client:
        held = [await client.ws_connect(f"{url}/ws") for _ in range(2)]
        full = await held[-1].receive_str()  # of a server that gives one session
    return {"schema": schema, "sessions": said, "full": full}


class Again:
    """Says it again, in `most` sessions at a time; `held` is the most there were, `stray` what was asked otherwise.

    `answer` says what was not recorded.
    """

    def __init__(self, kind: str, most: int = 4, answer: Callable[[list[Any]], str | None] = lambda said: None) -> None:
        recorded = json.loads(RECORDING.read_text())[kind]
        self.schema, self.full = recorded["schema"], recorded["full"]
        self.answers: dict[str, str | None] = {}
        for session in recorded["sessions"]:
            said: list[Any] = []
            for message, recorded_answer in session:
                said.append(message)
                self.answers[json.dumps(said)] = recorded_answer
        self.most, self.count, self.held = most, 0, 0
        self._answer = answer
        self.stray: list[Any] = []
        self.url = ""

    async def open(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/schema", self._schema)
        app.router.add_get("/ws", self._session)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _schema(self, request: web.Request) -> web.Response:
        return web.Response(text=self.schema, content_type="application/json")

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.count == self.most:
            await socket.send_str(self.full)
            await socket.close()
            return socket
        self.count += 1
        self.held = max(self.held, self.count)
        said: list[Any] = []
        try:
            async for one in socket:
                message = json.loads(one.data)
                if message == {"type": "close"}:
                    break
                said.append(message)
                key = json.dumps(said)
                answer = self.answers[key] if key in self.answers else self._answer(said)
                if answer is not None:
                    await socket.send_str(answer)
                elif key not in self.answers:
                    self.stray.append(said)
        finally:
            self.count -= 1
        await socket.close()
        return socket


@contextmanager
def again(kind: str, most: int = 4, answer: Callable[[list[Any]], str | None] = lambda said: None) -> Iterator[Again]:
    """A server that says what was recorded, on a thread of its own."""
    made, loop = Again(kind, most, answer), asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(made.open(), loop).result(START_S)
    try:
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(START_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_S)
    assert made.stray == [], "nothing else was asked than a real server was"


def echoed(said: list[Any]) -> str | None:
    """What the server of "echo" says last of these; as text, as its library writes it. None for what is no action."""
    observation: dict[str, Any] = {"response": "Say something."}
    reward: float | None = None
    steps = [one["data"] for one in said if one["type"] == "step" and set(one["data"]) == {"message"}]
    if said[-1]["type"] == "step":
        if set(said[-1]["data"]) != {"message"}:
            return None
        observation, reward = {"response": said[-1]["data"]["message"]}, len(said[-1]["data"]["message"]) / 10
    data = {"observation": observation, "reward": reward, "done": len(steps) == 2}
    return json.dumps({"type": "observation", "data": data}, separators=(",", ":"), ensure_ascii=False)


if __name__ == "__main__":
    found = {}
    for name in ASKED:
        with real(sys.argv[1], name, 1) as address:
            found[name] = asyncio.run(record(address, name))
    RECORDING.write_text(json.dumps(found, indent=1) + "\n")
