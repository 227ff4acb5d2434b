"""One worker process, seen from the trainer: what it is asked, and what it answers.

Promises: every wait has a deadline and lets the event loop go on, half a message, a worker that does not read and one
that writes without end included. How it starts and ends: see `datamodules.processes.guarded`.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from datamodules.processes import worker
from datamodules.processes.deadline import deadline
from datamodules.processes.guarded import GuardedProcess, OverMemory, Starter, framed


class Garbled(RuntimeError):
    """What came from the process is no answer to what it was asked."""


class WorkerProcess(GuardedProcess):
    """A process that calls one function.

    Args:
        function: pickled; a method `prepare()`, where it has one, is called before the first call.
        memory_bytes: most memory of the process with all it started.
        keep_environment: variables that it may see though their names look like secrets.
        log: file that its standard output and error go to, about the last megabyte of them; None for nowhere.
        starter: see `GuardedProcess`.

    Attributes:
        answers: calls it has answered.
        log: as given.

    Raises:
        OSError: no process can be started.
        RuntimeError: this is a worker that imports its trainer's script, which has no `if __name__ == "__main__":`.
    """

    def __init__(
        self,
        function: bytes,
        memory_bytes: int,
        keep_environment: Sequence[str] = (),
        log: Path | None = None,
        starter: Starter | None = None,
    ) -> None:
        setup = {
            "argv": list(sys.argv),
            "main": _main_module(),
            "function": function,
            "memory_bytes": memory_bytes,
        }
        super().__init__(worker.__name__, setup, memory_bytes, keep_environment, log, starter)
        self.answers = 0
        self._received = bytearray()
        self._asked = self._next = 0

    async def greet(self, seconds: float) -> None:
        """Waits until it can be asked.

        Raises:
            TimeoutError: no sign of life after `seconds`.
            OverMemory: it holds too much before its first call.
            ValueError: the function cannot be loaded there; the message says why.
            Garbled, EOFError, OSError: as `answer`.
        """
        async with asyncio.timeout(seconds):
            await self.send(b"")
            message = await self._line()
        if len(message) != 2 or message[0] not in ("ready", "error"):
            raise Garbled(f"it began with {str(message)[:100]}")
        if message[0] == "error":
            raise ValueError(str(message[1]))
        self._check_memory(message[1])

    async def ask(self, jobs: Sequence[bytes], seconds: float | None, held: Callable[[], float] | None = None) -> None:
        """Sends calls, each the pickled (arguments, named arguments), to be answered in this order.

        `seconds` may be None, here and in `answer`, for a caller that has a deadline of its own; `held` says how many
        were not counted so far, see `deadline`.

        Raises:
            TimeoutError: it does not read them for `seconds`.
            OSError: it is gone.
        """
        numbered = [(self._asked + place, job) for place, job in enumerate(jobs)]
        self._asked += len(jobs)
        self._next = numbered[0][0]
        async with deadline(seconds, held):
            await self.send(framed(pickle.dumps(numbered)))

    async def answer(self, seconds: float | None, held: Callable[[], float] | None = None) -> tuple[str, Any, str]:
        """The answer to the oldest call: its status, its content, and "" or why the process holds too much after it.

        Raises:
            TimeoutError: none after `seconds`.
            OverMemory: the process had to be ended in the middle of the call.
            Garbled: something else came.
            EOFError, OSError: the process is gone.
        """
        message = self._received_line()
        if message is None:
            async with deadline(seconds, held):
                message = await self._line()
        if len(message) != 4 or message[0] != self._next or not isinstance(message[1], str):
            raise Garbled(f"asked for answer {self._next} it sent {str(message)[:100]}")
        self._next += 1
        self.answers += 1
        try:
            self._check_memory(message[3])
        except OverMemory as error:
            return message[1], message[2], str(error)
        return message[1], message[2], ""

    async def _line(self) -> list[Any]:
        while (message := self._received_line()) is None:
            if len(self._received) > worker.MOST_ANSWER_BYTES:
                raise Garbled(f"it sent {len(self._received)} bytes without an end")
            self._received += await self.receive()
        return message

    def _received_line(self) -> list[Any] | None:
        if (end := self._received.find(b"\n")) < 0:
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, list) or not message:
            raise Garbled(f"it sent {line[:100]!r}")
        return message

    def _check_memory(self, held: Any) -> None:
        if not isinstance(held, int):
            raise Garbled(f"it says that it holds {str(held)[:100]}")
        if held > self._memory_bytes:
            raise OverMemory(self._over(held))


def _main_module() -> dict[str, Any]:
    """How to import this process's main module elsewhere, for functions that are defined in a script."""
    found = spawn.get_preparation_data("worker")
    return {name: found[name] for name in ("dir", "init_main_from_name", "init_main_from_path") if name in found}
