"""A process that has imported what others are going to, and forks their guardians: they begin in milliseconds.

Promises: what it forks begins as a program of its own does, but for modules that are there already: with the trainer's
present environment and directory, a session, a log and random numbers of its own, and no hold on anything of the
nursery's. It imports what it is told to, and nothing that would be another in a fork: a module that leaves threads,
processes or open files behind, looks at variables which each process finds anew, or imports what is not installed but
the user's, ends it with a word of which one that was. It ends with the trainer, and what it has forked with it; where
somebody kills a guardian, it ends what that one watched. Linux alone.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import itertools
import json
import os
import pickle
import select
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from datamodules.processes import guardian
from datamodules.processes.guarded import LOG_BYTES, GuardedProcess, Guardian, framed
from datamodules.processes.limits import environment

_TICK_S = 0.1  # how often it looks for guardians that have ended
_SEND_S = 5.0  # it reads at once, as a rule
_DESCRIPTORS = 4
_FOR_THEIR_OWN = ("fsspec.config", "networkx.utils.backends", "tqdm.utils", "urllib.request")
"""Modules that go through all environment variables for some that begin or end as theirs do."""


class Unfit(RuntimeError):
    """A module that processes have to import each for itself. Attributes: module, its name."""

    def __init__(self, module: str, why: str) -> None:
        super().__init__(why)
        self.module = module


class Nursery(GuardedProcess):
    """Starts guardians by forking: a `Starter`, once it is ready.

    Args:
        modules: names of modules to import, in this order; those that cannot be imported are left to the forks.
        variables: names of environment variables that each process finds anew.
        keep_environment: variables that processes may see though their names look like secrets.
        log: file for what is printed at imports; None for nowhere.
        shared: names of packages that may be imported though they are not installed but the user's.
        ours: names of modules of this project to import before them.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self,
        modules: Sequence[str],
        variables: Collection[str],
        keep_environment: Sequence[str] = (),
        log: Path | None = None,
        shared: Collection[str] = (),
        ours: Sequence[str] = (),
    ) -> None:
        self._environment = environment(keep_environment)  # of which forks are told what has changed
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        setup = {"modules": list(modules), "variables": list(variables), "shared": list(shared), "ours": list(ours)}
        super().__init__(__name__, setup, 0, keep_environment, log)

    async def ready(self, seconds: float) -> None:
        """Waits until everything is imported.

        Raises:
            Unfit: it must not import one of them, and ends.
            TimeoutError: no word after `seconds`.
            EOFError, OSError: it is gone.
        """
        said = bytearray()
        async with asyncio.timeout(seconds):
            await self.send(b"")
            while not said.endswith(b"\n"):
                said += await self.receive()
        if unfit := json.loads(said):
            raise Unfit(*unfit)

    def start(self, descriptors: Sequence[int], memory_bytes: int, environment: Mapping[str, str]) -> Guardian:
        """See `Starter`; one that cannot be forked is seen as one that has ended."""
        number = next(self._numbers)
        changed = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        gone = [name for name in self._environment if name not in environment]
        here = os.open(os.curdir, os.O_PATH | os.O_DIRECTORY)  # not by its name, which it may have lost
        try:
            self.tell({"fork": (number, memory_bytes, changed, gone)}, [*descriptors, here])
        finally:
            os.close(here)
        return _Forked(self, number)

    def tell(self, order: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Has it do something, and does not wait for that. Raises OSError: it is gone, or does not read."""
        left = framed(pickle.dumps(dict(order)))
        ends = time.monotonic() + _SEND_S
        with self._sending:
            if self._channel.fileno() < 0:
                raise BrokenPipeError("the process that forks others has ended")
            waiting = select.poll()
            waiting.register(self._channel, select.POLLOUT)
            while left:
                if not waiting.poll(max(0.0, ends - time.monotonic()) * 1000):
                    raise TimeoutError("the process that forks others does not read")
                with suppress(BlockingIOError):
                    left = left[socket.send_fds(self._channel, [left], descriptors) :]
                    descriptors = ()


class _Forked:
    def __init__(self, nursery: Nursery, number: int) -> None:
        self._nursery, self._number = nursery, number

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, which: signal.Signals) -> None:
        with suppress(OSError):  # then it has ended with the nursery
            self._nursery.tell({"signal": (self._number, int(which))})


def main(connection: socket.socket, setup: dict[str, Any]) -> None:
    """Imports, says `[]` or `[module, why not]`, and in the first case does what it is told until the trainer closes.

    Args:
        connection: to the trainer.
        setup: "modules", "variables", "shared" and "ours", see `Nursery`.
    """
    guardian.adopt_orphans()
    for name in ("datamodules.processes.worker", *setup["ours"]):
        importlib.import_module(name)
    unfit = _import(setup["modules"], frozenset(setup["variables"]), setup["shared"])
    connection.sendall(json.dumps(unfit).encode() + b"\n")
    if unfit:
        return
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and copy, every page of these
    forks: dict[int, int] = {}  # process of each guardian that has not ended, by number
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    while True:
        if waiting.poll(_TICK_S * 1000):
            try:
                order, descriptors = _order(connection)
            except EOFError:
                return
            if "fork" in order:
                number, *given = order["fork"]
                if (pid := _fork(connection, descriptors, *given)) is not None:
                    forks[number] = pid
            elif (pid := forks.get(order["signal"][0])) is not None:
                os.kill(pid, order["signal"][1])
        _reap(forks)


def _import(modules: Sequence[str], variables: frozenset[str], shared: Collection[str]) -> list[str]:
    """[], or the first of them that is not to be imported here, and why."""
    begin, known = _left_open(), set(sys.modules)
    for name in modules:
        with _looks(variables) as seen, suppress(Exception):  # which the forks meet again
            importlib.import_module(name)
        if seen:
            return [name, f"it looks at {seen[0]} when it is imported"]
        new = set(sys.modules) - known
        known |= new
        if users := [one for one in new if one.partition(".")[0] not in shared and not is_installed(one)]:
            return [name, f"it imports {min(users)}, which is not installed, and may be another in each of them"]
        if _has_threads():
            return [name, "it starts threads when it is imported"]
        if any(guardian.descendants(os.getpid())):
            return [name, "it starts processes when it is imported"]
        if opened := _left_open() - begin:
            return [name, f"it leaves {min(opened)} open when it is imported"]
    return []


def is_installed(name: str) -> bool:
    """Whether an imported module is Python's own, or of a package in a folder of installed ones. So is what has no
    file: such modules make it at their import."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    file = getattr(spec, "origin", None) or next(iter(getattr(spec, "submodule_search_locations", None) or ()), None)
    if name.partition(".")[0] in sys.stdlib_module_names or not isinstance(file, str) or not os.path.isabs(file):
        return True
    if not {"site-packages", "dist-packages"}.isdisjoint(file.split(os.sep)):
        return True
    own = Path(sysconfig.get_path("stdlib")).resolve()  # a package may have names of its own for Python's modules
    return Path(file).resolve().is_relative_to(own)


def _has_threads() -> bool:
    """Whether this process has some that do not end by themselves when it forks, as those of OpenBLAS do."""
    if len(os.listdir("/proc/self/task")) > 1:
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) > 1


@contextmanager
def _looks(variables: frozenset[str]) -> Iterator[list[str]]:
    """What is read in the block of these environment variables."""
    seen: list[str] = []
    kind: Any = type(os.environ)
    get, iterate = kind.__getitem__, kind.__iter__

    def one(environ: Any, name: Any) -> Any:
        if name in variables:
            seen.append(name)
        return get(environ, name)

    def every(environ: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in ("os", "collections.abc"):
            frame = frame.f_back
        if frame.f_globals.get("__name__") not in _FOR_THEIR_OWN:
            seen.append("all environment variables")
        return iterate(environ)

    kind.__getitem__, kind.__iter__ = one, every
    try:
        yield seen
    finally:
        kind.__getitem__, kind.__iter__ = get, iterate


def _left_open() -> set[str]:
    """What the descriptors of this process stand for, each with its number."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing
            found.add(f"{os.readlink(f'/proc/self/fd/{number}')} (descriptor {number})")
    return found


def _order(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next one, with its descriptors. Raises EOFError at the end."""
    length, descriptors, _, _ = socket.recv_fds(connection, guardian.LENGTH.size, _DESCRIPTORS)
    for one in descriptors:
        os.set_inheritable(one, False)
    if not length:
        raise EOFError
    length += guardian.read_exactly(connection, guardian.LENGTH.size - len(length))
    message = guardian.read_exactly(connection, *guardian.LENGTH.unpack(length))
    return pickle.loads(message), descriptors


def _fork(
    connection: socket.socket,
    descriptors: Sequence[int],
    memory_bytes: int,
    changed: Mapping[str, str],
    gone: list[str],
) -> int | None:
    """The process of a guardian; None where there can be none."""
    nursery = os.getpid()
    channel, control, log, directory = descriptors
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        pid = os.fork()
    except OSError as error:
        os.write(log, f"no process can be started: {error}\n".encode())
        pid = None
    if pid != 0:
        for one in descriptors:
            os.close(one)
        return pid
    try:
        connection.close()
        os.setsid()
        for number in (1, 2):
            os.dup2(log, number)
        os.fchdir(directory)
        for one in (log, directory):
            os.close(one)
        for name in gone:
            os.environ.pop(name, None)
        os.environ.update(changed)
        if (random := sys.modules.get("numpy.random")) is not None:
            random.seed()  # as Python's own does in each fork
        guardian.main(channel, control, nursery, memory_bytes, LOG_BYTES)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _reap(forks: dict[int, int]) -> None:
    """Takes leave of guardians that have ended, and ends what one that was killed has left: it is ours now."""
    ended = set()
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.add(pid)
    for number in [number for number, pid in forks.items() if pid in ended]:
        del forks[number]
    guardians = set(forks.values())
    for pid in guardian.children(os.getpid()):
        if pid not in guardians:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
