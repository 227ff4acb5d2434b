"""What the gateway answers over HTTP: who may speak, what is refused and how, and what a client that leaves costs."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from datamodules.conversations.chat_template import Chat
from datamodules.inference.protocol import GenerationRequest
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Session
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.gateway.server import Gateway
from datamodules.workflows.tool_calls import hermes_calls
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, ScriptedEngine
from tests.helpers.recorded_samples import byte_tokenizer, fallback_tokenizer

TOKENIZER = byte_tokenizer(WITH_CALLS)
HELLO: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
WAIT_S = 60.0


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


def new_session(engine: ScriptedEngine, most: int = 64, tokenizer: Any = TOKENIZER, **sampling: Any) -> Session:
    episode = EpisodeEngine(engine, tokenizer, None, name="e", seed="s")  # type: ignore[arg-type]
    return Session(episode, Chat(tokenizer), Sampling(most, **sampling), Budget(), hermes_calls)


@asynccontextmanager
async def serving(
    *sessions: Session, gateway: Gateway | None = None, **options: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, list[str]]]:
    """A client without a key, and the addresses of the sessions. `options`: of a gateway of its own."""
    gateway = gateway or Gateway(**options)
    await gateway.open()
    timeout = aiohttp.ClientTimeout(total=3 * WAIT_S)
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
        (b'{"messages": NaN}', 400, "no JSON"),
        (b"[" * 100_000, 400, "no JSON"),
        (b"\xff", 400, "no JSON"),
        (b"[]", 400, "JSON object"),
        (b"{}", 400, "messages"),
        (b'{"messages": [{}, {}]}', 400, "messages[0].role"),
        (json.dumps({**HELLO, "stop": 0}).encode(), 400, "stop: must be a list"),
        (json.dumps({**HELLO, "tools": {}}).encode(), 400, "tools: must be a list"),
        (
            b'{"messages": [{"role": "tool", "tool_call_id": "x", "content": "3"}]}',
            400,
            'messages[0].tool_call_id: "x", no message before it made a call of this id',
        ),
        (json.dumps({**HELLO, "max_tokens": 0}).encode(), 400, "max_tokens: 0, must be at least 1"),
        (json.dumps({**HELLO, "reasoning_effort": "low"}).encode(), 400, "AgentWorkflow.template_options"),
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
        assert session.bodies.size == 0  # and is not kept
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
async def test_a_path_without_a_session_is_told_the_base_url() -> None:
    async with serving(new_session(ScriptedEngine(TOKENIZER, []))) as (client, (address,)):
        base = address.partition("/r/")[0]
        async with client.post(base + "/v1/chat/completions", json=HELLO) as answer:
            told = (await answer.json())["error"]["message"]
        assert answer.status == 404 and f"the base URL is {base}/r/<session>/v1" in told


@on_a_loop
async def test_a_reward_is_a_finite_number_and_an_end_is_final() -> None:
    session = new_session(ScriptedEngine(TOKENIZER, ["well"]))
    async with serving(session) as (client, (address,)):
        for reward in ("1", True, None, [1]):
            async with client.post(address + "/reward", json={"reward": reward}, headers=bearer(session)) as answer:
                assert answer.status == 400 and "reward" in (await answer.json())["error"]["message"]
        assert session.rewards.total is None
        async with client.post(address + "/reward", json={"score": 1.0}, headers=bearer(session)) as answer:
            assert answer.status == 400 and "the field is `reward`" in (await answer.json())["error"]["message"]
        async with client.post(address + "/reward", json={"reward": 0.5}, headers=bearer(session)) as answer:
            assert (await answer.json(), session.rewards.total) == ({"reward": 0.5, "calls": 0}, 0.5)
        async with client.post(address + "/end", headers=bearer(session)) as answer:
            assert answer.status == 200 and session.ended.is_set()
        async with client.post(address + "/v1/chat/completions", json=HELLO, headers=bearer(session)) as answer:
            assert answer.status == 403 and (await answer.json())["error"]["code"] == "session_ended"


@on_a_loop
async def test_a_reward_that_comes_after_the_end_is_refused() -> None:
    """While it is written, and where it had begun to arrive before."""
    session = new_session(ScriptedEngine(TOKENIZER, []))
    writing, may_end = asyncio.Event(), asyncio.Event()

    async def write(_: Session) -> None:
        writing.set()
        await may_end.wait()

    async def slow_body() -> AsyncIterator[bytes]:
        yield b'{"reward": '
        await writing.wait()
        yield b"0.25}"

    async with serving(session, ended=write) as (client, (address,)):
        bodies: list[dict[str, Any]] = [{"data": slow_body()}, {"json": {"reward": 0.5}}]
        late = asyncio.create_task(refusal(client.post(address + "/reward", headers=bearer(session), **bodies[0])))
        ending = asyncio.create_task(refusal(client.post(address + "/end", headers=bearer(session))))
        await asyncio.wait_for(writing.wait(), WAIT_S)
        told = [await late, await refusal(client.post(address + "/reward", headers=bearer(session), **bodies[1]))]
        may_end.set()
        assert told == [(403, "session_ended")] * 2 and await ending == (200, "")
    assert session.rewards.total is None


async def refusal(asking: Any) -> tuple[int, str]:
    """Its status, and its code; "" where it is none."""
    async with asking as answer:
        return answer.status, (await answer.json()).get("error", {}).get("code", "")


@on_a_loop
async def test_a_session_that_has_been_written_is_held_no_longer() -> None:
    session, written = new_session(ScriptedEngine(TOKENIZER, ["well"])), list[Session]()

    async def write(ended: Session) -> None:
        written.append(ended)

    async with serving(session, ended=write) as (client, (address,)):
        async with client.post(address + "/v1/chat/completions", json=HELLO, headers=bearer(session)) as answer:
            assert answer.status == 200
        async with client.post(address + "/end", headers=bearer(session)) as answer:
            assert answer.status == 200 and written == [session]
        async with client.get(address + "/v1/models", headers=bearer(session)) as answer:
            assert answer.status == 401  # nobody knows it


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


async def ask(
    client: aiohttp.ClientSession, address: str, session: Session, retries: int = 0, key: str = "", **more: Any
) -> str:
    headers = {**bearer(session), "x-stainless-retry-count": str(retries)} | ({"Idempotency-Key": key} if key else {})
    async with client.post(address + "/v1/chat/completions", json={**HELLO, **more}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["choices"][0]["message"]["content"])


@on_a_loop
async def test_a_repetition_of_a_call_that_was_given_up_is_sampled_anew_and_is_one_call() -> None:
    engine = Slow()
    session = new_session(engine)
    async with serving(session) as (client, (address,)):
        call = asyncio.create_task(ask(client, address, session))
        await asyncio.wait_for(engine.asked.wait(), WAIT_S)
        call.cancel()
        await asyncio.wait_for(engine.cancelled.wait(), WAIT_S)
        engine.go_on.set()
        assert await ask(client, address, session, retries=1) == "well"
    assert len(session.transcript.calls) == 1 and "repeated_calls" not in session.counts


@on_a_loop
async def test_a_repetition_of_an_answer_that_was_lost_is_given_that_very_answer() -> None:
    session = new_session(ScriptedEngine(TOKENIZER, ["one", "two", "three"]))
    async with serving(session) as (client, (address,)):
        assert await ask(client, address, session) == "one"
        assert await ask(client, address, session, retries=1) == "one"  # the client says that it never got it
        assert await ask(client, address, session) == "two"  # it does not say so: a call of its own
        assert await ask(client, address, session, seed=1) == "three"
    assert len(session.transcript.calls) == 3 and session.counts["repeated_calls"] == 1


@on_a_loop
async def test_a_key_tells_equal_calls_apart_and_their_repetitions() -> None:
    engine = ScriptedEngine(TOKENIZER, ["one", "two", "three", "four"])
    session = new_session(engine)
    async with serving(session) as (client, (address,)):
        assert await ask(client, address, session, key="a") == "one"
        assert await ask(client, address, session, key="b") == "two"
        assert await ask(client, address, session, key="a") == "one"  # though it does not say that it tries again
        assert await ask(client, address, session, key="b", retries=1) == "two"
        assert await ask(client, address, session) == "three"
        assert await ask(client, address, session, key="a", seed=1) == "four"  # another request
    assert len(session.transcript.calls) == len(engine.responses) == 4 and session.counts["repeated_calls"] == 2


def much_said() -> tuple[int, ScriptedEngine, Session, dict[str, Any]]:
    """Replies to a request, far more than the kernel keeps for a slow reader: how many, who samples them, the body."""
    n = 32
    engine = ScriptedEngine(TOKENIZER, ["well " * 400] * (n + 1))
    return n, engine, new_session(engine, 2000), {**HELLO, "n": n, "logprobs": True}


async def asked_by_one_who_does_not_read(address: str, session: Session, body: dict[str, Any]) -> asyncio.StreamWriter:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    held.setblocking(False)
    url = urlsplit(address)
    await asyncio.get_running_loop().sock_connect(held, (url.hostname, url.port))
    _, writer = await asyncio.open_connection(sock=held, limit=4096)
    said = json.dumps(body).encode()
    head = f"POST {url.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(said)}\r\n"
    writer.write(f"{head}Authorization: Bearer {session.key}\r\n\r\n".encode() + said)
    return writer


@on_a_loop
async def test_what_its_repetition_took_stays_taken_when_the_first_leaves() -> None:
    n, engine, session, body = much_said()
    async with serving(session) as (client, (address,)):
        address += "/v1/chat/completions"
        writer = await asked_by_one_who_does_not_read(address, session, body)
        async with asyncio.timeout(WAIT_S):
            while not session.transcript.calls:
                await asyncio.sleep(0.01)
        headers = {**bearer(session), "x-stainless-retry-count": "1"}
        async with client.post(address, json=body, headers=headers) as answer:
            assert answer.status == 200 and (await answer.read()).count(b'"logprob": ') == n * 2000
        writer.transport.abort()
    assert len(session.transcript.calls) == n == len(engine.responses)
    assert (session.counts["untaken_calls"], session.counts["repeated_calls"]) == (0, n)


@on_a_loop
async def test_a_complete_answer_that_was_not_taken_is_no_sequence_until_it_is_asked_for_again() -> None:
    n, engine, session, body = much_said()
    gateway = Gateway(transfer_s=WAIT_S)
    async with serving(session, gateway=gateway) as (client, (address,)):
        address += "/v1/chat/completions"
        writer = await asked_by_one_who_does_not_read(address, session, body)
        async with asyncio.timeout(3 * WAIT_S):
            while not engine.seen:
                await asyncio.sleep(0)
            gateway._listener._transfer_s = 0.1  # for the answer to the first alone: others take theirs in time
            while not session.counts["untaken_calls"]:
                await asyncio.sleep(0.02)
            gateway._listener._transfer_s = WAIT_S
        assert not session.transcript.calls and session.counts["untaken_calls"] == n
        writer.transport.abort()
        # An equal request, though it does not call itself a repetition.
        async with client.post(address, json=body, headers=bearer(session)) as answer:
            assert answer.status == 200 and (await answer.read()).count(b'"logprob": ') == n * 2000
    assert len(session.transcript.calls) == n == len(engine.responses)
    assert (session.counts["untaken_calls"], session.counts["repeated_calls"]) == (0, n)


@on_a_loop
async def test_a_repetition_waits_for_the_first_where_that_still_looks_alive() -> None:
    engine = Slow()
    session = new_session(engine)
    async with serving(session) as (client, (address,)):
        first = asyncio.create_task(ask(client, address, session))
        await asyncio.wait_for(engine.asked.wait(), WAIT_S)
        second = asyncio.create_task(ask(client, address, session, retries=1))
        await asyncio.sleep(0.1)
        engine.go_on.set()
        assert await asyncio.gather(first, second) == ["well", "well"]
    assert len(session.transcript.calls) == len(engine.responses) == session.counts["repeated_calls"] == 1


@on_a_loop
async def test_equal_calls_side_by_side_are_two() -> None:
    engine = Slow()
    session = new_session(engine)
    async with serving(session) as (client, (address,)):
        calls = [asyncio.create_task(ask(client, address, session)) for _ in range(2)]
        await asyncio.wait_for(engine.asked.wait(), WAIT_S)
        await asyncio.sleep(0.1)
        engine.go_on.set()
        assert await asyncio.gather(*calls) == ["well", "well"]
    assert len(session.transcript.calls) == 2 and not session.counts


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


@on_a_loop
async def test_a_stream_says_what_is_sampled_as_it_is_sampled() -> None:
    """And holds back what is not to be seen."""
    engine = ScriptedEngine(TOKENIZER, ["It is 3\u20ac.STOP and more", "never"])
    engine.pace_s = 0.01
    session = new_session(engine)
    body = {**HELLO, "stream": True, "stop": "STOP", "logprobs": True, "stream_options": {"include_usage": True}}
    said: list[str] = []
    before: list[int] = []  # texts that came while the reply was sampled
    async with (
        serving(session) as (client, (address,)),
        client.post(address + "/v1/chat/completions", json=body, headers=bearer(session)) as answer,
    ):
        found = []
        async for one in events(answer):
            found.append(one)
            if one["choices"] and (text := one["choices"][0]["delta"].get("content")):
                said.append(text)
                before += [] if session.transcript.calls else [len(said)]
    assert "".join(said) == "It is 3\u20ac." and len(before) > 5
    told = [t for one in found for c in one["choices"] if c["logprobs"] for t in c["logprobs"]["content"]]
    call = session.transcript.calls[0]
    assert [t["logprob"] for t in told] == call.logprobs and len(call.logprobs) < len(call.response.tokens)
    assert found[-2]["choices"][0]["finish_reason"] == "stop"
    assert found[-1]["usage"]["completion_tokens"] == len(call.response.tokens)
    assert found[0]["id"] == f"chatcmpl-{call.id}"


@on_a_loop
async def test_a_client_that_leaves_in_mid_stream_gives_its_call_up() -> None:
    engine = ScriptedEngine(TOKENIZER, ["a long reply"])
    engine.pace_s = 0.5  # six seconds for the whole reply
    session = new_session(engine)
    body = {**HELLO, "stream": True}
    async with serving(session) as (client, (address,)):
        address += "/v1/chat/completions"
        async with client.post(address, json=body, headers=bearer(session)) as answer:
            async for one in events(answer):
                if one["choices"][0]["delta"].get("content"):
                    break
            answer.close()
        async with asyncio.timeout(WAIT_S):
            while not session.counts["abandoned_calls"]:
                await asyncio.sleep(0.02)
        engine.pace_s = 0.0
        async with client.post(address, json=body, headers=bearer(session)) as answer:
            deltas = [one["choices"][0]["delta"] async for one in events(answer)]
    assert "".join(one.get("content", "") for one in deltas) == "a long reply"
    assert len(session.transcript.calls) == len(engine.responses) == 1 and len(engine.seen) == 2


def test_what_calls_say_of_sampling_can_be_passed_over() -> None:
    said = [{"role": "user", "content": "x"}]
    greedy = {"temperature": 0, "top_p": 0.9, "frequency_penalty": 0.3, "logit_bias": {"5": 1}}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": said, **greedy}),
        ("messages", {"messages": said, "max_tokens": 9, "temperature": 0, "top_k": 5}),
        ("responses", {"input": "x", "temperature": 2.5, "top_p": 0.1}),
        ("completions", {"prompt": "x", **greedy, "top_p": None}),
        ("chat/completions", {"messages": [*said, *said], "seed": 3}),
    ]

    async def run() -> list[int]:
        async with serving(strict, lenient) as (client, addresses):
            return [
                (await client.post(f"{address}/v1/{path}", json=body, headers=bearer(session))).status
                for session, address in zip((strict, lenient), addresses)
                for path, body in calls
            ]

    engine = ScriptedEngine(TOKENIZER, ["well"] * 9)
    strict, lenient = (
        new_session(ScriptedEngine(TOKENIZER, ["well"] * 9)),
        new_session(engine, temperature=0.7, override=True),
    )
    assert asyncio.run(run()) == [400] * 4 + [200] * 6
    assert [one.temperature for one in engine.seen] == [0.7] * 5 and lenient.counts == {"overridden_calls": 4}


@pytest.mark.parametrize(
    ("tokenizer", "offsets"),
    [
        (TOKENIZER, [0, 1, 1, 2, 3, 3, 3, 3, 4, 5, 6, 7, 8]),
        (fallback_tokenizer(), [0, 1, 1, 2, 3, 3, 3, 3, 4, 5, 7]),
    ],
)
@on_a_loop
async def test_tokens_are_told_with_their_own_bytes_and_where_their_text_begins(
    tokenizer: Any, offsets: list[int]
) -> None:
    """Those of characters that take several, too."""
    session = new_session(ScriptedEngine(tokenizer, ["aéb😀c a a"] * 4), tokenizer=tokenizer)
    async with serving(session) as (client, (address,)):
        for stream in (False, True):
            chat = {**HELLO, "logprobs": True, "stream": stream}
            async with client.post(address + "/v1/chat/completions", json=chat, headers=bearer(session)) as answer:
                found = [one async for one in events(answer)] if stream else [await answer.json()]
            told = [part["logprobs"]["content"] for one in found for part in one["choices"] if part["logprobs"]]
            data = bytes(byte for part in told for token in part for byte in token["bytes"])
            assert data.removesuffix(b"<|end|>").decode() == "aéb😀c a a"
            plain = {"prompt": "x", "logprobs": 0, "stream": stream, "max_tokens": len(offsets)}
            async with client.post(address + "/v1/completions", json=plain, headers=bearer(session)) as answer:
                found = [one async for one in events(answer)] if stream else [await answer.json()]
            told = [part["logprobs"]["text_offset"] for one in found for part in one["choices"] if part["logprobs"]]
            assert [offset for part in told for offset in part] == offsets
