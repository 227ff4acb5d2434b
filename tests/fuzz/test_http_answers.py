"""Servers that answer anything: what comes of it is a sound result, or an error of ours, in time.

A real server on loopback answers real calls with damaged JSON, values of other types and ranges, answers that are cut,
endless, dribbled or no HTTP at all. No error but the project's own comes out, nothing hangs, no nonsense is believed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse, WeightUpdate
from datamodules.inference.sglang import SGLangEngine
from datamodules.inference.sglang.client import ServerClient, ServerError, ServerLost, ServerRefused
from datamodules.inference.sglang.model_match import ModelMatch
from datamodules.inference.sglang.server_state import Server, WrongModel
from datamodules.inference.sglang.weights.forms import DiskWeights, HostWeights
from datamodules.inference.sglang.weights.server_weights import ServerWeights, Synced, SyncFailed
from datamodules.inference.weight_files import WeightFiles
from datamodules.prompts.tokenizers import load_tokenizer
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.turn_ends import TurnEnds
from tests.datamodules.inference.engine_suite import VOCABULARY, tiny_policy
from tests.fuzz.damage import VALUES
from tests.fuzz.hostile_server import MODEL_INFO, SERVER_INFO, TOKENS, Answer, HostileServer, http, report, stream

LIMIT_S = 60.0  # for what takes milliseconds: only a hang reaches it
ODD = [one for one in VALUES if len(one) < 10_000]
DEEP = b"[" * 200_000 + b"]" * 200_000


@pytest.fixture(scope="module")
def server() -> Iterator[HostileServer]:
    with HostileServer() as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_unexpected(server: HostileServer, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No traceback in the log: neither ours of what we did not foresee, nor asyncio's of what nobody awaited."""
    yield
    server.act = lambda path, body: None
    shown = [one for one in caplog.records if one.exc_info or (one.name == "asyncio" and one.levelno > logging.INFO)]
    assert not shown, "\n".join(one.getMessage() for one in shown)


def replaced(value: Any, rng: random.Random) -> str:
    """JSON text of `value` with one thing in it, at any depth, replaced by something odd, left out or repeated."""
    places: list[tuple[Any, Any]] = []

    def walk(one: Any) -> None:
        for key in one if isinstance(one, dict) else range(len(one)):
            places.append((one, key))
            if isinstance(one[key], dict | list):
                walk(one[key])

    walk(value)
    holder, key = rng.choice(places)
    what = rng.random()
    if what < 0.15:
        del holder[key]
    elif what < 0.25 and isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[key] = "@odd@"
    return json.dumps(value).replace('"@odd@"', rng.choice(ODD))


def broken(body: bytes, rng: random.Random) -> Answer:
    """An answer that is wrong as HTTP or as JSON, whatever it says."""
    at = rng.randrange(len(body) + 1)
    flipped = bytes(byte ^ (1 << rng.randrange(8)) if rng.random() < 0.02 else byte for byte in body)
    whole = http(body)
    return rng.choice(
        [
            Answer([http(flipped)]),
            Answer([http(body[:at])]),
            Answer([http(body[:at], length=len(body))]),  # cut
            Answer([whole[: rng.randrange(len(whole))]]),
            Answer([http(body, length=max(0, at - 1))]),
            Answer([http(rng.choice(ODD).encode())]),
            Answer([http(DEEP)]),
            Answer([http(b'{"error":' + DEEP + b"}", rng.choice(["200 OK", "500 Oh", "400 No"]))]),
            Answer([http(b'data: {"error": ' + rng.choice(ODD).encode() + b"}\n\n")]),
            Answer([http(b"data: " + DEEP + b"\n\n")]),
            Answer([http(b"\xff\xfe\x00" + body)]),
            Answer([http(b"\x1f\x8b\x08\x00" + body, headers="Content-Encoding: gzip\r\n")]),
            Answer([http(body, rng.choice(["204 No Content", "401 No", "429 Busy", "503 Busy", "999 What", "200"]))]),
            Answer([http(body, "302 Found", "Location: http://127.0.0.1:9/\r\n")]),
            Answer([http(body, headers="Set-Cookie: a=b\r\nX: " + "y" * rng.choice([10, 10_000]) + "\r\n")]),
            Answer([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" + body]),
            Answer([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n" + body[:5] + b"\r\n"]),
            Answer([b"SSH-2.0-OpenSSH_9.6\r\n\r\n"]),
            Answer([]),
            Answer([whole[k : k + 9] for k in range(0, len(whole), 9)]),  # dribbled, and right
        ]
    )


def within(call: Callable[[], Awaitable[Any]]) -> Any:
    """What the call returns, or its GenerationError; anything else, a hang too, is a failure."""

    async def run() -> Any:
        async with asyncio.timeout(LIMIT_S):
            try:
                return await call()
            except GenerationError as error:
                assert str(error) and len(str(error)) < 4000 and "\x1b" not in str(error)
                return error

    return asyncio.run(run())


def test_calls(server: HostileServer) -> None:
    """`get`, `post` and `alive` of the client."""

    async def calls() -> list[int]:
        counts, client = [0, 0], ServerClient(server.url, "k3y-k3y")
        try:
            for case in range(250):
                rng = random.Random(case)
                good = json.dumps({"success": rng.choice([True, False]), "message": "é", "n": [1, {"a": None}]})
                answer = broken(good.encode(), rng)
                if case % 2:
                    answer = Answer([http(replaced(json.loads(good), rng).encode())])
                server.act = lambda path, body, answer=answer: answer
                for confirmed in (None, False, True):
                    try:
                        if confirmed is None:
                            found = await client.get("/info", LIMIT_S)
                        else:
                            found = await client.post("/do", {}, LIMIT_S, confirmed)
                    except ServerError as error:
                        assert str(error).startswith(server.url) and len(str(error)) < 1000 and "k3y" not in str(error)
                        counts[0] += 1
                        continue
                    counts[1] += 1
                    assert isinstance(found, dict)
                    if confirmed:
                        body = b"".join(answer.pieces).partition(b"\r\n\r\n")[2]
                        assert found["success"] is True and b'"success": true' in body
                assert await client.alive(LIMIT_S) in (True, False)
        finally:
            await client.close()
        return counts

    refused, taken = within(calls)
    assert refused > 150 and taken > 50


@pytest.mark.parametrize("call", ["get", "post", "generate"])
def test_answers_without_end(server: HostileServer, call: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    large = Answer([head, *[piece] * 70])
    slow = Answer([head, *[b"1\r\nx\r\n"] * 1000], pause_s=0.01)

    async def calls() -> None:
        client = ServerClient(server.url)
        try:
            server.act = lambda path, body: large
            with pytest.raises(ServerLost, match=r"more than (16|64) MiB"):
                if call == "generate":
                    async for _ in client.generate({}):
                        pass
                await getattr(client, call)("/x", *([{}] if call == "post" else []), LIMIT_S)
            for answer in (slow, Answer([head], closes=False), Answer([], closes=False)):
                server.act = lambda path, body, answer=answer: answer
                if call == "generate":  # whoever iterates watches the progress: see the test below
                    continue
                with pytest.raises(ServerLost, match=r"no answer within 0\.2 s"):
                    await getattr(client, call)("/x", *([{}] if call == "post" else []), 0.2)
        finally:
            await client.close()

    assert within(calls) is None


def is_sound(response: GenerationResponse, request: GenerationRequest, version: int) -> bool:
    count, stops = len(response.tokens), {*request.stop_token_ids}
    return (
        len(response.logprobs) == len(response.versions) == count <= request.max_new_tokens
        and all(type(token) is int and 0 <= token < VOCABULARY for token in response.tokens)
        and all(type(one) is float and math.isfinite(one) and -1e3 <= one <= 0 for one in response.logprobs)
        and all(type(one) is int and 0 <= one <= version for one in response.versions)
        and response.versions == sorted(response.versions)
        and not stops & {*response.tokens[:-1]}
        and response.finish_reason == ("stop" if stops & {*response.tokens[-1:]} else "length")
        and (response.finish_reason == "stop" or count == request.max_new_tokens)
    )


@pytest.fixture(scope="module")
def engine(server: HostileServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """One that serves version 1 from the hostile server, which was friendly so far."""
    model = tiny_policy()
    path, _ = WeightFiles(tmp_path_factory.mktemp("weights")).write(model, 1)
    made = SGLangEngine(urls=[server.url], start_timeout_s=LIMIT_S)
    made.start(model, 0, 0)
    try:
        made.update_weights(WeightUpdate(1, path=str(path), deadline_s=LIMIT_S))
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def label(server: HostileServer, engine: SGLangEngine) -> str:
    """Of the weights that `engine` gave the server."""
    health = engine.health()
    assert health["servers"][0]["version"] == 1, health
    assert server.version.startswith("v1-")
    return server.version


def test_replies(server: HostileServer, engine: SGLangEngine, label: str) -> None:
    """Reports of a request, changed anywhere."""
    sound = refused = 0
    for case in range(400):
        rng = random.Random(case)
        request = GenerationRequest([1, 2, 3], 4, stop_token_ids=rng.choice([(), (8,), (6,), (99,)]))
        one = report(TOKENS[: rng.choice([1, 2, 4, 4])], label)
        if rng.random() < 0.3:
            one["meta_info"]["finish_reason"] = {"type": rng.choice(["stop", "abort", "length", ""]), "matched": 8}
        text = replaced(one, rng).encode()
        body = stream(*([json.dumps(report(TOKENS[:2], label, ended=False)).encode()] if case % 3 == 0 else []), text)
        answer = broken(body, rng) if case % 4 == 0 else Answer([http(body)])
        server.version = label
        server.act = lambda path, body, answer=answer: answer if path == "/generate" else None
        found = within(lambda request=request: engine.generate(request))
        if isinstance(found, GenerationResponse):
            assert is_sound(found, request, 1), (case, text, found)
            sound += 1
        else:
            refused += 1
    assert sound > 10 and refused > 200
    server.act = lambda path, body: None
    found = within(lambda: engine.generate(GenerationRequest([1], 4)))  # and nothing of it stays
    assert found.tokens == TOKENS and engine.health()["error"] == ""


def test_a_reply_whose_last_report_is_lost_is_complete_and_not_continued(
    server: HostileServer, engine: SGLangEngine, label: str
) -> None:
    server.version = label
    body = b"data: " + json.dumps(report(TOKENS, label, ended=False)).encode() + b"\n\n"
    server.act = lambda path, given: Answer([http(body)]) if path == "/generate" else None
    asked = server.asked.count("/generate")
    found = within(lambda: engine.generate(GenerationRequest([1], 9, stop_token_ids=(8,))))
    assert (found.tokens, found.finish_reason) == (TOKENS, "stop")
    assert server.asked.count("/generate") == asked + 1


def test_a_stop_at_an_end_that_the_model_names_is_the_end(
    server: HostileServer, engine: SGLangEngine, label: str, caplog: pytest.LogCaptureFixture
) -> None:
    def act(path: str, body: bytes) -> Answer | None:
        """Stops at 6, whatever it is asked: an end in the configuration of its own model."""
        if path != "/generate":
            return None
        sent.append(json.loads(body)["sampling_params"]["stop_token_ids"])
        one = report(TOKENS[:2], label)
        one["meta_info"]["finish_reason"] = {"type": "stop", "matched": 6}
        return Answer([http(stream(json.dumps(one).encode()))])

    server.version, server.act = label, act
    sent: list[list[int]] = []
    tokenizer = load_tokenizer("char:0123456789")
    episode = EpisodeEngine(
        engine, tokenizer, None, name="e", seed="s", ends=TurnEnds({1: ("tokenizer",), 6: ("model",)})
    )
    found = within(lambda: episode.generate(GenerationRequest([2], 6, stop_token_ids=(1,))))
    assert (found.tokens, found.finish_reason, sent) == ([5, 6], "stop", [[1, 6]])
    assert not caplog.messages
    # A request of the engine itself ends where it says, as with every engine; that the server disagrees is said once.
    found = within(lambda: engine.generate(GenerationRequest([2], 6, stop_token_ids=(1,))))
    assert (found.tokens, found.finish_reason) == ([5, 6] * 3, "length")
    assert len([one for one in caplog.messages if "stopped at token 6, which does not end this run's" in one]) == 1


def test_replies_that_never_end(server: HostileServer, tmp_path: Path) -> None:
    """They cost their own deadline."""
    model = tiny_policy()
    path, _ = WeightFiles(tmp_path).write(model, 1)
    engine = SGLangEngine(urls=[server.url], start_timeout_s=LIMIT_S, request_timeout_s=0.3)
    engine.start(model, 0, 0)
    try:
        engine.update_weights(WeightUpdate(1, path=str(path), deadline_s=LIMIT_S))
        head = b"HTTP/1.1 200 OK\r\n\r\n"
        nothing = json.dumps(report([], server.version, ended=False)).encode()
        for answer in (
            Answer([head], closes=False),
            Answer([head, *[b"data: " + nothing + b"\n"] * 1000], pause_s=0.01),
            Answer([head, *[b"\n"] * 1000], pause_s=0.01),
        ):
            server.act = lambda path, body, answer=answer: answer if path == "/generate" else None
            found = within(lambda: engine.generate(GenerationRequest([1], 4)))
            assert isinstance(found, GenerationError) and "request_timeout_s = 0.3" in str(found)
    finally:
        engine.close()


def test_what_a_server_says_it_is(server: HostileServer) -> None:
    """`/model_info` and `/server_info`, with which a server joins."""
    match = ModelMatch(tiny_policy())

    async def joins() -> list[int]:
        counts = [0, 0]
        for case in range(250):
            rng = random.Random(case)
            path = rng.choice(["/model_info", "/server_info"])
            good = {**MODEL_INFO, "weight_version": "0"} if path == "/model_info" else SERVER_INFO
            answer = Answer([http(replaced(json.loads(json.dumps(good)), rng).encode())])
            if case % 4 == 0:
                answer = broken(json.dumps(good).encode(), rng)
            server.act = lambda asked, body, answer=answer, path=path: answer if asked == path else None
            client = ServerClient(server.url)
            one = Server("it", client, None, 16)
            try:
                await match.check(one)
            except (ServerError, WrongModel) as error:
                assert len(str(error)) < 1000
                counts[0] += 1
            else:
                assert 1 <= one.limit <= 16 and 1 <= one.max_context <= match.positions
                assert type(one.incremental) is bool
                counts[1] += 1
            finally:
                await client.close()
        return counts

    refused, taken = within(joins)
    assert refused > 50 and taken > 50


def test_an_engine_does_not_start_on_a_server_that_makes_no_sense(server: HostileServer) -> None:
    server.act = lambda path, body: Answer([http(b'{"max_req_input_len": -5, "architectures": [[]]}')])
    engine = SGLangEngine(urls=[server.url], start_timeout_s=1.0)
    with pytest.raises(GenerationError, match=r"SGLangEngine\.start"):
        engine.start(tiny_policy(), 0, 0)


def test_weight_updates(server: HostileServer) -> None:
    """An update is done when every call of it was answered with success, and only then."""
    names = ("/update_weights_from_disk", "/end_weight_update", "/pause_generation", "/continue_generation")

    async def updates() -> list[int]:
        counts = [0, 0]
        for case in range(150):
            rng = random.Random(case)
            path = rng.choice(names)
            good = {"success": True, "message": "done"}
            answer = Answer([http(replaced(dict(good), rng).encode())])
            if case % 2:
                answer = broken(json.dumps(good).encode(), rng)
            server.act = lambda asked, body, answer=answer, path=path: answer if asked == path else None
            client = ServerClient(server.url)
            weights = ServerWeights(client)
            try:
                done = await weights.bring(DiskWeights(case, 0, "/somewhere"), LIMIT_S)
            except SyncFailed as error:
                assert len(str(error)) < 2000
                counts[0] += 1
            else:
                body = b"".join(answer.pieces).partition(b"\r\n\r\n")[2]
                assert isinstance(done, Synced) and done.version == case
                assert path != "/update_weights_from_disk" or b'"success": true' in body
                counts[1] += 1
            finally:
                await weights.close()
                await client.close()
        return counts

    failed, done = within(updates)
    assert failed > 30 and done > 20


def test_broadcasts_that_are_refused_or_answered_with_nonsense(server: HostileServer) -> None:
    weights = HostWeights.copy_of(dict(tiny_policy().state_dict()), 1)
    answers: list[tuple[str, bytes]] = [
        ("/server_info", b'{"tp_size": -1}'),
        ("/server_info", b'{"tp_size": "two", "pp_size": []}'),
        ("/server_info", DEEP),
        ("/init_weights_update_group", b"[]"),
        ("/init_weights_update_group", b'{"success": "true"}'),
        ("/init_weights_update_group", b'{"success": false, "message": {"a": 1}}'),
    ]

    async def bring(path: str, body: bytes) -> None:
        server.act = lambda asked, given: Answer([http(body)]) if asked == path else None
        client = ServerClient(server.url)
        own = ServerWeights(client)
        try:
            await own.bring(weights, LIMIT_S)
        finally:
            await own.close()
            await client.close()

    for path, body in answers:
        found = within(lambda path=path, body=body: bring(path, body))
        assert isinstance(found, SyncFailed), (path, body)
        assert isinstance(found.__cause__, ServerRefused | ServerLost)
