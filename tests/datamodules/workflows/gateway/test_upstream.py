"""A gateway in front of a provider: what reaches either end, what is recorded, and what a provider that fails costs."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from datamodules.conversations.chat import load_transcripts
from datamodules.conversations.sequence_files import load_sequences
from datamodules.conversations.tokens import RecordedDataError
from datamodules.files.recording import RecordingError
from datamodules.recorded import RecordedDataModule
from datamodules.workflows.gateway.overheard import ConversationRecorder
from datamodules.workflows.gateway.upstream import UpstreamGateway
from tests.datamodules.workflows.gateway.agents import LOOK_UP
from tests.datamodules.workflows.gateway.clients.door import CALL, QUESTION, START_S, TOKENIZER, door
from tests.datamodules.workflows.scripted_engine import WITH_CALLS
from tests.helpers.links import without_links
from tests.helpers.recorded_samples import byte_tokenizer

KEEPS_ITS_HISTORY = WITH_CALLS.replace("loop.index0 < state.asked", "false")
KEY = "sk-of-the-provider-0123456789"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
EVENT = b'data: {"model":"m","choices":[{"index":0,"delta":{"content":"We"},"finish_reason":null}]}\n\n'
ASKED: Any = [{"role": "user", "content": "hello"}]


class Front:
    """A gateway in front of `upstream`, on a thread of its own."""

    def __init__(self, upstream: str, directory: Path, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.directory = directory
        self.gateway = UpstreamGateway(upstream, record=ConversationRecorder(directory), **options)
        self.do(self.gateway.open())

    def do(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(START_S)

    def client(self, session: str, key: str = KEY) -> openai.OpenAI:
        base = f"{self.gateway.address}/r/{session}/v1"
        return openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=START_S)

    def post(self, session: str, path: str, body: Any = None) -> Any:
        address = f"{self.gateway.address}/r/{session}/{path}"
        with urllib.request.urlopen(address, json.dumps(body or {}).encode(), timeout=START_S) as answer:
            return json.load(answer)

    def close(self) -> list[str]:
        lost: list[str] = []
        self.do(self.gateway.close(lambda name, error: lost.append(f"{name}: {error}")))
        self.loop.call_soon_threadsafe(self.loop.stop)
        return lost

    def lines(self) -> list[dict[str, Any]]:
        files = sorted(self.directory.glob("conversations_*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def reaches(self, name: str, count: int) -> bool:
        ends = time.monotonic() + START_S
        while self.gateway.counts[name] != count and time.monotonic() < ends:
            time.sleep(0.01)
        return self.gateway.counts[name] == count


@contextmanager
def front(upstream: str, directory: Path, **options: Any) -> Iterator[Front]:
    made = Front(upstream, directory, **options)
    try:
        yield made
    finally:
        assert made.close() == []


@contextmanager
def provider(answer: Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]) -> Iterator[str]:
    """Its base URL; `answer` is given each request as it came."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        try:
            await answer(head + await reader.readexactly(sum(size)), writer)
        finally:
            writer.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(serve, "127.0.0.1", 0), loop).result(START_S)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/v1"
    finally:
        server.close()
        for task in asyncio.all_tasks(loop):
            loop.call_soon_threadsafe(task.cancel)
        loop.call_soon_threadsafe(loop.call_later, 0.05, loop.stop)
        thread.join(START_S)


def said(client: openai.OpenAI, messages: Any, streamed: bool = False, **options: Any) -> dict[str, Any]:
    """The reply as a message."""
    if not streamed:
        answer = client.chat.completions.create(model="policy", messages=messages, **options)
        return answer.choices[0].message.model_dump(exclude_none=True)
    with client.chat.completions.stream(model="policy", messages=messages, **options) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    return message.model_dump(exclude_none=True, exclude={"parsed": True, "tool_calls": {"__all__": {"index"}}})


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_with_tools_becomes_a_line(streamed: bool, tmp_path: Path, caplog: Any) -> None:
    byte_tokenizer(KEEPS_ITS_HISTORY).save_pretrained(tmp_path / "tokenizer")
    directory = tmp_path / "recorded"
    tool: Any = {"type": "function", "function": LOOK_UP["function"]}
    with door([CALL, "It is 6.", "Yes.", "No."]) as there, front(there.v1, directory) as gateway:
        client = gateway.client("one", there.key)
        messages: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
        first = said(client, messages, streamed, tools=[tool])
        call = first["tool_calls"][0]
        messages += [first, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        second = said(client, messages, streamed, tools=[tool])
        assert second["content"] == "It is 6."
        sure = {"role": "user", "content": "Sure?"}
        assert said(client, [*messages, second, sure], streamed, tools=[tool])["content"] == "Yes."
        edited = {"role": "assistant", "content": "It is 7."}  # which nobody has sampled
        assert said(client, [*messages, edited, sure], streamed, tools=[tool])["content"] == "No."
        assert [one.id for one in client.models.list()] == ["policy"]
        assert gateway.post("one", "reward", {"reward": 0.5}) == {"reward": 0.5, "calls": 0}
        assert gateway.post("one", "end") == {"ended": True}
        with pytest.raises(openai.PermissionDeniedError, match="the session has ended"):
            said(client, messages)
        assert len(there.engine.seen) == 4

    good, other = gateway.lines()
    assert (good["task_id"], good["trial"], other["trial"]) == (other["task_id"], 0, 1)
    assert [one["session"] for one in (good, other)] == ["one", "one"] and good["tools"] == [tool]
    assert (good["reward"], good["rewarded"], good["model"]) == (0.5, True, "policy")
    assert [(one["role"], one.get("weight", 1)) for one in good["messages"] if one["role"] == "assistant"] == [
        ("assistant", 1)
    ] * 3
    assert good["messages"][2]["tool_calls"] == [{"id": call["id"], "name": "look_up", "arguments": {"fruit": "apple"}}]
    assert good["messages"][3] == {"role": "tool", "content": "3", "id": call["id"]}
    # What was trained in the first line, and what nobody sampled, are shown and not trained.
    assert [one.get("weight", 1) for one in other["messages"] if one["role"] == "assistant"] == [0, 0, 1]
    file = next(directory.iterdir())
    assert len(load_transcripts(file)) == 2
    assert there.key not in file.read_text() and there.key not in caplog.text

    data = RecordedDataModule(str(file), workload="whole", tokenizer=str(tmp_path / "tokenizer"))
    data.setup("fit")
    batch = data.batch(0)
    trained = [
        TOKENIZER.decode(tokens[mask])
        for tokens, mask in zip(batch.sequences(), batch.split(batch.loss_mask), strict=True)
    ]
    assert trained == [f"{CALL}<|end|>It is 6.<|end|>Yes.<|end|>", "No.<|end|>"]
    # As the provider was sent them: the same template, the same tools.
    prompt = TOKENIZER.decode(next(iter(batch.sequences())))
    assert prompt.startswith(there.prompts()[0]) and batch.rewards.tolist() == [0.5, 0.5]

    with pytest.raises(RecordedDataError, match=r"no recorded batches: without the token ids .* no RL .* all\.jsonl"):
        RecordedDataModule(str(directory)).setup("fit")
    with pytest.raises(RecordedDataError, match="no recorded batches: without the token ids"):
        load_sequences(directory)


def test_numbers_go_on_and_sessions_without_a_reward_are_refused(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    directory = tmp_path / "recorded"
    for names in (["a", "b"], ["c"]):
        with door(["x", "y"]) as there, front(there.v1, directory, idle_s=3600) as gateway:
            for name in names:
                said(gateway.client(name, there.key), ASKED)
            if names == ["c"]:
                gateway.post("c", "reward", {"reward": 1})
    assert [(one["session"], one["trial"]) for one in gateway.lines()] == [("a", 0), ("b", 1), ("c", 2)]
    assert len({one["task_id"] for one in gateway.lines()}) == 1
    everything = tmp_path / "all.jsonl"
    everything.write_text("".join(json.dumps(one) + "\n" for one in gateway.lines()))
    options: dict[str, Any] = {"path": str(everything), "tokenizer": str(tmp_path / "tokenizer")}
    with pytest.raises(RecordedDataError, match="unrewarded: 2 of 3"):
        RecordedDataModule(**options).setup("fit")
    data = RecordedDataModule(**options, unrewarded="leave_out")
    data.setup("fit")
    assert data.batch(0).rewards.tolist() == [1.0]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "batch_00000000.safetensors").touch()
    with pytest.raises(RecordingError, match="name another"):
        ConversationRecorder(tmp_path / "other")


def test_gateways_that_record_into_one_directory_keep_each_others_sessions(tmp_path: Path) -> None:
    recorders = [ConversationRecorder(tmp_path) for _ in range(2)]
    for k, count in enumerate([3, 1, 2, 2]):
        recorders[k % 2].write([{"session": k}] * count)
    lines = [line for file in sorted(tmp_path.iterdir()) for line in file.read_text().splitlines()]
    assert [json.loads(one)["session"] for one in lines] == [0, 0, 0, 1, 2, 2, 3, 3]
    assert [json.loads(one)["trial"] for one in lines] == list(range(8))


def test_conversations_are_written_without_listing_those_before_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, other = ConversationRecorder(tmp_path), ConversationRecorder(tmp_path)
    glob, looked = Path.glob, list[Path]()
    monkeypatch.setattr(Path, "glob", lambda path, pattern: looked.append(path) or glob(path, pattern))
    for recorder, count, listed in ((one, 3, 0), (one, 1, 0), (other, 2, 1), (other, 1, 1), (one, 1, 2)):
        recorder.write([{}] * count)
        assert len(looked) == listed
    assert sorted(int(path.stem[-8:]) for path in tmp_path.iterdir()) == [0, 3, 4, 6, 7]


def test_conversations_are_counted_right_while_another_gateway_writes_without_hard_links(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, other = ConversationRecorder(tmp_path), ConversationRecorder(tmp_path)
    meanwhile = threading.Thread(target=other.write, args=([{"session": 1}] * 2,))
    replace = os.replace

    def interrupted(aside: Path, path: Path) -> None:
        if meanwhile.ident is None:
            meanwhile.start()
            meanwhile.join(0.2)  # as far as it gets
        replace(aside, path)

    monkeypatch.setattr(os, "link", without_links)
    monkeypatch.setattr(os, "replace", interrupted)
    one.write([{"session": 0}] * 3)
    meanwhile.join()
    lines = [json.loads(line) for file in sorted(tmp_path.iterdir()) for line in file.read_text().splitlines()]
    assert [(line["session"], line["trial"]) for line in lines] == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4)]


def test_requests_and_answers_are_passed_on_as_they_are(tmp_path: Path) -> None:
    seen: list[bytes] = []
    body = b': a comment\r\n\r\ndata: {"odd":  1}\n\nevent: x\ndata: \xff\n\n'

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(
            b"HTTP/1.1 418 Odd\r\nContent-Type: text/odd\r\nX-Own: 1\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\n"
        )
        writer.write(b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()

    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = b'{ "x" : 1 }'
        writer.write(
            b"POST /r/v1/v1/odd%%2Fpath/v1/?a=%%20b&a HTTP/1.1\r\nHost: h\r\nX-Api-Key: %s\r\n"
            b"Connection: close, X-Gone\r\nX-Gone: 1\r\nUser-Agent: me\r\nAccept-Encoding: gzip\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (KEY.encode(), len(sent), sent)
        )
        return await reader.read()

    with provider(answer) as upstream, front(upstream, tmp_path) as gateway:
        told = asyncio.run(ask(int(gateway.gateway.address.rsplit(":", 1)[1])))
        for path in ("../x", "a/%2e%2E/x", "./x"):
            address = f"{gateway.gateway.address}/r/s/v1/{path}"
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(address, b"{}", timeout=START_S)
        assert gateway.gateway.counts == {"other": 1}
    head, _, rest = told.partition(b"\r\n\r\n")
    assert rest == body and head.startswith(b"HTTP/1.1 418 Odd\r\n") and b"X-Hop" not in head
    assert all(one in head for one in (b"text/odd", b"X-Own: 1", b"Set-Cookie: a=1", b"Set-Cookie: b=2"))
    (request,) = seen
    head, _, sent = request.partition(b"\r\n\r\n")
    assert sent == b'{ "x" : 1 }' and head.startswith(b"POST /base/v1/odd%2Fpath/v1/?a=%20b&a HTTP/1.1\r\n")
    assert f"X-Api-Key: {KEY}".encode() in head and b"User-Agent: me" in head and b"identity" in head
    assert b"X-Gone" not in head and b"gzip" not in head and b"Host: h\r\n" not in head
    assert list(tmp_path.iterdir()) == []


def test_a_provider_that_is_down_or_refuses(tmp_path: Path, caplog: Any) -> None:
    with front("http://127.0.0.1:9/v1", tmp_path) as gateway:
        with pytest.raises(openai.InternalServerError, match="could not be reached; see --upstream") as found:
            said(gateway.client("s"), ASKED)
        assert (found.value.status_code, found.value.code) == (502, "upstream_unreachable")
        assert gateway.gateway.counts == {"failed": 1}
    with door() as there, front(there.v1, tmp_path) as gateway:
        with pytest.raises(openai.AuthenticationError, match="no session of this address and key"):
            said(gateway.client("s"), ASKED)
        with pytest.raises(openai.BadRequestError, match="top_p"):
            said(gateway.client("s", there.key), ASKED, top_p=0.5)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            gateway.post("s", "reward", {"reward": 1, "call": "x"})
        assert gateway.gateway.counts == {"failed": 2}
    assert list(tmp_path.iterdir()) == [] and KEY not in caplog.text


def test_a_provider_that_is_silent(tmp_path: Path) -> None:
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        if b'"stream":true' in request:
            writer.write(HEAD + b"\r\n" + EVENT)
        await writer.drain()
        await asyncio.sleep(START_S)

    with provider(answer) as upstream, front(upstream, tmp_path, silence_s=1.0) as gateway:
        with pytest.raises(openai.InternalServerError, match=r"said nothing for 1 s") as found:
            said(gateway.client("s"), ASKED)
        assert (found.value.status_code, found.value.code) == (504, "upstream_timeout")
        stream = gateway.client("s").chat.completions.create(model="m", messages=ASKED, stream=True)
        assert next(stream).choices[0].delta.content == "We"
        with pytest.raises(openai.APIError, match=r"said nothing for 1 s"):
            next(stream)
        assert gateway.reaches("cut_off", 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(EVENT), EVENT), "broke its answer off"),
        (b"Content-Length: 999\r\n\r\n" + EVENT + b"data: {", "Connection error"),
        (b"\r\n" + EVENT, ""),  # what looks like an end, without a reason
    ],
)
def test_a_provider_that_breaks_off_in_mid_stream(more: bytes, says: str, tmp_path: Path) -> None:
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + more)
        await writer.drain()

    with provider(answer) as upstream, front(upstream, tmp_path) as gateway:
        stream = gateway.client("s").chat.completions.create(model="m", messages=ASKED, stream=True)
        assert next(stream).choices[0].delta.content == "We"
        if not says:
            assert list(stream) == []
        else:
            with pytest.raises(openai.APIError, match=says):
                next(stream)
        assert gateway.reaches("cut_off", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_client_that_leaves_ends_the_providers_call(tmp_path: Path) -> None:
    left = threading.Event()

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n")
        try:
            while True:
                writer.write(EVENT)
                await writer.drain()
                await asyncio.sleep(0.01)
        except OSError:
            left.set()

    with provider(answer) as upstream, front(upstream, tmp_path) as gateway:
        stream = gateway.client("s").chat.completions.create(model="m", messages=ASKED, stream=True)
        next(stream)
        stream.close()
        assert left.wait(START_S) and gateway.reaches("cut_off", 1)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_under_way_when_its_session_ends_is_not_answered(streamed: bool, tmp_path: Path) -> None:
    asked, left = threading.Event(), threading.Event()

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n" if streamed else b"")
        try:
            while True:
                writer.write(EVENT if streamed else b"")
                await writer.drain()
                asked.set()
                await asyncio.sleep(0.01)
        except OSError:
            left.set()

    with provider(answer) as upstream, front(upstream, tmp_path) as gateway:
        told: list[Exception] = []

        def ask() -> None:
            try:
                said(gateway.client("s"), ASKED, streamed)
            except openai.APIError as error:
                told.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        assert asked.wait(START_S) and gateway.post("s", "end") == {"ended": True}
        asking.join(START_S)
        assert not asking.is_alive() and "the session has ended" in str(told[0])
        assert streamed or isinstance(told[0], openai.PermissionDeniedError)
        assert gateway.reaches("cut_off", 1) and (not streamed or left.wait(START_S))
    assert list(tmp_path.iterdir()) == []


def test_a_reward_that_arrives_after_the_end_is_refused(tmp_path: Path) -> None:
    with door(["well"]) as there, front(there.v1, tmp_path) as gateway:
        said(gateway.client("s", there.key), ASKED)
        body = b'{"reward": 1}'
        with socket.create_connection(("127.0.0.1", urlsplit(gateway.gateway.address).port), START_S) as late:
            session, ends = gateway.gateway._sessions["s"], time.monotonic() + START_S
            before = session.touched
            late.sendall(b"POST /r/s/reward HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n{" % len(body))
            while session.touched == before and time.monotonic() < ends:
                time.sleep(0.01)
            gateway.post("s", "end")
            late.sendall(body[1:])
            assert late.recv(1 << 16).startswith(b"HTTP/1.1 403 ")
    assert not gateway.lines()[0]["rewarded"]


def test_a_stream_is_whole_when_it_says_so(tmp_path: Path) -> None:
    """Clients go on, or leave, behind its last event, whatever the provider does then."""
    end = EVENT.replace(b"null", b'"stop"') + b"data: [DONE]\n\n"

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n" + EVENT + end)
        await writer.drain()
        await asyncio.sleep(START_S)

    with provider(answer) as upstream, front(upstream, tmp_path) as gateway:
        assert len(list(gateway.client("s").chat.completions.create(model="m", messages=ASKED, stream=True))) == 2
        gateway.post("s", "end")
        assert gateway.gateway.counts == {"written": 1, "replies": 1}
    assert gateway.lines()[0]["messages"][-1] == {"role": "assistant", "content": "WeWe"}


def test_replies_that_are_not_whole_or_no_text_are_counted(tmp_path: Path) -> None:
    with door(["a long reply", "x"]) as there, front(there.v1, tmp_path) as gateway:
        client = gateway.client("s", there.key)
        cut = said(client, ASKED, max_tokens=2)
        assert gateway.reaches("cut_off", 1)
        said(client, [*ASKED, cut, {"role": "user", "content": "go on"}])
        gateway.post("s", "end")
        assert gateway.gateway.counts == {"cut_off": 1, "written": 1, "replies": 1}
    (line,) = gateway.lines()
    assert [one.get("weight") for one in line["messages"]] == [None, 0, None, None] and not line["rewarded"]

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 17\r\nConnection: close\r\n\r\n" + b'{"choices": "no"}')
        await writer.drain()

    with provider(answer) as upstream, front(upstream, tmp_path) as gateway:
        gateway.post("s", "v1/chat/completions", {"messages": ASKED})
        assert gateway.reaches("not_text", 1)
