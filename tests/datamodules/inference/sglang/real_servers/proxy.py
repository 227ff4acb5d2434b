"""A network between the trainer and a real server that a test can break: `set` says what happens to every byte.

forward   both ways, as if it were not there
hang      connections are accepted and kept, nothing passes (a stuck server, a dropped route)
refuse    new connections are closed at once, old ones too (a dead server)
overload  every request is answered 503, old connections are closed (a gateway whose server is too busy)
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Literal
from urllib.parse import urlsplit

Mode = Literal["forward", "hang", "refuse", "overload"]
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 13\r\nConnection: close\r\n\r\ntoo much load"


class Proxy:
    """Listens on a free port of loopback from `start` on; a thread of its own serves it."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._mode: Mode = "forward"
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.seen = 0  # connections
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, port: int = 0) -> Proxy:
        asyncio.run_coroutine_threadsafe(self._listen(port), self._loop).result(10)
        return self

    def set(self, mode: Mode) -> None:
        asyncio.run_coroutine_threadsafe(self._set(mode), self._loop).result(10)

    def close(self) -> None:
        self.set("refuse")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    async def _listen(self, port: int) -> None:
        self._open.set()
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _set(self, mode: Mode) -> None:
        self._mode = mode
        self._open.clear() if mode == "hang" else self._open.set()
        if mode in ("refuse", "overload"):
            for writer in list(self._writers):
                writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen += 1
        self._writers.add(writer)
        try:
            if self._mode == "refuse":
                return
            if self._mode == "overload":
                await reader.readuntil(b"\r\n\r\n")
                writer.write(_BUSY)
                await writer.drain()
                return
            there_reader, there = await asyncio.open_connection(*self._target)
            self._writers.add(there)
            try:
                await asyncio.gather(self._pump(reader, there), self._pump(there_reader, writer))
            finally:
                self._writers.discard(there)
                there.close()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        with suppress(OSError, RuntimeError):
            writer.write_eof()
