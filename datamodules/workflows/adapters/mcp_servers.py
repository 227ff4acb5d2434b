"""Connections to MCP servers, through the protocol's official package: over standard input and output of a command
that is started here, or over HTTP.

Promises: a command runs behind a guardian, without this process's secrets, and ends with whoever ends the connection
and with the trainer; a server that dies, talks nonsense or sends too much is `ServerLost`, which says why, for every
call that waits. Messages are bounded. Every wait has its caller's deadline.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anyio
import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import CONNECTION_CLOSED, CallToolResult, Tool, jsonrpc_message_adapter

from datamodules.processes.deadline import deadline
from datamodules.processes.guarded import OverMemory, size_of, written_since
from datamodules.processes.limits import memory_limit
from datamodules.processes.piped import MOST_LINE_BYTES, PipedCommand, TooLong
from datamodules.workflows.calling import within

_MOST_SHOWN = 1000  # characters of what a server printed
_MOST_PAGES = 100  # of a list of tools
_CLOSE_S = 10.0
_TERMINATED = "Session terminated"  # what the package says of a server that knows this session no more


class ServerLost(RuntimeError):
    """There is no server any more, or none yet; the message says why."""


class Server(Protocol):
    """What can be connected to."""

    def link(self, log: Path | None) -> Link:
        """A way to one server, not yet opened. `log`: file for what it prints."""


class Link(Protocol):
    """One way to a server."""

    def streams(self) -> Any:
        """A transport, in the package's sense: a context manager that gives two streams of messages."""

    async def fate(self) -> str:
        """What became of the server, to be said behind its name; "" where nobody knows."""

    def printed(self) -> str:
        """How what it printed ends, to be said behind that; "" where nothing is known."""

    def kill(self) -> None:
        """Ends at once what was started here."""


@dataclass(frozen=True)
class CommandServer:
    """A server that is started here.

    Attributes:
        words: the program and its arguments.
        variables: of its environment, beside those it inherits.
        memory_mb: most memory of it with all it starts, in 10^6 bytes; None for a quarter of the machine's.
        keep_environment: variables it may see though their names look like secrets.
    """

    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    memory_mb: float | None = None
    keep_environment: Sequence[str] = ()

    def link(self, log: Path | None) -> Link:
        return _CommandLink(self, log)


@dataclass(frozen=True)
class HTTPServer:
    """A server that runs already.

    Attributes:
        url: of its endpoint.
        header_variables: header -> the environment variable that has its value.
    """

    url: str
    header_variables: Mapping[str, str] = field(default_factory=dict)

    def link(self, log: Path | None) -> Link:
        return _HTTPLink(self)


class Connection:
    """One session with a server, within one event loop.

    Args:
        server: to connect to.
        log: file for what it prints, where it is started here; that of a connection which is over may be gone on with.
    """

    def __init__(self, server: Server, log: Path | None = None) -> None:
        self._link = server.link(log)
        self._closing = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        # The package's client must be left in the task that entered it.
        self._holder = asyncio.create_task(self._hold())
        self._lost = False

    @property
    def is_lost(self) -> bool:
        return self._lost or self._holder.done()

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs any more."""
        return self._holder.done() or self._holder.get_loop().is_closed()

    async def open(self, seconds: float) -> None:
        """Waits until the server has greeted. Raises ServerLost: it did not, within `seconds`."""
        either: set[asyncio.Future[Any]] = {self._holder, self._client}
        try:
            with suppress(TimeoutError):
                async with deadline(seconds):
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.abandon()
            raise
        if self._client.done() and not self._client.cancelled() and self._client.exception() is None:
            return
        if not self._holder.done():
            await self._end()
            raise ServerLost(f"did not greet within {seconds:g} s{self._link.printed()}")
        raise await self._why(self._error())

    async def tools(self) -> list[Tool]:
        """All that the server has. Raises ServerLost, MCPError."""
        found: list[Tool] = []
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            page = await self._ask(self._client.result().list_tools(cursor=cursor))
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise ServerLost(f"has a list of tools of more than {_MOST_PAGES} pages")

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """The result of a tool. Raises ServerLost; MCPError: the server refuses the call."""
        result: CallToolResult = await self._ask(self._client.result().call_tool(name, arguments))
        return result

    async def close(self) -> None:
        """Takes leave, and ends what was started."""
        await self._end()

    def abandon(self) -> None:
        """Has it end by itself; calls that wait are lost."""
        self._lost = True
        self._holder.cancel()

    def kill(self) -> None:
        """Ends at once what was started, from any thread."""
        self._lost = True
        self._link.kill()
        if not self._holder.get_loop().is_closed():
            self._holder.get_loop().call_soon_threadsafe(self._holder.cancel)

    async def _ask(self, question: Any) -> Any:
        task = asyncio.ensure_future(question)
        try:
            await asyncio.wait({task, self._holder}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
        except MCPError as error:
            if error.code == CONNECTION_CLOSED or error.message == _TERMINATED:
                raise await self._why(error) from error
            raise
        finally:
            task.cancel()
        raise await self._why(self._error())

    async def _hold(self) -> None:
        try:
            async with Client(self._link.streams(), cache=None) as client:
                self._client.set_result(client)
                await self._closing.wait()
        finally:
            self._lost = True
            self._link.kill()

    async def _end(self) -> None:
        self._lost = True
        self._closing.set()
        if self._client.done():
            await asyncio.wait({self._holder}, timeout=_CLOSE_S)
        self.kill()
        await asyncio.wait({self._holder}, timeout=_CLOSE_S)

    def _error(self) -> BaseException | None:
        if not self._holder.done() or self._holder.cancelled():
            return None
        return self._holder.exception()

    async def _why(self, error: BaseException | None) -> ServerLost:
        self._lost = True
        fate = await self._link.fate()
        self.kill()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        said = "the connection was closed" if error is None else str(error) or type(error).__name__
        return ServerLost(f"{fate or f'was lost: {said}'}{self._link.printed()}")


class _CommandLink:
    def __init__(self, server: CommandServer, log: Path | None) -> None:
        self._server = server
        self._log = log
        self._log_from = size_of(log)  # servers before it may have written there
        self._process: PipedCommand | None = None
        self._fault = ""
        self._ended = ""

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Any]:
        memory = memory_limit(self._server.memory_mb, 1)
        variables = self._server.variables
        self._process = process = PipedCommand(
            self._server.words, variables, memory, self._server.keep_environment, self._log
        )
        to_client, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_server, from_client = anyio.create_memory_object_stream[SessionMessage](0)

        async def read() -> None:
            async with to_client:  # closed, it ends every call that waits
                try:
                    while True:
                        if line := (await process.line()).strip():
                            await to_client.send(_message(line))
                except (EOFError, OSError):
                    pass
                except (TooLong, OverMemory) as error:
                    self._fault = str(error)
                except anyio.BrokenResourceError:  # the client has left
                    pass

        async def write() -> None:
            async with from_client:
                try:
                    async for one in from_client:
                        line = one.message.model_dump_json(by_alias=True, exclude_unset=True)
                        await process.send(line.encode() + b"\n")
                except OSError:
                    await to_client.aclose()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(write)
            try:
                yield from_server, to_server
            finally:
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):  # bounded within
                    self._ended = self._ended or await process.end()

    async def fate(self) -> str:
        if self._process is None:
            return ""
        if not self._ended:
            self._ended = await self._process.end(is_gone=True)
        return f"was ended: {self._fault}" if self._fault else self._ended

    def printed(self) -> str:
        try:
            written = written_since(self._log, self._log_from) if self._log is not None else b""
        except OSError:
            return ""
        said = written.decode("utf-8", "replace").strip()
        return f"; it printed, at the end, {said[-_MOST_SHOWN:]!r} (all of it: {self._log})" if said else ""

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


class _HTTPLink:
    def __init__(self, server: HTTPServer) -> None:
        self._server = server

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Any]:
        headers = {name: os.environ[variable] for name, variable in self._server.header_variables.items()}
        # Compressed, a small answer may become a large one. Deadlines are the callers'.
        headers["accept-encoding"] = "identity"
        async with (
            httpx2.AsyncClient(headers=headers, timeout=None, event_hooks={"response": [_bound]}) as client,
            streamable_http_client(self._server.url, http_client=client) as streams,
        ):
            yield streams

    async def fate(self) -> str:
        return ""

    def printed(self) -> str:
        return ""

    def kill(self) -> None:
        pass


async def read_tools(server: Server, seconds: float, log: Path | None) -> list[Tool]:
    """What a server has, from a connection of its own. Raises ServerLost, MCPError."""
    one = Connection(server, log)
    await one.open(seconds)
    try:
        return await within(seconds, one.tools())
    finally:
        await one.close()


def _message(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error  # for the session to tell


class _TooLong(httpx2.StreamError):
    def __init__(self) -> None:
        super().__init__(f"the answer has more than {MOST_LINE_BYTES / 1e6:g} MB")


async def _bound(response: httpx2.Response) -> None:
    if "text/event-stream" in response.headers.get("content-type", "").lower():
        return  # endless by nature; the package bounds each event
    response.stream = _Bounded(response.stream)


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > MOST_LINE_BYTES:
                raise _TooLong
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
