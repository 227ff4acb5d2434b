"""The gateway's HTTP server: sessions by their URL, and who may speak in them.

Promises: a request reaches the session of its path only, and only with that session's key; whatever is wrong with it is
answered as `Listener` promises; a client that goes away, or that does not take its answer in time, gives its call up;
one that waits for long hears that its call is alive, so that neither its own patience with silence nor a proxy's ends
before the engine's deadlines do: generation may stand still for as long as a training step takes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from aiohttp import web

from datamodules.inference.reply_text import ReplyText
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.history import Shelf
from datamodules.workflows.gateway.listener import (
    GOOGLE,
    LEFT,
    MESSAGES,
    PROTOCOLS,
    Listener,
    hang_up,
    json_object,
    spoken,
)
from datamodules.workflows.gateway.protocols import models
from datamodules.workflows.gateway.protocols.base import Asked, Sampled, WireProtocol
from datamodules.workflows.gateway.protocols.messages import UNTHREADED
from datamodules.workflows.gateway.replies import Piece
from datamodules.workflows.gateway.sessions import Session
from datamodules.workflows.gateway.transcript import Call

News = tuple[int, Piece] | None
"""Which reply says what more; None at the end."""
_MOST_BYTES = 8 << 20  # a million tokens; Python's objects of it may take twenty times as much


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
        quiet_s: seconds without news after which a waiting client is sent white space, which JSON allows before an
            answer, or in a stream a comment, and again as often. From then on its status is 200: should the call fail,
            the connection is cut, and who asks again is told why.
        kept_bytes: of the last requests of all sessions, which the next ones are compared with; where they have been
            forgotten, requests are read whole.
    """

    def __init__(
        self,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        transfer_s: float = 60.0,
        opens: Callable[[str, str], Session | None] | None = None,
        ended: Callable[[Session], Awaitable[None]] | None = None,
        quiet_s: float = 30.0,
        kept_bytes: int = 128 << 20,
    ) -> None:
        self._opens, self._ended, self._quiet_s = opens, ended, quiet_s
        self.model = model
        self._sessions: dict[str, Session] = {}
        self._shelf = Shelf(kept_bytes)
        self._listener = Listener(host, port, transfer_s, _MOST_BYTES)

    @property
    def address(self) -> str:
        """Once it is open."""
        return self._listener.address

    async def open(self) -> None:
        """Listens. Raises OSError when the port is taken."""
        await self._listener.open(self._add_routes)

    async def close(self) -> None:
        """Answers nobody any more. Idempotent."""
        await self._listener.close()

    def _add_routes(self, router: web.UrlDispatcher) -> None:
        for protocol in PROTOCOLS:
            router.add_post(f"/r/{{session}}/v1/{protocol.path}", partial(self._reply, protocol))
        router.add_post("/r/{session}/messages", partial(self._reply, MESSAGES))  # to the AI SDK the base URL has /v1
        router.add_post("/r/{session}/v1/messages/count_tokens", self._count)
        for version in ("v1", "v1beta"):
            for one in GOOGLE:
                router.add_post(f"/r/{{session}}/{version}/models/{{id:.+}}:{one.path}", partial(self._reply, one))
            router.add_post(f"/r/{{session}}/{version}/models/{{id:.+}}:countTokens", self._count)
        router.add_get("/r/{session}/v1/models", self._models)
        router.add_get("/r/{session}/v1/models/{id:.+}", self._models)
        router.add_get("/r/{session}/held", self._held)
        router.add_post("/r/{session}/reward", self._reward)
        router.add_post("/r/{session}/end", self._end)
        router.add_route("*", "/r/{session}{path:(?:/.*)?}", self._not_served)

    def admit(self, session: Session) -> str:
        """Lets a session be spoken in; gives its address, to which protocols append `/v1/...`."""
        self._sessions[session.id] = session
        return f"{self.address}/r/{session.id}"

    def dismiss(self, session: Session) -> None:
        """Nobody can speak in it any more."""
        self._sessions.pop(session.id, None)
        self._shelf.drop(session.bodies)

    def _session(self, request: web.Request) -> Session:
        """The session of the path, if the request may speak in it; unknown ones and wrong keys are told alike."""
        name = request.match_info["session"]
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = (request.headers.get(name, "") for name in ("x-api-key", "x-goog-api-key"))
            key = next(filter(None, given), "") or request.query.get("key", "")  # as Google's API takes it, too
        key = key.strip()
        session = self._sessions.get(name)
        if session is None and self._opens is not None and (session := self._opens(name, key)) is not None:
            self.admit(session)
        wanted = session.key if session is not None else secrets.token_urlsafe(32)
        if not same_key(key, wanted) or session is None:
            raise RequestError("no session of this address and key", status=401, code="invalid_api_key")
        return session

    @contextmanager
    def _asked(self, request: web.Request) -> Iterator[Session]:
        """The session of what asks for no reply; that it was refused may be why none is asked for."""
        session = self._session(request)
        session.asked += 1
        try:
            yield session
        except RequestError as error:
            if not session.transcript.calls:
                session.refused = str(error)
            raise

    async def _models(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("id")
        with self._asked(request):
            if name not in (None, self.model):
                raise RequestError(
                    f"the only model listed is '{self.model}'; replies may be asked for under any name",
                    status=404,
                    param="model",
                    code="model_not_found",
                )
        anthropic = spoken(request) is MESSAGES
        listed = models.anthropic_models if anthropic else models.openai_models
        one = models.anthropic_model if anthropic else models.openai_model
        return web.json_response((listed if name is None else one)(self.model))

    async def _count(self, request: web.Request) -> web.StreamResponse:
        theirs, key = (MESSAGES, "input_tokens") if spoken(request) is MESSAGES else (GOOGLE[0], "totalTokens")
        with self._asked(request) as session:
            asked = session.continued(theirs.counted(json_object(await self._listener.body(request))))
            return web.json_response({key: await session.count(asked.messages, asked.tools)})

    async def _reply(self, protocol: WireProtocol, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        session.asked += 1
        try:
            body = await self._listener.body(request)
            found = session.bodies.read(body, json_object)
            asked = protocol.parse(session.heard(protocol.whole(found, session.transcript.calls)))
            asked = session.continued(replace(asked, model=asked.model or self.model))
        except Exception as error:  # it is refused, and nothing goes on with it
            if getattr(error, "code", None) != UNTHREADED:  # which the client asks again by itself
                session.refused = str(error)
            self._shelf.drop(session.bodies)
            raise
        if self._sessions.get(session.id) is session and not session.ended.is_set():
            self._shelf.keep(session.bodies)
        key = request.headers.get("Idempotency-Key", "")
        same = _same(protocol, body, key)
        calls = await session.again(same, retried=bool(key) or _retries(request) > 0)
        if asked.stream:
            return await self._stream(protocol, request, session, asked, same, calls)
        response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
        sampling = None if calls is not None else asyncio.create_task(session.reply(asked, same=same))
        try:
            if sampling is not None:
                while not (await asyncio.wait([sampling], timeout=self._quiet_s))[0]:
                    await self._still(request, response, b" ")
                calls = sampling.result()
            assert calls is not None
            tokens = [_of(session, call) for call in calls] if asked.logprobs else None
            answer = json.dumps(protocol.answer(asked, calls[0].id, calls, tokens)).encode()
            if not response.prepared:
                response.content_length = len(answer)
                await self._listener.in_time(response.prepare(request))
            await self._listener.in_time(response.write(answer))
            await self._listener.in_time(response.write_eof())
            session.repeats.arrived(calls)
        except RequestError as problem:
            if not response.prepared:
                raise
            hang_up(request, problem)
        except LEFT as error:
            _gave_up(session, same, sampling, calls)
            hang_up(request, error)
        return response

    async def _still(self, request: web.Request, response: web.StreamResponse, sign: bytes) -> None:
        """Tells a client that its call is alive."""
        if not response.prepared:
            await self._listener.in_time(response.prepare(request))
        await self._listener.in_time(response.write(sign))

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
        said: asyncio.Queue[News] = asyncio.Queue()
        told: defaultdict[int, ReplyText] = defaultdict(session.new_text)
        sampling: asyncio.Task[list[Call]] | None = None
        if calls is None:
            sampling = asyncio.create_task(
                session.reply(asked, lambda k, piece: said.put_nowait((k, piece)), name, same)
            )
            sampling.add_done_callback(lambda _: said.put_nowait(None))
        else:
            for k, call in enumerate(calls):
                said.put_nowait((k, Piece(str(call.message["content"] or ""), call.ids, call.logprobs)))
            said.put_nowait(None)
        try:
            begun = False
            while (news := await self._news(said, request, response, protocol.alive)) is not None:
                if not response.prepared:  # what is refused before has a status
                    await self._listener.in_time(response.prepare(request))
                if not begun:
                    await self._listener.in_time(response.write(writer.begin()))
                    begun = True
                k, piece = news
                tokens = session.sampled(piece.tokens, piece.logprobs, told[k]) if asked.logprobs else ()
                if piece.text or tokens:
                    await self._listener.in_time(response.write(writer.text(k, piece.text, tokens)))
            if sampling is not None:
                calls = sampling.result()
            assert calls is not None
            for k, call in enumerate(calls):
                await self._listener.in_time(response.write(writer.end(k, call)))
            await self._listener.in_time(response.write(writer.finish(calls)))
            await self._listener.in_time(response.write_eof())
            session.repeats.arrived(calls)
        except RequestError as problem:
            if not response.prepared:
                raise
            await self._listener.in_time(response.write(writer.fail(problem)))
            await self._listener.in_time(response.write_eof())
        except LEFT as error:
            _gave_up(session, same, sampling, calls)
            hang_up(request, error)
        return response

    async def _news(
        self, said: asyncio.Queue[News], request: web.Request, response: web.StreamResponse, alive: bytes
    ) -> News:
        """What is said next; until then the client hears that its call is alive."""
        while True:
            try:
                async with asyncio.timeout(self._quiet_s):
                    return await said.get()
            except TimeoutError:
                await self._still(request, response, alive)

    async def _not_served(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"][:100]
        served = [f"/v1/{protocol.path}" for protocol in PROTOCOLS]
        posted = (*served, "/v1/messages/count_tokens", "/reward", "/end")
        with self._asked(request) as session:
            if path in (*posted, "/v1/models", "/held"):
                method = "POST" if path in posted else "GET"
                if request.headers.get("Upgrade", "").lower() == "websocket":  # Codex asks again and again but for 426
                    raise RequestError(f"{path}: WebSockets are not served; {method} it", status=426)
                raise RequestError(f"{path}: does not take {request.method}; {method} it", status=405)
            plain = "/" + "/".join(filter(None, path.split("/")))
            if meant := next((one for one in posted if plain.endswith(one) or one == f"/v1{plain}"), ""):
                address = f"{request.scheme}://{request.host[:200]}/r/{session.id}"
                raise RequestError(
                    f"{path}: not served, {address}{meant} is: the base URL is {address}/v1 (OPENAI_BASE_URL), or"
                    " without /v1 for packages that append it themselves (ANTHROPIC_BASE_URL)",
                    status=404,
                )
            served += [f"/v1beta/models/{self.model}:{protocol.path}" for protocol in GOOGLE]
            raise RequestError(
                f"{path}: not served; the model that is trained answers {', '.join(served)}: give the client that asks"
                " for anything else (embeddings, moderation, audio) a base_url and api_key of its provider",
                status=404,
            )

    async def _held(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"held_s": self._session(request).held_s})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = json_object(await self._listener.body(request))
        if session.ended.is_set():  # it is being judged or written, with the rewards that were there
            told = "reward: the session has ended, which takes none any more; post rewards before /end"
            raise RequestError(told, status=403, code="session_ended")
        session.rewards.post(body, session.exchanges)
        return web.json_response({"reward": session.rewards.episode, "calls": len(session.rewards.calls)})

    async def _end(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        await session.end()
        self._shelf.drop(session.bodies)
        if self._ended is not None:
            await self._ended(session)
            self.dismiss(session)  # it is written: what it has said and shown is held no longer
        return web.json_response({"ended": True})


def _gave_up(
    session: Session, same: bytes, sampling: asyncio.Task[list[Call]] | None, calls: list[Call] | None
) -> None:
    """A client has left: what it asked for is sampled no longer, or, complete, kept for when it comes again."""
    if sampling is not None and not sampling.done():
        sampling.cancel()
    elif sampling is not None and not sampling.cancelled() and sampling.exception() is None:
        calls = sampling.result()
    if calls is not None:
        session.not_taken(same, calls)


def _of(session: Session, call: Call) -> list[Sampled]:
    return session.sampled(call.ids, call.logprobs)


def _same(protocol: WireProtocol, body: bytes, key: str) -> bytes:
    """What is equal in requests that may be one call; with a key of the client's only in those that are."""
    digest = hashlib.blake2b(body, person=protocol.path.encode()[-16:])
    if key:
        digest.update(hashlib.blake2b(key.encode("utf-8", "surrogateescape")).digest())
    return digest.digest()


def _retries(request: web.Request) -> int:
    """How often the client has sent this request before, as the providers' packages say."""
    said = request.headers.get("x-stainless-retry-count", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 9 else 0


def same_key(given: str, wanted: str) -> bool:
    """In a time that tells nothing."""
    return secrets.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())
