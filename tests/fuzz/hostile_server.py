"""A loopback HTTP server that answers as SGLang does, or anything at all, as a test decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from benchmarks.common.receiver import MODEL_INFO, SERVER_INFO
from datamodules.inference.sglang.loop_thread import LoopThread

TOKENS = [5, 6, 7, 8]


class Answer(NamedTuple):
    """Bytes to write, one after the other with `pause_s` in between; then the connection closes, or nothing happens."""

    pieces: Sequence[bytes]
    pause_s: float = 0.0
    closes: bool = True


def http(body: bytes, status: str = "200 OK", headers: str = "", length: int | None = None) -> bytes:
    """A whole answer; `length`: what it says its length is."""
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n{headers}\r\n".encode() + body


def said(value: Any) -> Answer:
    return Answer([http(json.dumps(value).encode())])


def report(tokens: Sequence[int], label: str = "1", ended: bool = True) -> dict[str, Any]:
    """What a server says of `tokens` at the end of a request of as many."""
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": len(tokens)} if ended else None,
        "completion_tokens": len(tokens),
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "weight_version": label,
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "weight_versions": [{"version": label, "start": 0, "end": len(tokens)}] if ended else None,
    }
    return {"output_ids": list(tokens), "meta_info": meta}


def stream(*reports: bytes) -> bytes:
    """The body of a stream of reports that ends as it should."""
    return b"".join(b"data: " + one + b"\n\n" for one in (*reports, b"[DONE]"))


class HostileServer:
    """Runs from `with` to its end. `act(path, body)` gives an Answer, or None for the ordinary one.

    Attributes:
        version: of its weights, as the last update from disk said.
        asked: paths, in order.
    """

    def __init__(self) -> None:
        self.act: Callable[[str, bytes], Answer | None] = lambda path, body: None
        self.version = "0"
        self.asked: list[str] = []
        self.url = ""

    def __enter__(self) -> HostileServer:
        self._thread = LoopThread("hostile-server")
        self._server = self._thread.call(asyncio.start_server(self._serve, "127.0.0.1", 0), 10.0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.loop.call_soon_threadsafe(self._server.close)
        self._thread.stop(10.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            path = head.split(" ", 2)[1]
            length = next((line[15:] for line in head.lower().split("\r\n") if line.startswith("content-length:")), "0")
            body = await reader.readexactly(int(length))
            self.asked.append(path)
            answer = self.act(path, body) or self._ordinary(path, body)
            for piece in answer.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(answer.pause_s)
            if not answer.closes:
                await reader.read()  # until the client gives up
        writer.close()

    def _ordinary(self, path: str, body: bytes) -> Answer:
        if path == "/model_info":
            return said({**MODEL_INFO, "weight_version": self.version})
        if path == "/server_info":
            return said(SERVER_INFO)
        if path == "/generate":
            asked = json.loads(body)["sampling_params"]["max_new_tokens"]
            tokens = (TOKENS * asked)[:asked]
            return Answer([http(stream(json.dumps(report(tokens, self.version)).encode()))])
        if path == "/update_weights_from_disk":
            self.version = json.loads(body)["weight_version"]
        return said({"success": True, "message": ""})
