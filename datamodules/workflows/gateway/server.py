"""The gateway's HTTP server: sessions by their URL, and who may speak in them.

Promises: a request reaches the session of its path only, and only with that session's key; whatever is wrong with it is
answered in its protocol's own shape, without a traceback and without what the request held; a client that goes away, or
that does not take its answer in time, gives its call up. It listens on the loopback interface unless told otherwise.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols.base import EventWriter, Sampled, WireProtocol
from datamodules.workflows.gateway.protocols.chat_completions import ChatCompletions
from datamodules.workflows.gateway.sessions import Session
from datamodules.workflows.gateway.transcript import Call

_log = logging.getLogger(__name__)
_PROTOCOLS: tuple[WireProtocol, ...] = (ChatCompletions(),)
_MOST_BYTES = 32 << 20
_DEEPEST = 64  # nesting of a request's JSON; tools' schemas need some
_CLOSE_S = 5.0


class Gateway:
    """Serves sessions, on the event loop it is opened in.

    Args:
        model: name under which the model is listed.
        host: interface.
        port: 0 for any that is free.
        transfer_s: seconds for a request to arrive, and for a client to take a piece of its answer.
    """

    def __init__(self, model: str = "policy", host: str = "127.0.0.1", port: int = 0, transfer_s: float = 60.0) -> None:
        self.model = model
        self._transfer_s = transfer_s
        self.address = ""
        self._host, self._port = host, port
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        """Listens. Raises OSError when the port is taken."""
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[_in_the_protocols_words])
        for protocol in _PROTOCOLS:
            app.router.add_post(f"/r/{{session}}/v1/{protocol.path}", partial(self._reply, protocol))
        app.router.add_get("/r/{session}/v1/models", self._models)
        app.router.add_post("/r/{session}/reward", self._reward)
        app.router.add_post("/r/{session}/end", self._end)
        # A client that goes away cancels its handler, and with it what the engine samples for it.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        """Answers nobody any more. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def admit(self, session: Session) -> str:
        """Lets a session be spoken in; gives its address, to which protocols append `/v1/...`."""
        self._sessions[session.id] = session
        return f"{self.address}/r/{session.id}"

    def dismiss(self, session: Session) -> None:
        """Nobody can speak in it any more."""
        self._sessions.pop(session.id, None)

    def _session(self, request: web.Request) -> Session:
        """The session of the path, if the request may speak in it; unknown ones and wrong keys are told alike."""
        session = self._sessions.get(request.match_info["session"])
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        wanted = session.key if session is not None else secrets.token_urlsafe(32)
        if not secrets.compare_digest(key.encode("utf-8", "surrogateescape"), wanted.encode()) or session is None:
            raise RequestError("no session of this address and key", status=401, code="invalid_api_key")
        return session

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return web.json_response(
            {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "arborist"}]}
        )

    async def _reply(self, protocol: WireProtocol, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = protocol.parse(await self._object(request))
        asked = replace(asked, model=asked.model or self.model)
        calls = await session.reply(
            asked.messages,
            asked.tools,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            stop=asked.stop,
            seed=asked.seed,
            n=asked.n,
        )
        tokens = [session.sampled(call) for call in calls] if asked.logprobs else None
        name = calls[0].id
        if not asked.stream:
            return web.json_response(protocol.answer(asked, name, calls, tokens))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in _whole(protocol.events(asked, name), calls, tokens):
            async with asyncio.timeout(self._transfer_s):
                await response.write(event)
        await response.write_eof()
        return response

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        session.rewards.post(await self._object(request), session.exchanges)
        return web.json_response({"reward": session.rewards.episode, "calls": len(session.rewards.calls)})

    async def _end(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        session.ended.set()
        return web.json_response({"ended": True})

    async def _object(self, request: web.Request) -> dict[str, Any]:
        """The request's JSON object."""
        try:
            async with asyncio.timeout(self._transfer_s):
                body = await request.read()
        except TimeoutError as error:
            raise RequestError(f"the request did not arrive within {self._transfer_s:g} s", status=408) from error
        try:
            found = json.loads(body, parse_constant=_no_number)
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


def _whole(writer: EventWriter, calls: Sequence[Call], tokens: Sequence[Sequence[Sampled]] | None) -> Iterator[bytes]:
    """Complete replies as events."""
    yield writer.begin()
    for k, call in enumerate(calls):
        said, of_it = str(call.message["content"] or ""), tokens[k] if tokens else ()
        if said or of_it:
            yield writer.text(k, said, of_it)
        yield writer.end(k, call)
    yield writer.finish(calls)


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
    return web.json_response(_spoken(request).error(problem), status=problem.status)


def _spoken(request: web.Request) -> WireProtocol:
    """The protocol of the path, whether or not there is something behind it."""
    return next((one for one in _PROTOCOLS if request.path.endswith(f"/v1/{one.path}")), _PROTOCOLS[0])
