"""Malformed, oversized, truncated, hostile and slow requests to the agents' gateway, over sockets of their own.

Each is answered as its protocol answers, or its connection is closed in time; another session goes on undisturbed.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from datamodules.conversations.chat_template import Chat
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Gateway, Session
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.tool_calls import hermes_calls
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, ScriptedEngine
from tests.helpers.recorded_samples import byte_tokenizer

TOKENIZER = byte_tokenizer(WITH_CALLS)
TRANSFER_S = 0.5
ANSWER_S = 60.0
MOST_GROWTH = 300 << 20  # bytes
SCHEMA = {"type": "object", "properties": {"fruit": {"type": "string"}}}
FUNCTION = {"name": "look_up", "description": "price", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "any",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "stop": ["!"],
        "max_tokens": 9,
        "temperature": 1.0,
        "seed": 1,
        "n": 2,
        "logprobs": True,
        "stream": False,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "model": "any",
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
            {"type": "custom_tool_call", "call_id": "d", "name": "edit", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "5"},
        ],
        "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "edit", "format": {"type": "text"}}],
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "max_output_tokens": 9,
        "stream": True,
    },
    "/v1/messages": {
        "model": "any",
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "tool_use", "id": "c", "name": "look_up", "input": {"fruit": "pear"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "5"}]},
        ],
        "tools": [{"name": "look_up", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 9,
        "stop_sequences": ["!"],
        "stream": True,
    },
    "/v1beta/models/any:streamGenerateContent": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "x"}]},
            {
                "role": "model",
                "parts": [
                    {"text": "hm", "thought": True},
                    {
                        "functionCall": {"id": "c", "name": "look_up", "args": {"fruit": "pear"}},
                        "thoughtSignature": "s",
                    },
                ],
            },
            {"role": "user", "parts": [{"functionResponse": {"name": "look_up", "response": {"output": "5"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "look_up", "parameters": {"type": "OBJECT", "required": ["a"]}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {"maxOutputTokens": 9, "stopSequences": ["!"], "seed": 1, "candidateCount": 2},
    },
    "/v1/completions": {"model": "any", "prompt": [1, 2, 3], "max_tokens": 4, "n": 1, "stop": "!", "logprobs": 0},
}
COUNTED = {key: BODIES["/v1/messages"][key] for key in ("model", "system", "messages", "tools")}
POSTED = {**BODIES, "/v1/messages/count_tokens": COUNTED, "/reward": {"reward": 1.0}}
JUNK: list[Any] = [
    *(None, True, 0, -1, 2**63, 10**400, 1e308, "", "x", "\ud800", "\x00", "<|end|>", "a" * 10_000),
    *([], {}, [[]], [None], {"type": "text"}, {"": None}, [0] * 1000, "../../etc/passwd", "%00", {"$ref": "#"}),
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*at, key)
        yield from places(one, (*at, key))


def changed(draw: random.Random, body: dict[str, Any]) -> bytes:
    """One or two values of a good body are something else."""
    made = copy.deepcopy(body)
    for _ in range(draw.randint(1, 2)):
        *way, last = draw.choice(list(places(made)))
        inside = made
        for key in way:
            inside = inside[key]
        inside[last] = copy.deepcopy(draw.choice(JUNK))
    if draw.random() < 0.2:
        made[draw.choice(["top_p", "logit_bias", "wat", "model", "\x00", "a" * 10_000])] = draw.choice(JUNK)
    return dumped(made)


def dumped(value: Any) -> bytes:
    limited = re.compile(rb'"HUGE"')
    text = json.dumps(value, default=str) if 10**400 not in _numbers(value) else json.dumps(_spelled(value))
    return limited.sub(b"1" + b"0" * 400, text.encode())


def _numbers(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, int) else [found for one in inner for found in _numbers(one)]


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spelled(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_spelled(one) for one in value]
    return "HUGE" if isinstance(value, int) and value == 10**400 else value


def broken(draw: random.Random, body: dict[str, Any]) -> bytes:
    """What is no JSON, or not the JSON of a request."""
    good = json.dumps(body).encode()
    cut = draw.randrange(len(good))
    deep = draw.choice([70, 900, 50_000])
    return draw.choice(
        [
            good[:cut],
            good[:cut] + bytes(draw.randrange(256) for _ in range(9)) + good[cut:],
            good[:-1] + b', "user": NaN}',
            good + good,
            b"[" * deep,
            b'{"messages":' * deep + b"1" + b"}" * deep,
            json.dumps({**body, "metadata": json.loads("[" * 70 + "]" * 70)}).encode(),
            b'{"messages": [' + b"[]," * 100_000 + b"[]]}",
            b'{"input": ' + b"9" * 5_000 + b"}",
            b"",
            b"\xff\xfe" + good,
            good.decode().encode("utf-16"),
            b"null",
        ]
    )


class Target:
    """The gateway under fire: one session that is shot at, one that only wants to go on."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine(TOKENIZER, lambda _: "well!")
        self.gateway = Gateway(transfer_s=TRANSFER_S)
        self.shot, self.other = self._session(), self._session()
        self.port = 0

    def _session(self) -> Session:
        episode = EpisodeEngine(self.engine, TOKENIZER, None, name="e", seed="s")  # type: ignore[arg-type]
        return Session(episode, Chat(TOKENIZER), Sampling(9), Budget(max_calls=9999), hermes_calls)

    async def open(self) -> None:
        await self.gateway.open()
        self.port = int(self.gateway.address.rpartition(":")[2])
        self.gateway.admit(self.shot)
        self.gateway.admit(self.other)

    def request(self, path: str, body: bytes, key: str | None = None, *headers: str, session: str = "") -> bytes:
        whole = f"/r/{session or self.shot.id}{path}" if path in POSTED else path
        lines = [
            f"POST {whole} HTTP/1.1",
            "Host: x",
            "Content-Type: application/json",
            f"Authorization: Bearer {self.shot.key if key is None else key}",
            *(headers or (f"Content-Length: {len(body)}",)),
            "Connection: close",
        ]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    async def said(self, sent: bytes, wait_s: float = 0.0) -> tuple[int, bytes]:
        """Status, 0 for a closed connection, and body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(sent)
            await asyncio.sleep(wait_s)
            answer = await asyncio.wait_for(reader.read(), ANSWER_S)
        except ConnectionError:
            answer = b""
        finally:
            writer.transport.abort()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]) if head else 0, body

    async def check_the_other_goes_on(self) -> None:
        count = len(self.other.exchanges)
        body = json.dumps({"messages": [{"role": "user", "content": f"turn {count}"}]}).encode()
        status, answer = await self.said(
            self.request("/v1/chat/completions", body, self.other.key, session=self.other.id)
        )
        assert status == 200 and json.loads(answer)["choices"][0]["message"]["content"] == "well!"
        assert len(self.other.exchanges) == count + 1 and self.other.rewards.episode is None

    def check_refused(self, path: str, status: int, body: bytes, statuses: tuple[int, ...] = ()) -> None:
        """In the path's own shape, naming no key and no file."""
        assert 400 <= status < 500 and (not statuses or status in statuses), (status, body[:300])
        told = json.loads(body)
        if path.startswith("/v1/messages"):
            assert told["type"] == "error" and told["error"]["type"].endswith(("_error", "_too_large"))
        elif path.startswith("/v1beta"):
            assert told["error"]["code"] == status and told["error"].keys() == {"code", "message", "status"}
        else:
            assert {"message", "type", "param", "code"} == told["error"].keys()
        assert told["error"]["message"] and len(body) < 2000
        for secret in ("Traceback", '.py"', self.shot.key, self.other.key):
            assert secret not in body.decode()


def under_fire(shots: Callable[[Target], Any]) -> Target:
    """Fires, and checks what must hold whatever was shot."""

    async def run() -> Target:
        target = Target()
        await target.open()
        before = psutil.Process().memory_info().rss
        try:
            await target.check_the_other_goes_on()
            await shots(target)
            await target.check_the_other_goes_on()
            assert psutil.Process().memory_info().rss - before < MOST_GROWTH
            assert target.shot.fault is None and target.other.fault is None
        finally:
            await target.gateway.close()
        return target

    return asyncio.run(run())


@pytest.mark.parametrize("path", list(POSTED))
def test_values_of_wrong_types_and_what_is_no_json(path: str) -> None:
    """180 requests over all paths; a changed one may still be a good one."""
    draw = random.Random(path)

    async def shots(target: Target) -> None:
        for k in range(30):
            body = (changed if k % 2 else broken)(draw, POSTED[path])
            status, answer = await target.said(target.request(path, body))
            if status == 200:
                assert k % 2 and b"Traceback" not in answer, body[:300]
            else:
                target.check_refused(path, status, answer)

    under_fire(shots)


def test_keys_and_paths_of_others() -> None:
    """65 requests."""

    async def shots(target: Target) -> None:
        count = len(target.other.exchanges)
        for path, body in POSTED.items():
            sent = json.dumps(body).encode()
            for key in ("", "x" * 5000, target.shot.key, target.other.key[:-1], "\xff", target.other.key + "x"):
                status, answer = await target.said(target.request(path, sent, key, session=target.other.id))
                target.check_refused(path, status, answer, (401,))
        assert len(target.other.exchanges) == count
        own = f"/r/{target.shot.id}"
        tricks = [
            *(f"{own}/../{target.other.id}/v1/messages", f"{own}/%2e%2e/{target.other.id}/v1/responses"),
            *(f"{own}//v1/completions", f"/r/{target.other.id}%2f..%2f{target.shot.id}/v1/messages", f"{own}/v1/%00"),
            *(f"{own};{target.other.id}/v1/messages", "/r//v1/messages", "/", "*", "/r", f"{own}/v1/messages/"),
            *(f"http://elsewhere{own}/v1/files", f"{own}/v1/models/../messages", f"{own}?x=/v1/messages"),
            *(f"/%72/{target.other.id}/v1/messages", f"{own}/v1/messages%0d%0aX: y", "/r/" + "a" * 5000, "/é", "?"),
            *(
                f"{own}/v1/chat/completions/",
                f"{own}/V1/CHAT/COMPLETIONS",
                f"{own}/v1/chat%2fcompletions/x",
                "//",
                "/.",
            ),
        ]
        for path in tricks:
            count = len(target.other.exchanges)
            status, answer = await target.said(target.request(path, b"{}"))
            assert (status == 0 or 400 <= status < 500) and b"Traceback" not in answer, (path, status, answer[:200])
            assert len(target.other.exchanges) == count

    under_fire(shots)


def test_requests_that_are_no_http_or_too_large() -> None:
    """29 requests; what the server's own parser refuses has its shape, and is closed."""
    good = json.dumps(BODIES["/v1/messages"]).encode()
    path = "/v1/messages"
    bomb = zlib.compress(b'{"messages": "' + b"a" * (64 << 20) + b'"}')
    long = json.dumps({**BODIES[path], "system": "a" * (9 << 20)}).encode()
    many = [{"role": "user", "content": "x"}] * 100_000

    async def shots(target: Target) -> None:
        status, answer = await target.said(target.request(path, long))
        target.check_refused(path, status, answer, (413,))
        packed = target.request(path, bomb, None, "Content-Encoding: deflate", f"Content-Length: {len(bomb)}")
        status, answer = await target.said(packed)
        target.check_refused(path, status, answer, (415,))
        too_many = json.dumps({"max_tokens": 1, "messages": many}).encode()
        status, answer = await target.said(target.request(path, too_many))
        target.check_refused(path, status, answer, (400,))
        assert b"prompt is too long" in answer
        head = target.request(path, b"", None, "X: y")
        odd = [
            target.request(path, good, None, "Content-Length: -1"),
            target.request(path, good, None, "Content-Length: x"),
            target.request(path, good, None, "Content-Length: 5", "Content-Length: 6"),
            target.request(path, b"zz\r\n" + good, None, "Transfer-Encoding: chunked"),
            target.request(path, b"ffffffffffffffff\r\n" + good, None, "Transfer-Encoding: chunked"),
            target.request(path, good, None, "Transfer-Encoding: chunked", "Content-Length: 9"),
            target.request(path, good, None, "Content-Encoding: gzip", f"Content-Length: {len(good)}"),
            target.request(path, good, None, "Content-Encoding: br", f"Content-Length: {len(good)}"),
            target.request(path, good, None, "X: " + "a" * 100_000, f"Content-Length: {len(good)}"),
            target.request(path, good, None, *[f"X-{k}: y" for k in range(5000)]),
            target.request(path, good, None, "Expect: 200-ok", f"Content-Length: {len(good)}"),
            head.replace(b"HTTP/1.1", b"HTTP/9.9"),
            head.replace(b"POST", b"P\x00ST"),
            head.replace(b"POST", b"POST POST"),
            head.replace(b"Host: x", b"Host x"),
            head.replace(b"\r\n", b"\n"),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET\r\n\r\n",
            bytes(range(256)) * 9 + b"\r\n\r\n",
        ]
        for sent in odd:
            status, answer = await target.said(sent + b"\r\n\r\n")
            assert (status in (0, 200) or 400 <= status < 500) and b"Traceback" not in answer, (sent[:200], status)
        for method in (b"GET", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE"):
            status, answer = await target.said(head.replace(b"POST", method))
            target.check_refused(path, status, answer, (405,))

    under_fire(shots)


def test_slow_and_half_open_connections() -> None:
    """45 at once: those who do not send, do not read, or send drop by drop end in time, and hold nobody up."""
    good = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 16}).encode()

    async def shots(target: Target) -> None:
        whole = target.request("/v1/chat/completions", good)

        async def half(cut: int) -> None:
            """Announces more than it sends."""
            status, answer = await target.said(whole[:cut])
            if cut < body:
                assert (status, answer) == (0, b"")
            else:
                target.check_refused("/v1/chat/completions", status, answer, (408,))

        async def leaves(cut: int) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", target.port)
            writer.write(whole[:cut])
            writer.transport.abort()

        async def reads_nothing() -> None:
            """Asks for much, 50 times in one connection, and takes nothing of it."""
            _, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1)
            writer.write(whole.replace(b"Connection: close", b"X: y") * 50)
            await asyncio.sleep(4 * TRANSFER_S)
            writer.transport.abort()

        body = whole.index(b"\r\n\r\n") + 4
        slow = [half(body + 1 + 3 * k) for k in range(10)] + [half(1 + 9 * k) for k in range(10)]
        gone = [leaves(9 * k + 1) for k in range(20)]
        fire = asyncio.gather(*slow, *gone, *(reads_nothing() for _ in range(5)))
        for _ in range(5):
            await asyncio.wait_for(target.check_the_other_goes_on(), ANSWER_S)
        await asyncio.wait_for(fire, ANSWER_S)

    under_fire(shots)
