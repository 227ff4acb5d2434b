"""HTTP as gateways hear and speak it: a socket, requests that arrive in time, refusals in their protocol's shape.

Promises: whatever is wrong with a request is answered in its protocol's own shape, without a traceback and without what
the request held; nothing of what clients send is in the log; a connection that asks for nothing is closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http import HttpProcessingError

from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols.base import WireProtocol
from datamodules.workflows.gateway.protocols.chat_completions import ChatCompletions
from datamodules.workflows.gateway.protocols.completions import Completions
from datamodules.workflows.gateway.protocols.generate_content import GenerateContent
from datamodules.workflows.gateway.protocols.messages import Messages
from datamodules.workflows.gateway.protocols.responses import Responses

_log = logging.getLogger(__name__)
MESSAGES = Messages()
PROTOCOLS: tuple[WireProtocol, ...] = (ChatCompletions(), MESSAGES, Responses(), Completions())
GOOGLE = (GenerateContent(), GenerateContent(stream=True))
"""Their paths are behind `/v1/models/<model>:` and `/v1beta/models/<model>:`."""
LEFT = (asyncio.CancelledError, OSError, TimeoutError)
"""How a client that goes away, or does not read, shows."""
_DEEPEST = 64  # nesting of a request's JSON; tools' schemas need some
_CLOSE_S = 5.0
_LINGER_S = 2.0  # for a client to read its refusal while it still sends
_FINAL = (500, 503)
_http_log = logging.getLogger(f"{__name__}.http")
# These lines would quote what is no HTTP, and with it keys.
_http_log.addFilter(lambda line: not (line.exc_info and isinstance(line.exc_info[1], HttpProcessingError)))


def check_host(host: str) -> None:
    """Raises ValueError: nobody can listen there, since it is no address of this machine."""
    why: OSError | None = None
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        found, why = [], error
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as one:
                one.bind(address)
            return
        except OSError as error:
            why = error
    raise ValueError(f"{host!r} is no address of this machine ({why})") from why


class Listener:
    """Hears requests, on the event loop it is opened in.

    Args:
        host: interface.
        port: 0 for any that is free.
        transfer_s: seconds for a request to arrive, and for a client to take a piece of its answer.
        most_bytes: of a request.

    Attributes:
        address: once it is open.
    """

    def __init__(self, host: str, port: int, transfer_s: float, most_bytes: int) -> None:
        self.address = ""
        self._host, self._port = host, port
        self._transfer_s, self._most_bytes = transfer_s, most_bytes
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._silent: set[asyncio.Protocol] = set()  # connections that have not asked for anything yet

    async def open(self, add_routes: Callable[[web.UrlDispatcher], None]) -> None:
        """Listens. Raises OSError when the port is taken."""
        app = web.Application(client_max_size=self._most_bytes, middlewares=[self._hear, _in_the_protocols_words])
        add_routes(app.router)
        # A client that goes away cancels its handler, and with it what the engine samples for it.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=_http_log,
            auto_decompress=False,  # a few bytes may become many
            lingering_time=_LINGER_S,
            shutdown_timeout=_CLOSE_S,
        )
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, self._host, self._port)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        """Answers nobody any more. Idempotent."""
        if self._server is not None:
            self._server.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        """One of aiohttp's, which would wait for the first request's head for ever."""
        assert self._runner is not None and self._runner.server is not None
        made = self._runner.server()

        def hang_up() -> None:
            if made in self._silent:
                self._silent.discard(made)
                made.force_close()

        self._silent.add(made)
        # In two steps: whoever asked while the loop stood still is heard between them.
        loop, half = asyncio.get_running_loop(), self._transfer_s / 2
        loop.call_later(half, loop.call_later, half, hang_up)
        return made

    @web.middleware
    async def _hear(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self._silent.discard(request.protocol)
        return await handler(request)

    async def in_time(self, sending: Awaitable[Any]) -> None:
        """Sends, unless the client does not take it."""
        async with asyncio.timeout(self._transfer_s):
            await sending

    async def body(self, request: web.Request) -> bytes:
        """The request's. Raises RequestError: compressed, too long, or too late."""
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise RequestError("Content-Encoding: not supported; send requests uncompressed", status=415)
        try:
            async with asyncio.timeout(self._transfer_s):
                return await request.read()
        except TimeoutError as error:
            raise RequestError(f"the request did not arrive within {self._transfer_s:g} s", status=408) from error
        except web.HTTPRequestEntityTooLarge as error:
            most = f"{self._most_bytes / 2**20:g} MiB"
            raise RequestError(f"the request has more than {most}; send a shorter conversation", status=413) from error


def hang_up(request: web.Request, error: BaseException) -> None:
    """Nothing more can be said to the client; a handler that was cancelled ends as such."""
    if isinstance(error, asyncio.CancelledError):
        raise error
    if request.transport is not None:
        request.transport.abort()


def json_object(body: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises RequestError."""
    try:
        found = orjson.loads(body)
    except ValueError as error:
        raise RequestError(f"the request is no JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise RequestError(f"the request must be a JSON object, this is {type(found).__name__}")
    level: list[Any] = [found]
    for _ in range(_DEEPEST):
        if not level:
            break
        level = [
            one  # of JSON nothing derives from them
            for outer in level
            for one in (outer.values() if type(outer) is dict else outer)
            if type(one) is dict or type(one) is list
        ]
    if level:
        raise RequestError(f"the request is nested deeper than {_DEEPEST} levels; send it flatter")
    return found


@web.middleware
async def _in_the_protocols_words(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        problem = error
    except web.HTTPException as error:
        if error.status < 400:
            raise
        said = f"{request.method} {request.path[:200]}: {error.reason}"
        if error.status == 404 and not request.path.startswith("/r/"):
            said += f"; the base URL is {request.scheme}://{request.host[:200]}/r/<session>/v1, for a session's name"
        problem = RequestError(said, status=error.status)
    except Exception:
        _log.exception("the gateway could not answer a request")
        problem = RequestError("the gateway failed; see its log", status=500)
    # Clients try again after 5xx by themselves; neither a session whose engine failed nor a bug gets better so.
    headers = {"x-should-retry": "false"} if problem.status in _FINAL else {}
    return web.json_response(spoken(request).error(problem), status=problem.status, headers=headers)


def spoken(request: web.Request) -> WireProtocol:
    """The protocol of the path, or, where that belongs to none alone, of the client."""
    _, _, method = request.path.rpartition(":")
    if "x-goog-api-key" in request.headers or method in ("countTokens", *(one.path for one in GOOGLE)):
        return GOOGLE[0]
    _, _, path = request.path.partition("/v1/")
    theirs = path.startswith(MESSAGES.path) or "anthropic-version" in request.headers
    default = MESSAGES if theirs else PROTOCOLS[0]
    return next((one for one in PROTOCOLS if path == one.path), default)
