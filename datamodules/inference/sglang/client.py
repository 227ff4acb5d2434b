"""`ServerClient`: typed, awaited calls to one SGLang server over HTTP.

Promises: every call has a deadline; what the server says about a failure is in our error, beside its address; a server
that cannot be reached, does not answer, or answers what cannot be read (no JSON, no end of it, nested too deep) raises
`ServerLost`, one that refuses raises `ServerRefused`; answers are read as JSON and nothing else, up to a size, and lead
nowhere else (redirects are refusals); the API key goes into the request header only, never into logs, errors or `repr`.

Its session belongs to the event loop of the first call: use one client from one loop.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from app.text import printable
from datamodules.inference.protocol import GenerationError
from datamodules.processes.deadline import deadline

_REASON_CHARACTERS = 600
_ANSWER_BYTES = 16 << 20  # /server_info has some ten thousand
_REPORT_BYTES = 64 << 20  # one that repeats 100,000 tokens has about five million
_REPORT_WITH_EXPERTS = 512 << 20  # and 400 million of those that 94 layers chose


class ServerError(GenerationError):
    """A call to a server that failed; the message begins with the server's address."""


class ServerLost(ServerError):
    """No connection, a broken one, or no answer before the deadline."""


class ServerSilent(ServerLost):
    """No answer before the deadline, which is nobody's word that it is gone."""


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
        if parts.path.rstrip("/").endswith("/v1"):
            raise ValueError(f"urls: '{url}', leave /v1 out: servers are asked by SGLang's own paths beside it")
        self.url = url.rstrip("/")
        self._key = api_key
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)  # deadlines are the callers'
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"ServerClient({self.url!r})"

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def exposes_key(self) -> bool:
        """Whether the key goes over a network, unencrypted."""
        return self._key is not None and urlsplit(self.url).scheme == "http" and not is_loopback(self.host)

    async def close(self) -> None:
        """Drops all connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # ------------------------------------------------------------------------------------------------ plain calls

    async def get(self, path: str, deadline_s: float) -> dict[str, Any]:
        """The JSON object (or {} for an empty answer) at `path`. Raises ServerLost or ServerRefused."""
        return await self._call("GET", path, None, deadline_s)

    async def post(self, path: str, body: dict[str, Any], deadline_s: float, confirmed: bool = False) -> dict[str, Any]:
        """Posts `body`. Raises ServerLost or ServerRefused.

        An answer whose `success` is anything but true counts as refused; `confirmed`: one without it, too.
        """
        answer = await self._call("POST", path, body, deadline_s)
        if answer.get("success", not confirmed) is not True:
            said = answer.get("message") or answer.get("error_message")
            words = said if isinstance(said, str) and said else "it does not say that this succeeded"
            raise ServerRefused(f"{self.url}{path}: {printable(words, _REASON_CHARACTERS)}", 200)
        return answer

    def whole(self, answer: dict[str, Any], key: str, default: int | None, least: int) -> int | None:
        """The number `answer[key]`, `default` where it is missing or null. Raises ServerLost for anything else."""
        value = answer.get(key)
        if value is None:
            return default
        if type(value) is not int or value < least:
            raise ServerLost(f"{self.url}: '{key}' is {shown(value)}, where a number of at least {least} belongs")
        return value

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

    async def give_up_memory(self, deadline_s: float) -> None:
        """A paused server leaves the GPU's memory: weights, which it keeps in the host's, keys and values, graphs."""
        await self.post("/release_memory_occupation", {}, deadline_s)

    async def take_memory(self, parts: Sequence[str], deadline_s: float) -> None:
        """Parts that it gave up and no others (it ends at one that it has): "weights", "kv_cache", "cuda_graph"."""
        await self.post("/resume_memory_occupation", {"tags": list(parts)}, deadline_s)

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
            options: dict[str, Any] = {"json": body, "timeout": self._timeout, "allow_redirects": False}
            async with self._open().post(f"{self.url}/generate", **options) as response:
                if response.status != 200:
                    content = await self._content(response, "/generate")
                    raise self._refusal("/generate", response.status, content)
                experts = body.get("return_routed_experts")
                async for line in _lines(response, _REPORT_WITH_EXPERTS if experts else _REPORT_BYTES):
                    if not line.startswith(b"data: "):
                        continue
                    if line.strip() == b"data: [DONE]":
                        return
                    report = _parsed(line[6:])
                    if not isinstance(report, dict):
                        raise ValueError(f"a report that is no JSON object: {line[6:86]!r}")
                    if "error" in report:
                        raise self._refusal("/generate", _code(report["error"]), line[6:])
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
                headers={"Accept-Encoding": "identity"}
                | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
                auto_decompress=False,  # a few compressed bytes may stand for gigabytes
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> dict[str, Any]:
        options: dict[str, Any] = {"json": body, "timeout": self._timeout, "allow_redirects": False}
        try:
            async with (
                deadline(deadline_s),
                self._open().request(method, f"{self.url}{path}", **options) as response,
            ):
                content = await self._content(response, path)
        except TimeoutError as error:
            raise ServerSilent(f"{self.url}{path}: no answer within {deadline_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerLost(f"{self.url}{path}: {_words(error)}") from error
        if response.status != 200:
            raise self._refusal(path, response.status, content)
        try:
            answer = _parsed(content) if content else {}
        except ValueError as error:
            if path == "/health" or not content.lstrip().startswith((b"{", b"[")):
                return {"message": content.decode(errors="replace")[:_REASON_CHARACTERS]}
            raise ServerLost(f"{self.url}{path}: an answer that is not JSON: {content[:80]!r}") from error
        return answer if isinstance(answer, dict) else {"answer": answer}

    async def _content(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        """The whole answer. Raises ServerLost for one that is too long to be one."""
        content = bytearray()
        async for piece in response.content.iter_any():
            content += piece
            if len(content) > _ANSWER_BYTES:
                raise ServerLost(f"{self.url}{path}: an answer of more than {_ANSWER_BYTES >> 20} MiB")
        return bytes(content)

    def _refusal(self, path: str, status: int, content: bytes) -> ServerRefused:
        text = content.decode(errors="replace").strip()
        with suppress(ValueError):
            answer = _parsed(content)
            error = answer.get("error", answer) if isinstance(answer, dict) else answer
            said = error.get("message") if isinstance(error, dict) else error
            text = said if isinstance(said, str) and said else text
        if status in (401, 403) and not self._key:
            text = f"{text}; the server wants an API key, see api_key_env"
        return ServerRefused(f"{self.url}{path}: HTTP {status}: {printable(text, _REASON_CHARACTERS)}", status)


async def _lines(response: aiohttp.ClientResponse, most: int) -> AsyncGenerator[bytes, None]:
    """The lines of a stream as they come. Raises ValueError for one of more than `most` bytes, which may not end."""
    rest = bytearray()
    async for piece in response.content.iter_any():  # lines may be longer than any line buffer
        seen = len(rest)
        rest += piece
        begin = 0
        while (end := rest.find(b"\n", max(begin, seen))) >= 0:
            yield bytes(rest[begin:end])
            begin = end + 1
        del rest[:begin]
        if len(rest) > most:
            raise ValueError(f"a report of more than {most >> 20} MiB")


def _parsed(content: bytes | bytearray) -> Any:
    """`content` as JSON. Raises ValueError."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deep") from error


def _code(error: Any) -> int:
    """HTTP status of an error inside a stream."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if type(code) is int else 400


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def shown(value: Any) -> str:
    """Something a server said, for an error: it may be long, or nested deep."""
    return repr(value)[:80] if isinstance(value, str | int | float | bool | None) else type(value).__name__


def _words(error: BaseException) -> str:
    words = printable(str(error), _REASON_CHARACTERS)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
