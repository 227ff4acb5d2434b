"""A server of the Chat Completions API that judges as a test says: real HTTP, on a thread.

It reads what a judge's request holds as an obedient model would: what stands between the lines with the word that the
instructions name is material, everything else is for it.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

_WORD = re.compile(r"\b([0-9a-f]{16})\b")


@dataclass
class Asked:
    """One request. Attributes: body; blocks, by title; rest, what of the user's message stands outside of blocks."""

    body: dict[str, Any]
    blocks: dict[str, str]
    rest: str


@dataclass
class Said:
    """An answer. Attributes: text of the judge; status and headers; seconds before it; drop, to end the connection;
    body, what is sent in place of a Chat Completion with the text."""

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    drop: bool = False
    finish_reason: str = "stop"
    usage: bool = True
    body: str | None = None


class JudgeServer:
    """`with JudgeServer(answer) as server:`, where `answer(asked, number)` gives `Said` or the judge's text.

    Args:
        port: 0 for a free one.

    Attributes:
        url: of the API. port: that it listens on.
        asked: requests so far, in order.
        most_at_once: requests that were in flight together.
    """

    def __init__(self, answer: Callable[[Asked, int], Said | str], port: int = 0) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._now = 0
        self.asked: list[Asked] = []
        self.most_at_once = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server._serve(self)

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None: ...  # clients that have gone

        self._http = Server(("127.0.0.1", port), Handler)
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> JudgeServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["content-length"])))
        asked = read(body)
        with self._lock:
            number = len(self.asked)
            self.asked.append(asked)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            said = self._answer(asked, number)
            said = Said(said) if isinstance(said, str) else said
            time.sleep(said.after_s)
        finally:
            with self._lock:
                self._now -= 1
        if said.drop:
            request.close_connection = True
            request.connection.close()
            return
        reply: dict[str, Any] = {"error": {"message": said.text, "type": "scripted"}}
        if said.status == 200:
            message = {"role": "assistant", "content": said.text}
            reply = {
                "id": f"judged-{number}",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": said.finish_reason}],
            }
            if said.usage:
                reply["usage"] = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        payload = (json.dumps(reply) if said.body is None else said.body).encode()
        request.send_response(said.status)
        length = str(len(payload))
        for name, value in {"content-type": "application/json", "content-length": length, **said.headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(payload)


def read(body: dict[str, Any]) -> Asked:
    """What a judge's request holds."""
    system, user = (one["content"] for one in body["messages"])
    word = _WORD.search(system)
    assert word is not None, "the instructions name no word"
    pattern = re.compile(rf"^BEGIN ([^\n]*) {word[1]}\n(.*?)\nEND \1 {word[1]}$", re.DOTALL | re.MULTILINE)
    return Asked(body, dict(pattern.findall(user)), pattern.sub("", user))
