"""`ServerClient`: typed, awaited calls to one SGLang server over HTTP.

Promises: every call has a deadline; what the server says about a failure is in our error, beside its address; a server
that cannot be reached or does not answer raises `ServerLost`, one that refuses raises `ServerRefused`; answers are read
as JSON and nothing else; the API key goes into the request header only, never into logs, errors or `repr`.

Its session belongs to the event loop of the first call: use one client from one loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from datamodules.inference.protocol import GenerationError

_REASON_CHARACTERS = 600


class ServerError(GenerationError):
    """A call to a server that failed; the message begins with the server's address."""


class ServerLost(ServerError):
    """No connection, a broken one, or no answer before the deadline."""


class ServerRefused(ServerError):
    """An answer that says no; `status` is its HTTP status, the message holds the server's own words."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """Calls to one server.

    Args:
        url: "http://host:port".
        api_key: sent as a bearer token; None for servers without one.
        connect_s: seconds to open a connection.

    Raises:
        ValueError: the url is not of that form, or carries a password.
    """

    def __init__(self, url: str, api_key: str | None = None, connect_s: float = 10.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            # An address with a password is not repeated: this message may be logged.
            shown = "an address with a password" if parts.username else f"'{url}'"
            raise ValueError(f"urls: {shown}, must look like http://127.0.0.1:30000 (keys come from the environment)")
        self.url = url.rstrip("/")
        self._key = api_key
        self._connect_s = connect_s
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"ServerClient({self.url!r})"

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    async def close(self) -> None:
        """Drops all connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # ------------------------------------------------------------------------------------------------ plain calls

    async def get(self, path: str, deadline_s: float) -> dict[str, Any]:
        """The JSON object (or {} for an empty answer) at `path`. Raises ServerLost or ServerRefused."""
        return await self._call("GET", path, None, deadline_s)

    async def post(self, path: str, body: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Posts `body`; an answer `{"success": false}` counts as refused. Raises ServerLost or ServerRefused."""
        answer = await self._call("POST", path, body, deadline_s)
        if answer.get("success") is False:
            raise ServerRefused(f"{self.url}{path}: {answer.get('message') or answer}"[:_REASON_CHARACTERS], 200)
        return answer

    async def alive(self, deadline_s: float) -> bool:
        """Whether /health answers 200 in time (while paused only of servers that do not generate for it)."""
        try:
            await self.get("/health", deadline_s)
        except ServerError:
            return False
        return True

    async def pause(self, deadline_s: float) -> None:
        """Running requests go back to the queue with their output kept; returns when no forward pass runs."""
        await self.post("/pause_generation", {"mode": "retract"}, deadline_s)
        await self.get("/server_info", deadline_s)  # passes through the scheduler, behind the pause

    async def resume(self, deadline_s: float) -> None:
        await self.post("/continue_generation", {}, deadline_s)

    async def abort(self, request_id: str, deadline_s: float) -> None:
        """Ends one request; one that is over is none of the server's business."""
        await self.post("/abort_request", {"rid": request_id}, deadline_s)

    # ------------------------------------------------------------------------------------------------- generation

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Posts to /generate with `stream: true` and yields each report of the server as it comes.

        Without a deadline of its own: who iterates watches the progress and closes the iterator.

        Raises:
            ServerRefused: the server does not take the request.
            ServerLost: the connection broke, or closed before the server said it was done.
        """
        try:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s)
            async with self._open().post(f"{self.url}/generate", json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise self._refusal("/generate", response.status, await response.read())
                rest = b""
                async for piece in response.content.iter_any():  # lines may be longer than any line buffer
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        if not line.startswith(b"data: "):
                            continue
                        if line.strip() == b"data: [DONE]":
                            return
                        report = json.loads(line[6:])
                        if "error" in report:
                            status = int(report["error"].get("code") or 400)
                            raise self._refusal("/generate", status, line[6:])
                        yield report
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerLost(f"{self.url}/generate: {_words(error)}") from error
        raise ServerLost(f"{self.url}/generate: the connection closed before the answer was complete")

    # ---------------------------------------------------------------------------------------------------- the wire

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Concurrency is the fleet's to bound. A new connection for every call: the server closes idle ones, and
                # a call that meets one just closing looks like a lost server, in the middle of an update at worst.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                headers={"Authorization": f"Bearer {self._key}"} if self._key else None,
            )
        return self._session

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(deadline_s):
                async with self._open().request(method, f"{self.url}{path}", json=body) as response:
                    content = await response.read()
        except TimeoutError as error:
            raise ServerLost(f"{self.url}{path}: no answer within {deadline_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{self.url}{path}: {_words(error)}") from error
        if response.status != 200:
            raise self._refusal(path, response.status, content)
        try:
            answer = json.loads(content) if content else {}
        except ValueError as error:
            if path == "/health" or not content.lstrip().startswith((b"{", b"[")):
                return {"message": content.decode(errors="replace")[:_REASON_CHARACTERS]}
            raise ServerLost(f"{self.url}{path}: an answer that is not JSON: {content[:80]!r}") from error
        return answer if isinstance(answer, dict) else {"answer": answer}

    def _refusal(self, path: str, status: int, content: bytes) -> ServerRefused:
        text = content.decode(errors="replace").strip()
        try:
            answer = json.loads(text)
            error = answer.get("error", answer)
            text = str(error.get("message") or text) if isinstance(error, dict) else str(error)
        except (ValueError, AttributeError):
            pass
        if status in (401, 403) and not self._key:
            text = f"{text}; the server wants an API key, see api_key_env"
        return ServerRefused(f"{self.url}{path}: HTTP {status}: {text[:_REASON_CHARACTERS]}", status)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
