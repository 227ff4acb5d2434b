"""MCP servers as tools of `ToolWorkflow`: what a server offers is what the model may call.

Promises: the tools are those the server has when rollouts begin, under its own names and schemas. Results are text;
what is not is told by its kind. A tool's error is told to the model, as other tools' are. A server shared by all
episodes that dies costs the calls that wait, is told about, and is started anew; one of an episode's own takes that
episode with it, as what it knew is gone, and so does one that cannot be reached: no such episode is scored.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from app import checks
from datamodules.processes import foreign
from datamodules.processes.calls import CallFailed, DeadlinePassed
from datamodules.prompts.base import Prompt
from datamodules.prompts.extras import needs
from datamodules.workflows.calling import in_a_thread, within
from datamodules.workflows.tools import Toolbox, ToolsLost

needs("mcp", "mcp", "MCPTools")

from mcp import MCPError  # noqa: E402
from mcp.types import (  # noqa: E402
    CallToolResult,
    EmbeddedResource,
    JSONRPCRequest,
    ResourceLink,
    TextContent,
    TextResourceContents,
    jsonrpc_message_adapter,
)

from datamodules.workflows.adapters.mcp_servers import (  # noqa: E402
    CommandServer,
    Connection,
    HTTPServer,
    Server,
    ServerLost,
    read_tools,
)

_log = logging.getLogger(__name__)
_MOST_CHARS = 1_000_000  # of a result
_MOST_TIMEOUTS = 3  # in a row, after which a shared server is taken for one that hangs


class MCPTools(Toolbox):
    """The tools of one MCP server, which is a command that is started here or a URL (streamable HTTP).

    A shared server of which three calls in a row have passed their deadlines is taken for one that hangs, and is
    started anew.

    Args:
        command: the program and its arguments, as a text or a list of words; it talks over standard input and output,
            no shell takes part. What it prints to standard error is kept under `agents/` of the run directory, in a
            file for each of those that run at a time, of which the last megabyte stays.
        url: of a server that runs already; either this or `command`.
        each: "run" shares one server, or session with it, among all episodes: right for tools without a memory.
            "episode" starts one for each episode at its first call, and ends it with the episode: for tools that keep
            what a call did.
        allow: names of the tools to offer; None for all.
        deny: names of those not to offer.
        variables: of a command's environment, beside what it inherits.
        keep_environment: environment variables a command may see though their names look like secrets.
        header_variables: HTTP header -> the environment variable that has its value, so that no configuration holds it.
        memory_mb: most memory of a command with all it starts, in 10^6 bytes; None for a quarter of the machine's.
        start_deadline_s: seconds until a server has greeted. A call that has to start one waits for that within its
            own deadline.

    Raises:
        ValueError: not one of command and url, or an option without effect on it.
        ImportError: without the extra `mcp`.
    """

    def __init__(
        self,
        command: str | list[str] | None = None,
        url: str | None = None,
        each: Literal["run", "episode"] = "run",
        allow: list[str] | None = None,
        deny: list[str] | None = None,
        variables: dict[str, str] | None = None,
        keep_environment: list[str] | None = None,
        header_variables: dict[str, str] | None = None,
        memory_mb: float | None = None,
        start_deadline_s: float = 60.0,
    ) -> None:
        checks.one_of("MCPTools.each", each, ("run", "episode"))
        checks.deadline({"MCPTools.start_deadline_s": start_deadline_s})
        checks.positive({"MCPTools.memory_mb": memory_mb})
        if (command is None) == (url is None):
            raise ValueError("MCPTools: give either command, to start a server, or url, to reach one")
        if allow is not None and deny is not None:
            raise ValueError("MCPTools: give allow or deny, not both")
        words = shlex.split(command) if isinstance(command, str) else command
        of_commands = {"variables": variables, "keep_environment": keep_environment, "memory_mb": memory_mb}
        stray = [name for name, value in of_commands.items() if value is not None]
        if url is not None and stray:
            raise ValueError(f"MCPTools.{stray[0]}: has no effect with url; remove it")
        if url is None and header_variables is not None:
            raise ValueError("MCPTools.header_variables: has no effect with command; use variables")
        if url is None and not words:
            raise ValueError("MCPTools.command: names no program")
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"MCPTools.url: {url!r} does not begin with http:// or https://")
        self.tools: list[dict[str, Any]] = []
        self._server: Server = (
            HTTPServer(url, header_variables or {})
            if url is not None
            else CommandServer(words or [], variables or {}, memory_mb, keep_environment or ())
        )
        self._headers = header_variables or {}
        self._name = url or Path((words or [""])[0]).name
        self._each = each
        self._allow, self._deny = allow, deny
        self._start_s = start_deadline_s
        self._logs: Path | None = None
        self._writing: dict[Path, Connection] = {}
        self._shared = _Sessions(self._connect, self._name)

    def log_to(self, directory: Path) -> None:
        """Keeps there what servers that are started here print; one goes on with the file of another that is over."""
        directory.mkdir(parents=True, exist_ok=True)
        self._logs = directory

    def prepare(self) -> None:
        """Asks a server, from a connection of its own, what tools it has. Raises ValueError: it cannot be reached, or
        `allow` or `deny` name what it has not."""
        for header, variable in self._headers.items():
            if variable not in os.environ:
                raise ValueError(f"MCPTools.header_variables: {header}: the environment variable {variable} is not set")
        try:
            found = in_a_thread(lambda: read_tools(self._server, self._start_s, self._free_log()))
        except (ServerLost, MCPError, TimeoutError, RuntimeError) as error:
            raise ValueError(f"MCPTools: the MCP server {self._name} {error}") from error
        names = [one.name for one in found]
        for option, given in (("allow", self._allow), ("deny", self._deny)):
            if stray := [name for name in given or () if name not in names]:
                raise ValueError(f"MCPTools.{option}: the server has no tool '{stray[0]}'; it has {', '.join(names)}")
        offered = [
            one
            for one in found
            if (self._allow is None or one.name in self._allow) and one.name not in (self._deny or ())
        ]
        if not offered:
            raise ValueError(f"MCPTools: the server {self._name} offers no tool; it has {', '.join(names) or 'none'}")
        self.tools = [
            {
                "type": "function",
                "function": {
                    "name": one.name,
                    "description": one.description or one.title or "",
                    "parameters": one.input_schema,
                },
            }
            for one in offered
        ]

    def open(self, prompt: Prompt) -> Toolbox:
        """The tools of one episode."""
        if self._each == "run":
            return self
        return _EpisodeTools(self.tools, self._name, _Sessions(self._connect, self._name, once=True))

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        return await self.call_within(None, name, arguments)

    async def call_within(self, seconds: float | None, name: str, arguments: dict[str, Any]) -> str:
        """As `call`, with a deadline. Raises DeadlinePassed, of which three in a row end a server."""
        try:
            return _text(await self._shared.ask(seconds, name, arguments))
        except ServerLost as error:
            _log.warning("the MCP server %s %s; it is started anew for the next call", self._name, error)
            raise CallFailed(f"its server {_brief(error)}") from error

    def stop(self) -> None:
        """Ends the shared server, where one was started. The next call starts another."""
        self._shared.kill()

    async def _connect(self) -> Connection:
        log = self._free_log()
        one = Connection(self._server, log)
        if log is not None:
            self._writing[log] = one
        await one.open(self._start_s)
        return one

    def _free_log(self) -> Path | None:
        """A file that no server writes: one for each episode would be millions, most of them empty."""
        if self._logs is None or isinstance(self._server, HTTPServer):
            return None
        self._writing = {log: one for log, one in self._writing.items() if not one.is_over}
        names = (self._logs / f"mcp-{self._name}-{number}.log" for number in itertools.count(1))
        return next(log for log in names if log not in self._writing)


class _EpisodeTools(Toolbox):
    """Those of an episode that has a server, or a session with one, of its own."""

    def __init__(self, tools: list[dict[str, Any]], name: str, sessions: _Sessions) -> None:
        self.tools = tools
        self._name = name
        self._sessions = sessions
        self._lost: Exception | None = None

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        return await self.call_within(None, name, arguments)

    async def call_within(self, seconds: float | None, name: str, arguments: dict[str, Any]) -> str:
        """As `MCPTools.call_within`."""
        if self._lost is not None:
            raise ToolsLost(str(self._lost)) from self._lost
        try:
            return _text(await self._sessions.ask(seconds, name, arguments))
        except ServerLost as error:
            self._lost = error
            raise ToolsLost(f"the episode's MCP server {self._name} {error}") from error

    async def close(self) -> None:
        await self._sessions.close()


class _Sessions:
    """At most one connection to the `server` at a time, opened when it is needed, and anew where it was lost; `once`:
    not anew, as what a lost one knew is gone."""

    def __init__(self, connect: Callable[[], Any], server: str, once: bool = False) -> None:
        self._connect, self._server, self._once = connect, server, once
        self._loop: asyncio.AbstractEventLoop | None = None
        self._one: Connection | None = None
        self._timeouts = 0

    async def connection(self) -> Connection:
        """Raises ServerLost."""
        if self._loop is not asyncio.get_running_loop():
            self.kill()
            self._loop, self._lock = asyncio.get_running_loop(), asyncio.Lock()
        async with self._lock:
            if self._one is None or self._one.is_lost:
                if self._one is not None and self._once:
                    raise ServerLost(f"is gone: {_MOST_TIMEOUTS} calls in a row passed their deadlines")
                self._one = None
                self._one = await self._connect()
                self._timeouts = 0
            return self._one

    async def ask(self, seconds: float | None, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Within `seconds`, or without a deadline. Raises DeadlinePassed, ToolsLost: no server can be reached,
        ServerLost, and CallFailed: the server refuses, or the arguments cannot be sent."""
        asked: Connection | None = None

        async def answer() -> CallToolResult:
            nonlocal asked
            try:
                connection = await self.connection()
            except ServerLost as error:
                raise ToolsLost(f"the MCP server {self._server} {error}") from error
            _check(name, arguments)
            asked = connection
            return await connection.call(name, arguments)

        try:
            result: CallToolResult = await within(seconds, answer())
        except DeadlinePassed:  # a call that is given up says nothing about the server, which others use
            if asked is not None and asked is self._one:
                self._timeouts += 1
                if self._timeouts >= _MOST_TIMEOUTS:
                    asked.abandon()
            raise
        except MCPError as error:
            raise CallFailed(foreign.described(error).removeprefix("MCPError: ")) from error
        self._timeouts = 0
        return result

    async def close(self) -> None:
        if self._one is not None:
            await self._one.close()

    def kill(self) -> None:
        if self._one is not None:
            self._one.kill()
        self._one = None


def _check(name: str, arguments: dict[str, Any]) -> None:
    """What cannot be written would end the connection, and with it the calls of other episodes; what the package cannot
    read would never be answered. Raises CallFailed."""
    call = {"name": name, "arguments": arguments}
    try:
        line = JSONRPCRequest(jsonrpc="2.0", id=0, method="tools/call", params=call).model_dump_json()
        jsonrpc_message_adapter.validate_json(line)
    except (ValueError, RecursionError) as error:  # half a character, nested too deep
        raise CallFailed(f"its arguments cannot be sent as JSON: {str(error)[: foreign.MOST_SAID]}") from error


def _text(result: CallToolResult) -> str:
    """What a result says. Raises CallFailed: it says that the call failed, or is too long."""
    parts = [_part(one) for one in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    if result.is_error:
        raise CallFailed(text[: foreign.MOST_SAID] or "the server gives no reason")
    if len(text) > _MOST_CHARS:
        raise CallFailed(f"returned {len(text) / 1e6:.1f} million characters, more than {_MOST_CHARS / 1e6:g} million")
    return text


def _part(one: Any) -> str:
    """Text as it is; of anything else what it is."""
    if isinstance(one, TextContent):
        return one.text
    if isinstance(one, EmbeddedResource):
        if isinstance(one.resource, TextResourceContents):
            return one.resource.text
        return f"[a resource that is no text: {one.resource.uri}]"
    if isinstance(one, ResourceLink):
        return f"[a link to a resource: {one.uri}]"
    return f"[{one.type} of type {getattr(one, 'mime_type', 'unknown')}, which is no text]"


def _brief(error: Exception) -> str:
    """For the model: without what the server printed."""
    return str(error).partition("; it printed")[0][: foreign.MOST_SAID]
