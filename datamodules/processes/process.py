"""One worker process, seen from the trainer: its guardian, its end of the socket, its end.

Promises: every wait has a deadline and lets the event loop go on, half a message, a worker that does not read and one
that writes without end included; `kill` and `end` leave nothing of the worker and of what it started. It does not see
the trainer's secrets, standard streams or open files, and ends with the trainer, however that does.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from datamodules.processes import guardian, worker
from datamodules.processes.limits import environment

LOG_BYTES = 10**6
_END_S = 7.0  # the guardian's own bound is shorter
_GONE_S = 1.0


class OverMemory(RuntimeError):
    """The process and what it started hold more memory than they may."""


class Garbled(RuntimeError):
    """What came from the process is no answer to what it was asked."""


class WorkerProcess:
    """A process that calls one function.

    Args:
        function: pickled; a method `prepare()`, where it has one, is called before the first call.
        memory_bytes: most memory of the process with all it started.
        keep_environment: variables that it may see though their names look like secrets.
        log: file that its standard output and error go to, about the last megabyte of them; None for nowhere.

    Attributes:
        answers: calls it has answered.
        log: as given.

    Raises:
        OSError: no process can be started.
        RuntimeError: this is a worker that imports its trainer's script, which has no `if __name__ == "__main__":`.
    """

    def __init__(
        self, function: bytes, memory_bytes: int, keep_environment: Sequence[str] = (), log: Path | None = None
    ) -> None:
        main = _main_module()
        self.answers = 0
        self.log = log
        self._memory_bytes = memory_bytes
        self._received = bytearray()
        self._asked = self._next = 0
        self._end: dict[str, Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel, theirs = socket.socketpair()
        self._control, control = socket.socketpair()
        numbers = [theirs.fileno(), control.fileno(), os.getpid(), memory_bytes, LOG_BYTES]
        try:
            with theirs, control, open(_log_file(log), "ab") as written:
                self._process = subprocess.Popen(
                    [sys.executable, guardian.__file__, *map(str, numbers)],
                    stdin=subprocess.DEVNULL,
                    stdout=written,
                    stderr=written,
                    pass_fds=numbers[:2],
                    env=environment(keep_environment),
                    start_new_session=True,
                )
        except OSError:
            self._channel.close()
            self._control.close()
            raise
        self._channel.setblocking(False)
        self._control.setblocking(False)
        setup = {
            "program": worker.__name__,
            "sys_path": list(sys.path),
            "argv": list(sys.argv),
            "main": main,
            "function": function,
            "memory_bytes": memory_bytes,
        }
        self._unsent = _framed(pickle.dumps(setup))
        with suppress(OSError):  # so that it gets ready before anybody waits for it
            self._unsent = self._unsent[self._channel.send(self._unsent) :]

    async def greet(self, seconds: float) -> None:
        """Waits until it can be asked.

        Raises:
            TimeoutError: no sign of life after `seconds`.
            OverMemory: it holds too much before its first call.
            ValueError: the function cannot be loaded there; the message says why.
            Garbled, EOFError, OSError: as `answer`.
        """
        async with asyncio.timeout(seconds):
            await self._send(self._unsent)
            message = await self._line()
        if len(message) != 2 or message[0] not in ("ready", "error"):
            raise Garbled(f"it began with {str(message)[:100]}")
        if message[0] == "error":
            raise ValueError(str(message[1]))
        self._check_memory(message[1])

    async def ask(self, jobs: Sequence[bytes], seconds: float | None) -> None:
        """Sends calls, each the pickled (arguments, named arguments), to be answered in this order.

        `seconds` may be None, here and in `answer`, for a caller that has a deadline of its own.

        Raises:
            TimeoutError: it does not read them for `seconds`.
            OSError: it is gone.
        """
        numbered = [(self._asked + place, job) for place, job in enumerate(jobs)]
        self._asked += len(jobs)
        self._next = numbered[0][0]
        async with asyncio.timeout(seconds):
            await self._send(_framed(pickle.dumps(numbered)))

    async def answer(self, seconds: float | None) -> tuple[str, Any, str]:
        """The answer to the oldest call: its status, its content, and "" or why the process holds too much after it.

        Raises:
            TimeoutError: none after `seconds`.
            OverMemory: the process had to be ended in the middle of the call.
            Garbled: something else came.
            EOFError, OSError: the process is gone.
        """
        message = self._received_line()
        if message is None:
            async with asyncio.timeout(seconds):
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

    @property
    def is_gone(self) -> bool:
        """Whether it has ended by itself."""
        if self._end is None:
            with suppress(BlockingIOError):
                self._heard(self._control.recv(4096))
        return self._end is not None

    async def end(self, is_gone: bool = False) -> str:
        """Ends the process and whatever it started; says how it ended. `is_gone`: its end of the socket is closed."""
        try:
            if is_gone:  # its own exit code is on its way
                await self._ended(_GONE_S)
            if not self.is_gone:
                self.signal_end()
                await self._ended(_END_S)
        except OSError:  # closed meanwhile
            pass
        finally:
            self.kill()
        code = (self._end or {}).get("code")
        return "was killed" if code is None else f"exited with code {code}"

    def signal_end(self) -> None:
        """Has its guardian end it, itself and what else there is, and does not wait for that."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
            self._process.send_signal(signal.SIGCONT)  # somebody may have stopped it

    def kill(self) -> None:
        """Ends the process and whatever it started at once. Idempotent."""
        if self._channel.fileno() < 0:
            return
        self.signal_end()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()  # its end is the worker's too
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        for one in (self._channel, self._control):
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(one.fileno())
                self._loop.remove_writer(one.fileno())
            one.close()

    async def _send(self, data: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        await self._loop.sock_sendall(self._channel, data)

    async def _line(self) -> list[Any]:
        while (message := self._received_line()) is None:
            if len(self._received) > worker.MOST_ANSWER_BYTES:
                raise Garbled(f"it sent {len(self._received)} bytes without an end")
            self._received += await self._bytes()
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

    async def _bytes(self) -> bytes:
        self._loop = asyncio.get_running_loop()
        try:
            found = await self._loop.sock_recv(self._channel, 1 << 16)
        except ConnectionError:  # it ended with something unread
            found = b""
        if not found:
            await self._ended(_GONE_S)
            if "memory" in (self._end or {}):
                assert self._end is not None
                raise OverMemory(self._over(self._end["memory"]))
            raise EOFError
        return found

    async def _ended(self, seconds: float) -> None:
        """Waits for the guardian's last words."""
        if self._end is not None:
            return
        self._loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                self._heard(await self._loop.sock_recv(self._control, 4096))

    def _heard(self, words: bytes) -> None:
        self._end = json.loads(words) if words else {}

    def _check_memory(self, held: Any) -> None:
        if not isinstance(held, int):
            raise Garbled(f"it says that it holds {str(held)[:100]}")
        if held > self._memory_bytes:
            raise OverMemory(self._over(held))

    def _over(self, held: int) -> str:
        return f"{held / 1e6:.0f} MB of {self._memory_bytes / 1e6:.0f} MB"


def end_all(processes: Iterable[WorkerProcess]) -> None:
    """Ends them at once, all at the same time."""
    found = list(processes)
    for one in found:
        one.signal_end()
    for one in found:
        one.kill()


def _framed(message: bytes) -> bytes:
    return guardian.LENGTH.pack(len(message)) + message


def _log_file(log: Path | None) -> str:
    if log is not None:
        with suppress(OSError):  # a full disk, say, is no reason not to train
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
            return str(log)
    return os.devnull


def _main_module() -> dict[str, Any]:
    """How to import this process's main module elsewhere, for functions that are defined in a script."""
    found = spawn.get_preparation_data("worker")
    return {name: found[name] for name in ("dir", "init_main_from_name", "init_main_from_path") if name in found}
