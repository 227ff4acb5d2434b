"""What the providers' packages ask again after, and what they do not: they go by a status and a header."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from datamodules.inference.protocol import GenerationError, GenerationRequest
from datamodules.workflows.gateway import standalone
from tests.datamodules.workflows.gateway.clients.door import TOKENIZER, Door, door
from tests.datamodules.workflows.gateway.test_server import new_session
from tests.datamodules.workflows.gateway.test_upstream import KEY, front, provider
from tests.datamodules.workflows.scripted_engine import ScriptedEngine

PATIENCE_S = 2.0
HELLO: Any = [{"role": "user", "content": "hello"}]
RETRIES = 2
CALLS: dict[str, Callable[[Any], Any]] = {
    "chat": lambda client: client.chat.completions.create(model="any", messages=HELLO),
    "streamed chat": lambda client: client.chat.completions.create(model="any", messages=HELLO, stream=True),
    "responses": lambda client: client.responses.create(model="any", input="hello"),
    "completions": lambda client: client.completions.create(model="any", prompt="hello"),
    "messages": lambda client: client.messages.create(model="any", messages=HELLO, max_tokens=9),
}


class Counting:
    """An unmodified package that tries again twice, and how often it asked."""

    def __init__(
        self,
        call: str,
        v1: str,
        key: str,
        heard: Callable[[Any], None] = lambda answer: None,
        retries: int = RETRIES,
    ) -> None:
        self.requests: list[Any] = []
        package: Any = anthropic if call == "messages" else openai
        kind = package.Anthropic if call == "messages" else package.OpenAI
        self.client = kind(
            base_url=v1.removesuffix("/v1") if call == "messages" else v1,
            api_key=key,
            max_retries=retries,
            http_client=package.DefaultHttpxClient(
                event_hooks={"request": [self.requests.append], "response": [heard]}
            ),
        )
        self.ask = lambda: CALLS[call](self.client)

    def refused(self) -> Any:
        """What the package raises."""
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
            self.ask()
        return caught.value


def failing(request: GenerationRequest) -> str:
    raise GenerationError("out of memory")


async def wrong(*args: Any, **options: Any) -> Any:
    raise RuntimeError("a mistake of ours")


def broken(there: Door) -> None:
    there.session.reply = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize("call", list(CALLS))
def test_what_gets_no_better_is_not_asked_again(call: str) -> None:
    with door(failing) as there:
        asking = Counting(call, there.v1, there.key)
        error = asking.refused()
    assert (error.status_code, error.response.headers["x-should-retry"]) == (503, "false")
    assert "the engine failed; the session is over" in str(error) and len(asking.requests) == 1
    with door(["x"]) as there:
        broken(there)
        asking = Counting(call, there.v1, there.key)
        error = asking.refused()
    assert (error.status_code, error.response.headers["x-should-retry"]) == (500, "false")
    assert "see its log" in str(error) and "mistake" not in str(error) and len(asking.requests) == 1
    with door(["x", "y"], max_calls=1) as there:
        asking = Counting(call, there.v1, there.key)
        asking.ask()
        error = asking.refused()
    assert error.status_code == 400 and "spent" in str(error) and len(asking.requests) == 2


def test_one_session_too_many_waits_until_another_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "_MOST_SESSIONS", 1)
    statuses: list[int] = []
    with door(["x", "y"]) as there, front(there.v1, tmp_path) as gateway:
        Counting("chat", f"{gateway.gateway.address}/r/a/v1", there.key).ask()

        def heard(answer: Any) -> None:
            statuses.append(answer.status_code)
            if statuses == [429]:
                answer.read()
                assert answer.json()["error"]["type"] == "rate_limit_error" and "/end of some" in answer.text
                gateway.post("a", "end")

        later = Counting("completions", f"{gateway.gateway.address}/r/b/v1", there.key, heard)
        assert later.ask().choices[0].text == "y"
    assert statuses == [429, 200]


@pytest.mark.parametrize("first", [b"HTTP/1.1 429 Too Many Requests\r\nretry-after-ms: 1\r\n", b""])
def test_a_provider_that_is_busy_or_breaks_off_is_asked_again_and_recorded_once(first: bytes, tmp_path: Path) -> None:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}
    whole = json.dumps({"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
    seen: list[bytes] = []
    statuses: list[int] = []

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        head, body = (first, b"{}") if len(seen) == 1 else (b"HTTP/1.1 200 OK\r\n", whole.encode())
        if head:
            told = b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
            writer.write(head + told % (len(body), body))
            await writer.drain()

    with provider(answer) as upstream, front(upstream, tmp_path) as gateway:
        v1 = f"{gateway.gateway.address}/r/s/v1"
        asking = Counting("chat", v1, KEY, lambda answer: statuses.append(answer.status_code))
        assert asking.ask().choices[0].message.content == "x"
        gateway.post("s", "end")
        assert gateway.gateway.counts == {"failed": 1, "written": 1, "replies": 1}
    assert statuses == [429 if first else 502, 200] and len(seen) == 2
    assert [one["content"] for one in gateway.lines()[0]["messages"]] == ["hello", "x"]


class Late(ScriptedEngine):
    """Stands still for longer than its clients wait for a sign."""

    async def generate(self, request: GenerationRequest) -> Any:
        await asyncio.sleep(1.5 * PATIENCE_S)
        return await super().generate(request)


@pytest.mark.parametrize("call", list(CALLS))
def test_a_call_that_stands_still_for_longer_than_its_client_is_silent_with_is_answered(call: str) -> None:
    """And is sampled once: packages neither give up at what comes before an answer nor stumble over it. A sign comes
    twenty times as often as they need one: a machine may stand still for most of that."""
    engine = Late(TOKENIZER, ["well"] * 9)
    with door(session=new_session(engine), quiet_s=PATIENCE_S / 20) as there:
        asking = Counting(call, there.v1, there.key)
        asking.client.timeout = PATIENCE_S
        answer = asking.ask()
        said = str(answer)
        if call == "streamed chat":
            said = "".join(one.choices[0].delta.content or "" for one in answer)
    assert "well" in said and len(asking.requests) == len(engine.seen) == 1
    with door(session=new_session(Late(TOKENIZER, ["well"] * 9)), quiet_s=90.0) as there:  # without a sign
        asking = Counting(call, there.v1, there.key, retries=0)
        asking.client.timeout = 0.3
        with pytest.raises((openai.APITimeoutError, anthropic.APITimeoutError)):
            asking.ask()
