"""The gateway's HTTP server: sessions by their URL, and who may speak in them.

Promises: a request reaches the session of its path only, and only with that session's key; whatever is wrong with it is
answered in its protocol's own shape, without a traceback and without what the request held; a client that goes away, or
that does not take its answer in time, gives its call up. It listens on the loopback interface unless told otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols import models
from datamodules.workflows.gateway.protocols.base import Asked, Sampled, WireProtocol
from datamodules.workflows.gateway.protocols.chat_completions import ChatCompletions
from datamodules.workflows.gateway.protocols.completions import Completions
from datamodules.workflows.gateway.protocols.messages import Messages
from datamodules.workflows.gateway.protocols.responses import Responses
from datamodules.workflows.gateway.replies import Piece
from datamodules.workflows.gateway.sessions import OnText, Session
from datamodules.workflows.gateway.transcript import Call

_log = logging.getLogger(__name__)
_MESSAGES = Messages()
_PROTOCOLS: tuple[WireProtocol, ...] = (ChatCompletions(), _MESSAGES, Responses(), Completions())
_MOST_BYTES = 8 << 20  # a million tokens; Python's objects of it may take twenty times as much
_DEEPEST = 64  # nesting of a request's JSON; tools' schemas need some
_CLOSE_S = 5.0
_LINGER_S = 2.0  # for a client to read its refusal while it still sends
_http_log = logging.getLogger(f"{__name__}.http")
# These lines would quote what is no HTTP, and with it keys.
_http_log.addFilter(lambda line: not (line.exc_info and isinstance(line.exc_info[1], HttpProcessingError)))
_LEFT = (asyncio.CancelledError, OSError, TimeoutError)  # how a client that goes away, or does not read, shows


class Gateway:
    """Serves sessions, on the event loop it is opened in.

    Args:
        model: name under which the model is listed.
        host: interface.
        port: 0 for any that is free.
        transfer_s: seconds for a request to arrive, and for a client to take a piece of its answer.
        opens: makes the session of a name that is not there, for a client with this key; None refuses the client, as
            without it all are.
        ended: called with a session that its client has ended, before the client is told.
    """

    def __init__(
        self,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        transfer_s: float = 60.0,
        opens: Callable[[str, str], Session | None] | None = None,
        ended: Callable[[Session], Awaitable[None]] | None = None,
    ) -> None:
        self._opens, self._ended = opens, ended
        self.model = model
        self._transfer_s = transfer_s
        self.address = ""
        self._host, self._port = host, port
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._silent: set[asyncio.Protocol] = set()  # connections that have not asked for anything yet

    async def open(self) -> None:
        """Listens. Raises OSError when the port is taken."""
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[self._hear, _in_the_protocols_words])
        for protocol in _PROTOCOLS:
            app.router.add_post(f"/r/{{session}}/v1/{protocol.path}", partial(self._reply, protocol))
        app.router.add_post("/r/{session}/v1/messages/count_tokens", self._count)
        app.router.add_get("/r/{session}/v1/models", self._models)
        app.router.add_get("/r/{session}/v1/models/{id:.+}", self._models)
        app.router.add_post("/r/{session}/reward", self._reward)
        app.router.add_post("/r/{session}/end", self._end)
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

    def admit(self, session: Session) -> str:
        """Lets a session be spoken in; gives its address, to which protocols append `/v1/...`."""
        self._sessions[session.id] = session
        return f"{self.address}/r/{session.id}"

    def dismiss(self, session: Session) -> None:
        """Nobody can speak in it any more."""
        self._sessions.pop(session.id, None)

    def _session(self, request: web.Request) -> Session:
        """The session of the path, if the request may speak in it; unknown ones and wrong keys are told alike."""
        name = request.match_info["session"]
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        session = self._sessions.get(name)
        if session is None and self._opens is not None and (session := self._opens(name, key)) is not None:
            self.admit(session)
        wanted = session.key if session is not None else secrets.token_urlsafe(32)
        if not same_key(key, wanted) or session is None:
            raise RequestError("no session of this address and key", status=401, code="invalid_api_key")
        return session

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        name = request.match_info.get("id")
        if name not in (None, self.model):
            raise RequestError(
                f"the only model listed is '{self.model}'; replies may be asked for under any name",
                status=404,
                param="model",
                code="model_not_found",
            )
        anthropic = _spoken(request) is _MESSAGES
        listed = models.anthropic_models if anthropic else models.openai_models
        one = models.anthropic_model if anthropic else models.openai_model
        return web.json_response((listed if name is None else one)(self.model))

    async def _count(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = _MESSAGES.counted(_object(await self._body(request)))
        return web.json_response({"input_tokens": session.count(asked.messages, asked.tools)})

    async def _reply(self, protocol: WireProtocol, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await self._body(request)
        asked = protocol.parse(_object(body))
        asked = session.continued(replace(asked, model=asked.model or self.model))
        same = hashlib.blake2b(body, person=protocol.path.encode()[-16:]).digest()
        calls = await session.again(same, retried=_retries(request) > 0)
        if asked.stream:
            return await self._stream(protocol, request, session, asked, same, calls)
        if calls is None:
            calls = await _sampled(session, asked, same)
        tokens = [_of(session, call) for call in calls] if asked.logprobs else None
        response = web.json_response(protocol.answer(asked, calls[0].id, calls, tokens))
        try:
            await self._in_time(response.prepare(request))
            await self._in_time(response.write_eof())
        except _LEFT as error:
            session.not_taken(same, calls)
            _hang_up(request, error)
        return response

    async def _stream(
        self,
        protocol: WireProtocol,
        request: web.Request,
        session: Session,
        asked: Asked,
        same: bytes,
        calls: list[Call] | None,
    ) -> web.StreamResponse:
        """Events while the replies are sampled; of `calls`, where they have been already."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        name = session.new_name() if calls is None else calls[0].id
        writer = protocol.events(asked, name)
        said: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()
        sampling: asyncio.Task[list[Call]] | None = None
        if calls is None:
            sampling = asyncio.create_task(
                _sampled(session, asked, same, name, lambda k, piece: said.put_nowait((k, piece)))
            )
            sampling.add_done_callback(lambda _: said.put_nowait(None))
        else:
            for k, call in enumerate(calls):
                said.put_nowait((k, Piece(str(call.message["content"] or ""), call.ids, call.logprobs)))
            said.put_nowait(None)
        try:
            while (news := await said.get()) is not None:
                if not response.prepared:  # what is refused before has a status
                    await self._in_time(response.prepare(request))
                    await self._in_time(response.write(writer.begin()))
                k, piece = news
                tokens = session.sampled(piece.tokens, piece.logprobs) if asked.logprobs else ()
                if piece.text or tokens:
                    await self._in_time(response.write(writer.text(k, piece.text, tokens)))
            if sampling is not None:
                calls = sampling.result()
            assert calls is not None
            for k, call in enumerate(calls):
                await self._in_time(response.write(writer.end(k, call)))
            await self._in_time(response.write(writer.finish(calls)))
            await self._in_time(response.write_eof())
        except RequestError as problem:
            if not response.prepared:
                raise
            await self._in_time(response.write(writer.fail(problem)))
            await self._in_time(response.write_eof())
        except _LEFT as error:
            if sampling is not None and not sampling.done():
                sampling.cancel()
            elif sampling is not None and not sampling.cancelled() and sampling.exception() is None:
                calls = sampling.result()
            if calls is not None:
                session.not_taken(same, calls)
            _hang_up(request, error)
        return response

    async def _in_time(self, sending: Awaitable[Any]) -> None:
        """Sends, unless the client does not take it."""
        async with asyncio.timeout(self._transfer_s):
            await sending

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        session.rewards.post(_object(await self._body(request)), session.exchanges)
        return web.json_response({"reward": session.rewards.episode, "calls": len(session.rewards.calls)})

    async def _end(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        session.ended.set()
        if self._ended is not None:
            await self._ended(session)
        return web.json_response({"ended": True})

    async def _body(self, request: web.Request) -> bytes:
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise RequestError("Content-Encoding: not supported; send requests uncompressed", status=415)
        try:
            async with asyncio.timeout(self._transfer_s):
                return await request.read()
        except TimeoutError as error:
            raise RequestError(f"the request did not arrive within {self._transfer_s:g} s", status=408) from error


async def _sampled(
    session: Session, asked: Asked, same: bytes, name: str = "", on_text: OnText | None = None
) -> list[Call]:
    return await session.reply(
        asked.messages,
        asked.tools,
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        stop=asked.stop,
        seed=asked.seed,
        n=asked.n,
        raw=asked.prompt,
        before=len(asked.before),
        on_text=on_text,
        name=name,
        same=same,
    )


def _of(session: Session, call: Call) -> list[Sampled]:
    return session.sampled(call.ids, call.logprobs)


def _hang_up(request: web.Request, error: BaseException) -> None:
    """Nothing more can be said to the client; a handler that was cancelled ends as such."""
    if isinstance(error, asyncio.CancelledError):
        raise error
    if request.transport is not None:
        request.transport.abort()


def _retries(request: web.Request) -> int:
    """How often the client has sent this request before, as the providers' packages say."""
    said = request.headers.get("x-stainless-retry-count", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 9 else 0


def _object(body: bytes) -> dict[str, Any]:
    """The request's JSON object."""
    try:
        found = json.loads(body.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is no JSON: {str(error)[:200] or 'too deep'}") from error
    if not isinstance(found, dict):
        raise RequestError(f"the request must be a JSON object, this is {type(found).__name__}")
    level: list[Any] = [found]
    for _ in range(_DEEPEST):
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        level = [one for one in level if isinstance(one, dict | list)]
    if level:
        raise RequestError(f"the request is nested deeper than {_DEEPEST} levels; send it flatter")
    return found


def same_key(given: str, wanted: str) -> bool:
    """In a time that tells nothing."""
    return secrets.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


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
        problem = RequestError(f"{request.method} {request.path[:200]}: {error.reason}", status=error.status)
    except Exception:
        _log.exception("the gateway could not answer a request")
        problem = RequestError("the gateway failed; see its log", status=500)
    # Clients try again after 5xx by themselves; neither a session whose engine failed nor a bug gets better so.
    headers = {"x-should-retry": "false"} if problem.status >= 500 else {}
    return web.json_response(_spoken(request).error(problem), status=problem.status, headers=headers)


def _spoken(request: web.Request) -> WireProtocol:
    """The protocol of the path, or, where that belongs to none alone, of the client."""
    _, _, path = request.path.partition("/v1/")
    theirs = path.startswith(_MESSAGES.path) or "anthropic-version" in request.headers
    default = _MESSAGES if theirs else _PROTOCOLS[0]
    return next((one for one in _PROTOCOLS if path == one.path), default)
