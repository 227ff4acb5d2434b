"""Answers that have begun: calls that stand still, whose clients hear that they are alive, or break off."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from datamodules.inference.protocol import GenerationError, GenerationRequest
from tests.datamodules.workflows.gateway.test_server import (
    HELLO,
    TOKENIZER,
    WAIT_S,
    Slow,
    ask,
    bearer,
    events,
    new_session,
    on_a_loop,
    serving,
)
from tests.datamodules.workflows.scripted_engine import ScriptedEngine


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_fails_after_its_client_heard_that_it_is_alive_is_cut_and_told_when_it_comes_again(
    stream: bool,
) -> None:
    """A stream has words for it."""
    heard = asyncio.Event()

    class Late(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> Any:
            await heard.wait()
            raise GenerationError("no server is left")

    async def run() -> None:
        session = new_session(Late(TOKENIZER, []))
        async with serving(session, quiet_s=0.1) as (client, (address,)):
            address += "/v1/chat/completions"
            async with client.post(address, json={**HELLO, "stream": stream}, headers=bearer(session)) as answer:
                assert answer.status == 200
                if stream:
                    said = await answer.content.readuntil(b"\n\n")
                    heard.set()
                    said += await answer.content.read()
                    assert said.startswith(b": the call is alive\n\n") and b"engine_failed" in said
                else:
                    heard.set()  # its head has come, ahead of any answer
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await answer.read()
            async with client.post(address, json={**HELLO, "stream": stream}, headers=bearer(session)) as answer:
                assert answer.status == 503 and "the session is over" in await answer.text()

    asyncio.run(run())


@on_a_loop
async def test_who_leaves_after_hearing_that_a_call_is_alive_gives_it_up() -> None:
    engine = Slow()
    session = new_session(engine)
    async with serving(session, quiet_s=0.05) as (client, (address,)):
        async with client.post(address + "/v1/chat/completions", json=HELLO, headers=bearer(session)) as answer:
            assert (await answer.content.readexactly(3)).isspace()
        await asyncio.wait_for(engine.cancelled.wait(), WAIT_S)
        engine.go_on.set()
        assert await ask(client, address, session, retries=1) == "well"
    assert len(session.transcript.calls) == 1 and session.counts["abandoned_calls"] == 1


@on_a_loop
async def test_a_stream_that_cannot_begin_has_a_status_and_one_that_breaks_off_says_so() -> None:
    class Breaking(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> Any:
            request.tell(TOKENIZER.encode("ab", add_special_tokens=False), [-1.0, -1.0])
            await asyncio.sleep(0.05)
            raise GenerationError("no server is left")

    session = new_session(Breaking(TOKENIZER, []))
    async with serving(session) as (client, (address,)):
        address += "/v1/chat/completions"
        body = {**HELLO, "stream": True}
        async with client.post(address, json={**body, "stop": ["a"] * 5}, headers=bearer(session)) as answer:
            assert answer.status == 400 and "at most 4" in await answer.text()
        async with client.post(address, json=body, headers=bearer(session)) as answer:
            found = [one async for one in events(answer)]
        assert answer.status == 200 and found[-1]["error"]["code"] == "engine_failed"
        async with client.post(address, json=body, headers=bearer(session)) as answer:
            assert answer.status == 503
