"""Sessions that come up by their name: when they are over, and what is recorded of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from datamodules.files.recording import read_batch, versions
from datamodules.workflows.gateway import Budget, standalone
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.gateway.standalone import OpenSessions, SessionRecorder
from datamodules.workflows.tool_calls import hermes_calls
from datamodules.workflows.turn_ends import TurnEnds
from tests.datamodules.workflows.gateway.test_server import (
    HELLO,
    TOKENIZER,
    WAIT_S,
    Slow,
    ask,
    bearer,
    on_a_loop,
    refusal,
    serving,
)
from tests.datamodules.workflows.scripted_engine import ScriptedEngine


def opened(engine: ScriptedEngine, directory: Path | None, idle_s: float = 600.0) -> OpenSessions:
    record = None if directory is None else SessionRecorder(directory)
    ends = TurnEnds.of(TOKENIZER)
    return OpenSessions(engine, TOKENIZER, "key", Sampling(64), Budget(), hermes_calls, ends, record, idle_s)


@on_a_loop
async def test_a_session_is_not_silent_while_a_call_is_sampled() -> None:
    engine = Slow()
    sessions = opened(engine, None, idle_s=0.01)
    session = sessions.open("named", "key")
    assert session is not None
    async with serving(session) as (client, (address,)):
        asking = asyncio.create_task(ask(client, address, session))
        await asyncio.wait_for(engine.asked.wait(), WAIT_S)
        await asyncio.sleep(0.05)
        assert not sessions._is_silent(session)
        engine.go_on.set()
        assert await asking == "well"
        await asyncio.sleep(0.05)
        assert sessions._is_silent(session)


@on_a_loop
async def test_a_call_under_way_when_its_session_ends_is_not_answered(tmp_path: Path) -> None:
    engine = Slow()
    engine.go_on.set()
    sessions = opened(engine, tmp_path)
    session = sessions.open("named", "key")
    assert session is not None
    async with serving(session, ended=sessions.end) as (client, (address,)):
        assert await ask(client, address, session) == "well"
        engine.go_on.clear()
        engine.asked.clear()
        late = [
            client.post(address + "/v1/chat/completions", json={**HELLO, "stream": stream}, headers=bearer(session))
            for stream in (False, True)
        ]
        asking = [asyncio.create_task(one) for one in map(refusal, late)]
        while len(session.repeats.running) < 2:
            await asyncio.sleep(0.01)
        async with client.post(address + "/end", headers=bearer(session)) as answer:
            assert answer.status == 200
        assert [await one for one in asking] == [(403, "session_ended")] * 2
    (group,) = read_batch(tmp_path, 0)
    assert [one.metadata["abandoned_calls"] for one in group.trajectories] == [2]


@on_a_loop
async def test_gateways_that_record_into_one_directory_keep_each_others_sessions(tmp_path: Path) -> None:
    gateways = [opened(ScriptedEngine(TOKENIZER, [f"of {k}"]), tmp_path) for k in range(2)]
    for k, sessions in enumerate(gateways):
        session = sessions.open("named", "key")
        assert session is not None
        async with serving(session, ended=sessions.end) as (client, (address,)):
            assert await ask(client, address, session) == f"of {k}"
            async with client.post(address + "/end", headers=bearer(session)) as answer:
                assert answer.status == 200
    found = [group.trajectories[0] for version in versions(tmp_path) for group in read_batch(tmp_path, version)]
    assert ["of 0" in TOKENIZER.decode(one.tokens) for one in found] == [True, False]


@on_a_loop
async def test_a_session_is_written_without_listing_those_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sessions, looked = opened(ScriptedEngine(TOKENIZER, lambda request: "well"), tmp_path), list[Path]()
    monkeypatch.setattr(standalone, "versions", lambda directory: looked.append(directory) or versions(directory))
    for k, listed in enumerate([0, 0, 1, 1]):
        session = sessions.open(f"named {k}", "key")
        assert session is not None
        if k == 2:
            (tmp_path / "batch_00000002.safetensors").touch()  # of another gateway
        async with serving(session, ended=sessions.end) as (client, (address,)):
            assert await ask(client, address, session) == "well"
            async with client.post(address + "/end", headers=bearer(session)) as answer:
                assert answer.status == 200
        assert len(looked) == listed
    assert versions(tmp_path) == [0, 1, 2, 3, 4]
