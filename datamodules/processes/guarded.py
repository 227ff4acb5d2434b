"""A process behind a guardian, seen from the trainer: how it starts, its end of the socket, its end.

Promises: it does not see the trainer's secrets, standard streams or open files, and ends with the trainer, however that
does; `kill` and `end` leave nothing of it and of what it started. Where somebody kills its guardian, that is found by a
mark in the environment, unless it took that away, or by the nursery that forked it. Waits let the event loop go on;
their deadlines are the callers'.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from datamodules.processes import guardian
from datamodules.processes.limits import environment

LOG_BYTES = 10**6
_END_S = 7.0  # the guardian's own bound is shorter
_GONE_S = 1.0
_MARK = "ARBORIST_GUARDED"


class OverMemory(RuntimeError):
    """The process and what it started hold more memory than they may."""


class Guardian(Protocol):
    """A guardian that was started, as the trainer has it in hand. Neither raises where it is gone."""

    def go_on(self) -> None:
        """Wakes it where somebody has stopped it."""

    def kill(self) -> None:
        """Ends it now, in whatever it does."""


class Starter(Protocol):
    """What starts guardians."""

    def start(self, descriptors: Sequence[int], memory_bytes: int, environment: Mapping[str, str]) -> Guardian:
        """Starts one.

        Args:
            descriptors: which it takes over: of the worker's socket, of its own, and of the log.
            memory_bytes: see `GuardedProcess`.
            environment: for it and the worker.

        Raises OSError: it cannot be started.
        """


class GuardedProcess:
    """A process that runs a program of this package, or what that turns into.

    Args:
        program: name of a module with a function `main(connection, setup)`.
        setup: for it; it is pickled.
        memory_bytes: most memory of the process with all it started; 0 for any.
        keep_environment: variables that it may see though their names look like secrets.
        log: file that its standard output and error go to, about the last megabyte of them; None for nowhere.
        starter: starts its guardian; None for a program of its own.

    Attributes:
        log: as given.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self,
        program: str,
        setup: Mapping[str, Any],
        memory_bytes: int,
        keep_environment: Sequence[str] = (),
        log: Path | None = None,
        starter: Starter | None = None,
    ) -> None:
        self.log = log
        self._memory_bytes = memory_bytes
        self._end: dict[str, Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._killing = threading.Lock()
        self._mark = uuid.uuid4().hex
        self._channel, theirs = socket.socketpair()
        self._control, control = socket.socketpair()
        self._has_spoken = False  # the guardian, which it does when nothing is left
        try:
            with theirs, control, open(_log_file(log), "a+b", buffering=0) as written:
                self._guardian = (starter or _Spawning()).start(
                    [theirs.fileno(), control.fileno(), written.fileno()],
                    memory_bytes,
                    {**environment(keep_environment), _MARK: self._mark},
                )
        except OSError:
            self._channel.close()
            self._control.close()
            raise
        self._channel.setblocking(False)
        self._control.setblocking(False)
        self._unsent = framed(pickle.dumps({"program": program, "sys_path": list(sys.path), **setup}))
        with suppress(OSError):  # so that it gets ready before anybody waits for it
            self._unsent = self._unsent[self._channel.send(self._unsent) :]

    async def send(self, data: bytes) -> None:
        """Sends bytes, behind those that it begins with. Raises OSError: it is gone."""
        data, self._unsent = self._unsent + data, b""
        self._loop = asyncio.get_running_loop()
        await self._loop.sock_sendall(self._channel, data)

    async def receive(self) -> bytes:
        """What it sent next. Raises EOFError, OverMemory, OSError: it is gone."""
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
            self._guardian.go_on()

    def kill(self) -> None:
        """Ends the process and whatever it started at once. Idempotent, and for any thread."""
        with self._killing:
            if self._channel.fileno() < 0:
                return
            self.signal_end()
            self._hear_out(_END_S)
            self._guardian.kill()  # its end is the worker's too
            self._hear_out(_GONE_S)
            if not self._has_spoken:  # it could not end what it was to end
                _sweep(self._mark)
            for one in (self._channel, self._control):
                if self._loop is not None and not self._loop.is_closed():
                    self._loop.remove_reader(one.fileno())
                    self._loop.remove_writer(one.fileno())
                one.close()

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
        self._has_spoken |= bool(words)

    def _hear_out(self, seconds: float) -> None:
        """Waits until the guardian has left its end of the socket, and lets nothing else go on."""
        ends = time.monotonic() + seconds
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        with suppress(OSError):
            while waiting.poll(max(0.0, ends - time.monotonic()) * 1000):
                if not self._control.recv(4096):
                    return
                self._has_spoken = True

    def _over(self, held: int) -> str:
        return f"{held / 1e6:.0f} MB of {self._memory_bytes / 1e6:.0f} MB"


class _Spawning:
    """Starts guardians as programs of their own."""

    def start(self, descriptors: Sequence[int], memory_bytes: int, environment: Mapping[str, str]) -> Guardian:
        *sockets, log = descriptors
        numbers = [*sockets, os.getpid(), memory_bytes, LOG_BYTES]
        return _Spawned(
            subprocess.Popen(
                [sys.executable, guardian.__file__, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=sockets,
                env=environment,
                start_new_session=True,
            )
        )


class _Spawned:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GONE_S)


def end_all(processes: Iterable[GuardedProcess]) -> None:
    """Ends them at once, all at the same time."""
    found = list(processes)
    for one in found:
        one.signal_end()
    for one in found:
        one.kill()


def _sweep(mark: str) -> None:
    """Kills the processes that carry a mark, until there are none."""
    ends = time.monotonic() + _GONE_S
    while (found := list(_marked(f"{_MARK}={mark}".encode()))) and time.monotonic() < ends:
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _marked(mark: bytes) -> Iterator[int]:
    """Nothing where /proc does not tell."""
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # gone, or another user's
                if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    yield int(name)


def framed(message: bytes) -> bytes:
    """As the process reads a message."""
    return guardian.LENGTH.pack(len(message)) + message


def size_of(log: Path | None) -> int:
    """Bytes of a log; 0 where there is none."""
    try:
        return log.stat().st_size if log is not None else 0
    except OSError:
        return 0


def written_since(log: Path, begin: int) -> bytes:
    """What has been written to a log behind `begin`; all of it where it is shorter by now. Raises OSError."""
    with log.open("rb") as file:
        file.seek(begin if size_of(log) >= begin else 0)
        return file.read(LOG_BYTES + 1000)


def _log_file(log: Path | None) -> str:
    if log is not None:
        with suppress(OSError):  # a full disk, say, is no reason not to train
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
            return str(log)
    return os.devnull
