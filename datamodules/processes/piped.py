"""A long-lived command behind a guardian, which talks over its standard input and output: a server of tools, say.

Promises: no shell takes part; the command takes the place of the guardian's worker, so that everything that holds for
workers holds for it and for what it starts. What it sends is bounded. Its standard error goes to the log.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.processes.guarded import GuardedProcess

MOST_LINE_BYTES = 4_000_000


class TooLong(RuntimeError):
    """A line that does not end."""


class PipedCommand(GuardedProcess):
    """A command that is sent lines, and sends lines.

    Args:
        words: the program, which is looked for as a shell does, and its arguments.
        variables: of its environment, beside those it inherits.
        memory_bytes, keep_environment, log: see `GuardedProcess`; the log takes its standard error.

    Raises:
        OSError: no process can be started. A program that is not there exits with code 127.
    """

    def __init__(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        memory_bytes: int,
        keep_environment: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        setup = {"words": list(words), "variables": dict(variables)}
        super().__init__(__name__, setup, memory_bytes, keep_environment, log)
        self._received = bytearray()

    async def line(self) -> bytes:
        """The next line that it sends, without its end.

        Raises:
            TooLong: of more than `MOST_LINE_BYTES`.
            EOFError, OverMemory, OSError: it is gone.
        """
        seen = 0
        while (end := self._received.find(b"\n", seen)) < 0:
            seen = len(self._received)
            if seen > MOST_LINE_BYTES:
                raise TooLong(f"it sent a message of more than {MOST_LINE_BYTES / 1e6:g} MB")
            self._received += await self.receive()
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line


def main(connection: socket.socket, setup: dict[str, Any]) -> None:
    """Becomes the command. Does not return.

    Args:
        connection: to the trainer.
        setup: "words" and "variables" of the command.
    """
    for descriptor in (0, 1):
        os.dup2(connection.fileno(), descriptor)
    os.set_inheritable(connection.fileno(), False)
    words = setup["words"]
    try:
        os.execvpe(words[0], words, {**os.environ, **setup["variables"]})
    except (OSError, ValueError) as error:
        print(f"{words[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        os._exit(127)
