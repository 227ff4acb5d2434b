"""A gateway in front of a provider: requests are passed on, and the conversations in them recorded.

Promises: a request reaches the provider as it came, its key included, but for what belongs to the connection
(hop-by-hop headers, Host) and Accept-Encoding, and the answer reaches the client byte for byte, while it comes; keys
are held by requests under way alone. A provider that cannot be reached, or is silent, is an error by name in the
protocol's shape; a client that goes away ends the provider's call, and so does the end of its session, which the client
is told. Only whole answers are recorded.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from app import checks
from datamodules.processes.calls import CallFailed, UnderWay
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.heard import READERS
from datamodules.workflows.gateway.listener import LEFT, Listener, hang_up, json_object, spoken
from datamodules.workflows.gateway.overheard import ConversationRecorder, Conversations, NotRecorded
from datamodules.workflows.gateway.rewards import Rewards
from datamodules.workflows.gateway.standalone import check_new

_CHAT = "chat/completions"
_RESPONSES = "responses"
_EVENTS = "text/event-stream"
_MOST_BYTES = 32 << 20  # of a request, and of an answer that is recorded
_MOST_HELD = 1 << 30  # characters of all sessions under way
_DONE = re.compile(rb"(data: ?\[DONE\]|\"message_stop\" ?\})\s*$")
_COMPLETED = re.compile(rb"event: ?response\.(completed|incomplete|failed)\b")  # what comes then is the whole answer
_LAST = 40  # bytes of an answer that tell whether it is at its end
_LOOK_S = 1.0
_CONNECTION = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"} | {
    "trailer",
    "transfer-encoding",
    "upgrade",
    "expect",
    "host",
}


class _Session:
    """What was heard under one name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.touched = time.monotonic()
        self.under_way = 0
        self.ended = False
        self.rewards = Rewards()
        self.conversations = Conversations()
        self._calls = UnderWay()

    def check(self) -> None:
        """Raises RequestError: it has ended."""
        if self.ended:
            raise RequestError("the session has ended; use another name", status=403, code="session_ended")

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Around a wait. Raises RequestError, as `check`, as soon as the session ends."""
        try:
            async with self._calls.call():
                self.check()
                yield
        except CallFailed:
            self.check()
            raise

    def end(self) -> None:
        """Nothing goes on in it any more. Idempotent."""
        self.ended = True
        self._calls.stop()


class UpstreamGateway:
    """Serves, on the event loop it is opened in, sessions that come up by their name.

    Args:
        upstream: the provider's base URL; what is behind `/v1/` is appended.
        host, port: see `Listener`.
        record: None to record nothing.
        idle_s: seconds of silence after which a session is over.
        connect_s: seconds in which the provider must be reached.
        silence_s: seconds for it to begin an answer, and between its pieces.
        transfer_s: seconds for a request to arrive, and for a client to take a piece of its answer.

    Attributes:
        counts: "written" sessions and recorded "replies"; calls that are not: "failed" (the provider answered with an
            error, or not at all), "cut_off" (by either end, or the limit of tokens), "not_text" (or more than can be
            held), "other" paths.
    """

    def __init__(
        self,
        upstream: str,
        host: str = "127.0.0.1",
        port: int = 0,
        record: ConversationRecorder | None = None,
        idle_s: float = 3600.0,
        connect_s: float = 10.0,
        silence_s: float = 600.0,
        transfer_s: float = 60.0,
    ) -> None:
        checks.deadline({"idle_s": idle_s})
        self.counts: Counter[str] = Counter()
        self._base = upstream.rstrip("/")
        self._record = record
        self._idle_s, self._connect_s, self._silence_s = idle_s, connect_s, silence_s
        self._listener = Listener(host, port, transfer_s, _MOST_BYTES)
        self._client: aiohttp.ClientSession | None = None
        self._sessions: dict[str, _Session] = {}
        self._over: set[str] = set()
        self._writing = asyncio.Lock()

    @property
    def address(self) -> str:
        """Once it is open."""
        return self._listener.address

    async def open(self) -> None:
        """Listens. Raises OSError when the port is taken."""
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(connect=self._connect_s, sock_read=self._silence_s),
            skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
            auto_decompress=False,
        )
        await self._listener.open(self._add_routes)

    async def close(self, failed: Callable[[str, Exception], None]) -> None:
        """Answers nobody any more and ends all sessions; `failed` is told of each that could not be written."""
        await self._listener.close()
        if self._client is not None:
            await self._client.close()
        for session in list(self._sessions.values()):
            try:
                await self._end(session)
            except Exception as error:
                failed(session.name, error)

    async def watch(self) -> None:
        """Ends the sessions in which nothing is said any more; until it is cancelled."""
        while True:
            await asyncio.sleep(min(_LOOK_S, self._idle_s / 2))
            now = time.monotonic()
            for one in list(self._sessions.values()):
                if not one.under_way and now - one.touched > self._idle_s:
                    await self._end(one)

    def _add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/r/{session}/reward", self._answer_reward)
        router.add_post("/r/{session}/end", self._answer_end)
        router.add_route("*", "/r/{session}/v1/{path:.+}", self._pass)

    def _session(self, request: web.Request) -> _Session:
        name = request.match_info["session"]
        if name not in self._sessions:
            check_new(name, self._over, len(self._sessions))
            self._sessions[name] = _Session(name)
        session = self._sessions[name]
        session.check()
        session.touched = time.monotonic()
        return session

    async def _answer_reward(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = json_object(await self._listener.body(request))
        session.check()  # while it arrived
        if "call" in body:
            raise RequestError("call: conversations have one reward, of the session; leave it out", param="call")
        session.rewards.post(body, [])
        return web.json_response({"reward": session.rewards.episode, "calls": 0})

    async def _answer_end(self, request: web.Request) -> web.StreamResponse:
        await self._end(self._session(request))
        return web.json_response({"ended": True})

    async def _end(self, session: _Session) -> None:
        """Writes it; calls under way are refused. Raises RecordingError."""
        session.end()
        async with self._writing:
            if self._sessions.get(session.name) is not session:
                return
            records = list(session.conversations.lines(session.name, session.rewards.episode))
            if self._record is not None and records:
                await asyncio.to_thread(self._record.write, records)
                self.counts.update(written=1, replies=session.conversations.replies)
            self._over.add(session.name)
            del self._sessions[session.name]

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        path = request.rel_url.raw_path.split("/", 4)[4]  # "/r/<session>/v1/<path>", as it was written
        if any(part.lower().replace("%2e", ".") in (".", "..") for part in path.split("/")):
            raise RequestError("the path leads out of the provider's base; leave out its dots", status=404)
        body = await self._listener.body(request)
        session.under_way += 1
        outcome = "cut_off"

        def hear(response: web.StreamResponse, said: bytes) -> None:
            nonlocal outcome
            outcome = self._heard(session, path, body, response, said)

        try:
            return await self._exchange(session, request, path, body, hear)
        except RequestError:
            outcome = "cut_off" if session.ended else "failed"
            raise
        finally:
            session.under_way -= 1
            session.touched = time.monotonic()
            if self._record is not None and request.method == "POST" and outcome:
                self.counts[outcome if path in READERS else "other"] += 1

    def _heard(self, session: _Session, path: str, body: bytes, response: web.StreamResponse, answer: bytes) -> str:
        """Keeps the call; "", or why it was not."""
        if self._record is None:
            return ""
        if path not in READERS:
            return "other"
        if response.status != 200:
            return "failed"
        if session.ended:
            return "cut_off"
        held = sum(one.conversations.size for one in self._sessions.values())
        if len(answer) > _MOST_BYTES or held > _MOST_HELD or "Content-Encoding" in response.headers:
            return "not_text"
        try:
            session.conversations.add(path, body, answer, response.content_type == _EVENTS)
        except NotRecorded as error:
            return error.cause
        return ""

    async def _exchange(
        self,
        session: _Session,
        request: web.Request,
        path: str,
        body: bytes,
        hear: Callable[[web.StreamResponse, bytes], None],
    ) -> web.StreamResponse:
        """The response that was passed on; `hear` is told once, as soon as the client has all of it. Raises
        RequestError while the client can still be told by a status."""
        async with session.going_on():
            answer = await self._asked(request, path, body)
        try:
            response = web.StreamResponse(
                status=answer.status, reason=answer.reason, headers=_passed_on(answer.headers)
            )
            said, last = bytearray(), b"\n\n"
            keeps, is_heard, is_last = self._record is not None and path in READERS, False, False
            try:
                await self._listener.in_time(response.prepare(request))
                while True:
                    try:
                        async with session.going_on():
                            piece = await answer.content.readany()
                    except RequestError as problem:
                        if is_heard:  # the client has all of it
                            break
                        await self._break_off(request, response, last, problem)
                        return response
                    except (aiohttp.ClientError, OSError, TimeoutError) as error:
                        await self._break_off(request, response, last, self._problem(error))
                        return response
                    if not piece:
                        break
                    is_last = is_last or (path == _RESPONSES and _COMPLETED.search(last + piece) is not None)
                    last = (last + piece)[-_LAST:]
                    if keeps and len(said) <= _MOST_BYTES:
                        said += piece
                    await self._listener.in_time(response.write(piece))
                    # Clients leave, or go on, behind it.
                    if not is_heard and (_DONE.search(last) or (is_last and last.endswith(b"\n\n"))):
                        is_heard = True
                        hear(response, bytes(said))
                await self._listener.in_time(response.write_eof())
                if not is_heard:
                    hear(response, bytes(said))
            except LEFT as error:
                hang_up(request, error)
            return response
        finally:
            answer.close() if not answer.content.at_eof() else answer.release()

    async def _asked(self, request: web.Request, path: str, body: bytes) -> aiohttp.ClientResponse:
        """The provider's answer, of which the head is there. Raises RequestError."""
        assert self._client is not None, "requests come after open"
        query = request.rel_url.raw_query_string
        headers = _passed_on(request.headers)
        headers.popall("Content-Length", None)
        headers["Accept-Encoding"] = "identity"  # what is recorded has to be read
        try:
            async with asyncio.timeout(self._connect_s + self._silence_s):
                return await self._client.request(
                    request.method,
                    URL(f"{self._base}/{path}{'?' if query else ''}{query}", encoded=True),
                    headers=headers,
                    data=body or None,
                    allow_redirects=False,
                )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._problem(error) from None  # its text may quote the request

    def _problem(self, error: Exception) -> RequestError:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            told = f"the provider could not be reached within {self._connect_s:g} s; see --upstream"
            return RequestError(told, status=504, code="upstream_timeout")
        if isinstance(error, TimeoutError):
            told = f"the provider said nothing for {self._silence_s:g} s"
            return RequestError(told, status=504, code="upstream_timeout")
        if isinstance(error, aiohttp.ClientConnectorError):
            told = "the provider could not be reached; see --upstream"
            return RequestError(told, status=502, code="upstream_unreachable")
        return RequestError("the provider broke its answer off", status=502, code="upstream_broke_off")

    async def _break_off(
        self, request: web.Request, response: web.StreamResponse, last: bytes, problem: RequestError
    ) -> None:
        """Says why, behind whole events of Chat Completions; anything else is left visibly incomplete."""
        if request.path.endswith(_CHAT) and response.content_type == _EVENTS and last.endswith((b"\n\n", b"\r\n\r\n")):
            event = b"data: " + json.dumps(spoken(request).error(problem)).encode() + b"\n\n"
            await self._listener.in_time(response.write(event))
            await self._listener.in_time(response.write_eof())
        else:
            hang_up(request, problem)


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Without those of the connection, and those that it names."""
    named = ",".join(value for name, value in headers.items() if name.lower() == "connection")
    left_out = _CONNECTION | {name.strip().lower() for name in named.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out)
