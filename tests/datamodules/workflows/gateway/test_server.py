"""What the gateway answers over HTTP: who may speak, what is refused and how, and what a client that leaves costs."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from datamodules.conversations.chat_template import Chat
from datamodules.inference.protocol import GenerationRequest
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Session
from datamodules.workflows.gateway.server import Gateway
from datamodules.workflows.gateway.sessions import Sampling
from datamodules.workflows.tool_calls import hermes_calls
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, ScriptedEngine
from tests.helpers.recorded_samples import byte_tokenizer

TOKENIZER = byte_tokenizer(WITH_CALLS)
HELLO: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
WAIT_S = 20.0


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Slow(ScriptedEngine):
    """Answers once it is told to."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER, ["well"] * 9)
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.go_on = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Any:
        self.asked.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await super().generate(request)


def new_session(engine: ScriptedEngine) -> Session:
    episode = EpisodeEngine(engine, TOKENIZER, None, name="e", seed="s")  # type: ignore[arg-type]
    return Session(episode, Chat(TOKENIZER), Sampling(64), Budget(), hermes_calls)


@asynccontextmanager
async def serving(*sessions: Session, **options: Any) -> AsyncIterator[tuple[aiohttp.ClientSession, list[str]]]:
    """A client without a key, and the addresses of the sessions."""
    gateway = Gateway(**options)
    await gateway.open()
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as client:
            yield client, [gateway.admit(one) for one in sessions]
    finally:
        await gateway.close()


def bearer(session: Session) -> dict[str, str]:
    return {"Authorization": f"Bearer {session.key}"}


@on_a_loop
async def test_only_a_sessions_own_key_speaks_in_it() -> None:
    mine, other = new_session(ScriptedEngine(TOKENIZER, ["well"])), new_session(ScriptedEngine(TOKENIZER, []))
    async with serving(mine, other) as (client, (address, elsewhere)):
        keys = [{}, bearer(other), {"x-api-key": "no"}, {"Authorization": "Basic x"}, {"x-api-key": "\udcff"}]
        for headers in keys:
            for path in ("/v1/chat/completions", "/reward", "/end"):
                async with client.post(address + path, json={**HELLO, "reward": 1.0}, headers=headers) as answer:
                    told = await answer.json()
                    assert answer.status == 401 and told["error"]["code"] == "invalid_api_key"
                    assert mine.key not in json.dumps(told) and mine.id not in json.dumps(told)
        unknown = elsewhere[: -len(other.id)] + "0" * len(other.id)
        async with client.get(unknown + "/v1/models", headers=bearer(mine)) as answer:
            assert (answer.status, await answer.json()) == (401, told)  # like a wrong key
        assert not mine.transcript.calls and mine.rewards.total is None and not mine.ended.is_set()
        async with client.post(address + "/v1/chat/completions", json=HELLO, headers=bearer(mine)) as answer:
            assert (await answer.json())["choices"][0]["message"]["content"] == "well"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "no JSON"),
        (b'{"messages": NaN}', 400, "NaN is no JSON"),
        (b"[" * 100_000, 400, "no JSON"),
        (b"\xff", 400, "no JSON"),
        (b"[]", 400, "JSON object"),
        (b"{}", 400, "messages"),
        (json.dumps({**HELLO, "stop": 0}).encode(), 400, "stop: must be a list"),
        (json.dumps({**HELLO, "tools": {}}).encode(), 400, "tools: must be a list"),
        (json.dumps({**HELLO, "stream_options": []}).encode(), 400, "stream_options: must be an object"),
    ],
)
@on_a_loop
async def test_what_cannot_be_read_is_refused_by_name(body: bytes, status: int, says: str) -> None:
    session = new_session(ScriptedEngine(TOKENIZER, ["well"]))
    async with serving(session) as (client, (address,)):
        async with client.post(address + "/v1/chat/completions", data=body, headers=bearer(session)) as answer:
            told = (await answer.json())["error"]
        assert answer.status == status and says in told["message"] and told["type"] == "invalid_request_error"
        async with client.post(address + "/v1/chat/completions", json=HELLO, headers=bearer(session)) as answer:
            assert answer.status == 200  # the session goes on


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/embeddings", 404), ("/v1/chat/completions/..%2f..%2fx", 404), ("/v1/models", 405)],
)
@on_a_loop
async def test_unknown_paths_are_told_in_the_protocols_shape(path: str, status: int) -> None:
    session = new_session(ScriptedEngine(TOKENIZER, []))
    async with serving(session) as (client, (address,)), client.post(address + path, headers=bearer(session)) as answer:
        assert answer.status == status and (await answer.json())["error"]["message"]


@on_a_loop
async def test_a_reward_is_a_finite_number_and_an_end_is_final() -> None:
    session = new_session(ScriptedEngine(TOKENIZER, ["well"]))
    async with serving(session) as (client, (address,)):
        for reward in ("1", True, None, [1]):
            async with client.post(address + "/reward", json={"reward": reward}, headers=bearer(session)) as answer:
                assert answer.status == 400 and "reward" in (await answer.json())["error"]["message"]
        assert session.rewards.total is None
        async with client.post(address + "/reward", json={"reward": 0.5}, headers=bearer(session)) as answer:
            assert (await answer.json(), session.rewards.total) == ({"reward": 0.5, "calls": 0}, 0.5)
        async with client.post(address + "/end", headers=bearer(session)) as answer:
            assert answer.status == 200 and session.ended.is_set()
        async with client.post(address + "/v1/chat/completions", json=HELLO, headers=bearer(session)) as answer:
            assert answer.status == 403 and (await answer.json())["error"]["code"] == "session_ended"


@on_a_loop
async def test_a_client_that_leaves_gives_its_call_up() -> None:
    engine = Slow()
    session = new_session(engine)
    async with serving(session) as (client, (address,)):
        call = asyncio.create_task(
            client.post(address + "/v1/chat/completions", json={**HELLO, "n": 2}, headers=bearer(session))
        )
        await asyncio.wait_for(engine.asked.wait(), WAIT_S)
        call.cancel()
        await asyncio.wait_for(engine.cancelled.wait(), WAIT_S)
        engine.go_on.set()
        async with client.post(address + "/v1/chat/completions", json=HELLO, headers=bearer(session)) as answer:
            assert answer.status == 200
    assert session.counts["abandoned_calls"] == 2 and len(session.transcript.calls) == 1 and session.fault is None


@on_a_loop
async def test_a_request_that_does_not_arrive_is_told_so() -> None:
    session = new_session(ScriptedEngine(TOKENIZER, []))

    async def half() -> AsyncIterator[bytes]:
        yield b'{"messages": '
        await asyncio.sleep(WAIT_S)

    async with (
        serving(session, transfer_s=0.2) as (client, (address,)),
        client.post(address + "/v1/chat/completions", data=half(), headers=bearer(session)) as answer,
    ):
        assert answer.status == 408 and "within 0.2 s" in (await answer.json())["error"]["message"]
