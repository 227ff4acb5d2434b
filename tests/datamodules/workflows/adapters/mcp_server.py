"""An MCP server for tests, written with the official package: `python mcp_server.py [port]`, over standard input and
output or HTTP. Some of its tools misbehave."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from mcp.server import MCPServer
from mcp.types import ImageContent

server = MCPServer("arithmetic")
counted = 0


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def count() -> str:
    """Counts its calls."""
    global counted
    counted += 1
    return f"{counted} in {os.getpid()}"


@server.tool()
def secret() -> str:
    """Says what it sees of the environment."""
    return f"{os.environ.get('ARBORIST_TEST_TOKEN')} {os.environ.get('PLAIN')}"


@server.tool()
def fail(why: str) -> str:
    """Raises."""
    raise RuntimeError(why)


@server.tool()
def picture() -> list[str | ImageContent]:
    """A text, and what is none."""
    return ["a square:", ImageContent(type="image", data="AAAA", mime_type="image/png")]


@server.tool()
def flood(megabytes: int) -> str:
    """A result of that size."""
    return "x" * (megabytes * 1_000_000)


@server.tool()
async def sleep(seconds: float) -> str:
    """Takes that long."""
    await asyncio.sleep(seconds)
    return "woke"


@server.tool()
def child() -> str:
    """Starts a process in a session of its own."""
    return str(subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL).pid)


@server.tool()
async def die() -> str:
    """Ends the server."""
    print("the last words", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
