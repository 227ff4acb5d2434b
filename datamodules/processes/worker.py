"""What runs in a worker process: a function that is not ours, called in the process's main thread.

Promises: every job is answered once, by its number, by this process alone: a child that the function forked ends when
it comes back here, and has no hold on the channel. An answer is a line of JSON of bounded length, whatever the function
returns, raises or prints: nobody has to unpickle what it made.
"""

from __future__ import annotations

import json
import logging
import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from app.clients import no_keys_needed
from datamodules.processes.foreign import described, place
from datamodules.processes.guardian import ignore, read_message, resident

MOST_ANSWER_BYTES = 1 << 20
_MOST_SAID = 2000
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_OF_GROUPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # which the trainer gets too, and decides
_MOST_BY_VALUE = 10**7  # bytes
_MEMORY_POLL_S = 0.01  # how often the own memory is looked at after a call


_unpickle: Callable[[bytes], Any] = pickle.loads


def pickled(value: Any) -> bytes:
    """For workers. What is written in a notebook goes by value: it has no file that they could import. Raises what
    pickle, there cloudpickle, says of what cannot be sent."""
    main = sys.modules["__main__"]
    is_notebook = hasattr(sys, "ps1") and not os.path.isfile(getattr(main, "__file__", None) or "")
    try:
        data = pickle.dumps(value)
        if not is_notebook or b"__main__" not in data:
            return data
    except (pickle.PicklingError, AttributeError, TypeError):
        if not is_notebook:
            raise
    import cloudpickle  # here alone: workers would all be slower to begin

    data = bytes(cloudpickle.dumps(value))
    if len(data) > _MOST_BY_VALUE:
        told = (
            "%.0f MB go to each process with what a cell defines: it names something large, which it could make itself"
        )
        logging.getLogger(__name__).warning(told, len(data) / 1e6)
    return data


def unpickled(data: bytes) -> Any:
    """As functions and arguments are in this process: for what a function has to import later than itself."""
    return _unpickle(data)


class NotAnAnswer(ValueError):
    """What the function returned is none. Attributes: status, the kind of failure."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status


def main(connection: socket.socket, setup: dict[str, Any]) -> None:
    """Says `["ready", bytes held]` or `["error", why]`; then answers lists of jobs until the trainer closes.

    A job is (number, pickled arguments); its answer is `[number, status, content, bytes held]`, where status is "ok",
    "exception" or that of a `NotAnAnswer`, and content what the function returned, or why not.

    Args:
        connection: to the trainer.
        setup: "function", pickled; "main", how to import the trainer's main module; "memory_bytes".
    """
    _limit(setup["memory_bytes"])
    for stream in (sys.stdout, sys.stderr):  # the log; what half a character is printed to must not raise
        stream.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.argv[:] = setup["argv"]
    pid = os.getpid()
    for signum in _OF_GROUPS:  # as the guardian does, which is another program, maybe: `_leave` has to know it again
        signal.signal(signum, ignore)
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=lambda: _leave(connection))
    global _unpickle
    unpickle = _unpickle = _Unpickler(setup["main"])
    try:
        with no_keys_needed():
            function = unpickle(setup["function"])
        if prepare := getattr(function, "prepare", None):
            prepare()
    except BaseException as error:
        if os.getpid() != pid:
            os._exit(1)
        _write(connection, ["error", described(error)])
        return
    held, look = resident("self"), 0.0
    _write(connection, ["ready", held])
    while True:
        try:
            jobs = pickle.loads(read_message(connection))
        except EOFError:
            return
        for number, arguments in jobs:
            status, content = _call(function, unpickle, arguments)
            if os.getpid() != pid:  # a child that the function forked
                os._exit(1)
            if time.monotonic() >= look:
                held, look = resident("self"), time.monotonic() + _MEMORY_POLL_S
            connection.sendall(f'[{number}, "{status}", {content}, {held}]\n'.encode())


_before_fork = threading.local()


def _hold() -> None:
    """Signals that come before a forked child has left wait for that: it would ignore them."""
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_GROUPS)


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _leave(connection: socket.socket) -> None:
    """A forked child has no hold on the channel, and can be ended by its parent's SIGTERM."""
    connection.close()
    for number in _OF_GROUPS:
        if signal.getsignal(number) is ignore:
            with suppress(ValueError):
                signal.signal(number, signal.SIG_DFL)
    _let_go()


def _call(function: Callable[..., Any], unpickle: Callable[[bytes], Any], arguments: bytes) -> tuple[str, str]:
    """Status, and content in JSON."""
    try:
        positional, named = unpickle(arguments)
        content = json.dumps(function(*positional, **named))
        if len(content) > MOST_ANSWER_BYTES - 1000:
            raise NotAnAnswer(f"returned {len(content) / 1e6:.1f} MB, more than 1 MB", "exception")
        return "ok", content
    except NotAnAnswer as error:
        return error.status, json.dumps(str(error)[:_MOST_SAID])
    except BaseException as error:  # SystemExit and time-outs that are no Exception included
        said = f"raised {described(error)}{place(error)}" if _is_for_people(function) else described(error)
        return "exception", json.dumps(said)
    finally:
        for timer in _TIMERS:
            signal.setitimer(timer, 0)  # an alarm that was left must not ring in another's call


def _is_for_people(function: Callable[..., Any]) -> bool:
    """Whether its errors are read by people, who want the line, and not by a model."""
    return getattr(function, "is_for_people", False) is True


def _write(connection: socket.socket, message: list[Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


class _Unpickler:
    """Imports the trainer's main module where something of it is asked for, a function defined in a script, say."""

    def __init__(self, main: dict[str, Any]) -> None:
        self._main = main

    def __call__(self, data: bytes) -> Any:
        try:
            return pickle.loads(data)
        except AttributeError:
            if not self._main or b"__main__" not in data:
                raise
        main, self._main = self._main, {}
        process: Any = multiprocessing.process.current_process()
        process._inheriting = True  # as where multiprocessing does this: a script that starts processes when it is
        try:  # imported is told so, and does not train once more in here
            multiprocessing.spawn.prepare(main)
        finally:
            del process._inheriting
        return pickle.loads(data)


def _limit(memory_bytes: int) -> None:
    """What the kernel bounds, behind what the guardian looks at every tenth of a second.

    RLIMIT_DATA counts private memory that can be written: an allocation too large at once is a MemoryError. Not
    RLIMIT_AS, which counts address space that libraries (CUDA, arenas of threads) reserve and never use. Processor time
    is bounded by the deadline of each call, which ends all processes; RLIMIT_CPU would end long-lived workers. A core
    file of a crash has the size of the memory.
    """
    for kind, most in ((resource.RLIMIT_DATA, 2 * memory_bytes + 2 * 10**9), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        with suppress(ValueError, OSError):  # lower already
            resource.setrlimit(kind, (most, most) if hard == resource.RLIM_INFINITY else (min(most, hard), hard))
