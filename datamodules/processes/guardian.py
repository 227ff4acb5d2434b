"""The program of a worker's guardian: it forks the worker, watches it, and ends it with everything it started.

    python guardian.py CHANNEL CONTROL PARENT MEMORY_BYTES LOG_BYTES

Promises: it runs nothing foreign and waits nowhere, so that it acts whatever the worker does, inside C code too. It
ends the worker when the trainer says so (closes CONTROL), when its parent (the trainer, or a nursery) is gone, and when
the worker and its children together hold more than MEMORY_BYTES. What the worker started ends with the worker, in a
session of its own or not: orphans become the guardian's children (Linux). If the guardian itself is killed, the kernel
kills the worker. Before it ends it writes one line of JSON to CONTROL: `{"code": ...}` of a worker that ended by
itself, or `{"memory": bytes}`. A log that grows too long loses its beginning, never its end or its order, whoever
writes meanwhile.

Standard library alone, and little of it: each worker has one.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pickle
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

LENGTH = struct.Struct("!Q")  # before each message to the worker
_TICK_S = 0.1  # how often memory, log and parent are looked at
_SWEEP_S = 5.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_COLLAPSE_RANGE = 0x08  # of fallocate(2)
_LEFT_OUT = b"(what was written before is left out)\n"


def main(channel: int, control: int, parent: int, memory_bytes: int, log_bytes: int) -> None:
    """Does not return.

    Args:
        channel: descriptor of the worker's end of its socket.
        control: descriptor of the guardian's end of its own.
        parent: process id of what started this one, and has to live.
        memory_bytes: most memory of the worker with all it started; 0 for any.
        log_bytes: size at which standard output, where it is a file, loses its beginning.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to whole groups; the trainer decides
        signal.signal(number, ignore)  # not SIG_IGN, which the worker's own children would inherit
    adopt_orphans()
    guardian = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(control)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:  # it died in between
            os._exit(1)
        os.setsid()
        _become_worker(channel)
    os.close(channel)
    end = _watch(worker, control, parent, memory_bytes, log_bytes)
    _sweep(worker)
    with suppress(OSError):
        os.write(control, json.dumps(end).encode() + b"\n")
    os._exit(0)


def _become_worker(channel: int) -> None:
    code = 1
    try:
        with socket.socket(fileno=channel) as connection:
            setup = pickle.loads(read_message(connection))
            sys.path[:] = setup["sys_path"]
            importlib.import_module(setup["program"]).main(connection, setup)  # found by that path only
            code = 0
    except EOFError:  # the trainer left before the worker was ready
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # into the log
    finally:
        os._exit(code)


def read_message(connection: socket.socket) -> bytes:
    """The next message to the worker. Raises EOFError at the end."""
    (length,) = LENGTH.unpack(read_exactly(connection, LENGTH.size))
    return read_exactly(connection, length)


def read_exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes. Raises EOFError where there are fewer."""
    data = bytearray()
    while len(data) < count:
        more = connection.recv(min(count - len(data), 1 << 20))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


def _watch(worker: int, control: int, parent: int, memory_bytes: int, log_bytes: int) -> dict[str, Any]:
    """Until the worker has ended or has to; says which."""
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, ignore)
    waiting = select.poll()  # of any descriptor, those of a trainer that holds thousands too
    for one in (control, woken):
        waiting.register(one, select.POLLIN)
    while True:
        if (code := _reap(worker)) is not None:
            return {"code": code}
        if os.getppid() != parent:
            return {}
        if memory_bytes and (used := _memory(memory_bytes)) > memory_bytes:
            return {"memory": used}
        _bound_log(1, log_bytes)
        ready = [number for number, _ in waiting.poll(_TICK_S * 1000)]
        if control in ready:
            return {}
        if woken in ready:
            os.read(woken, 512)


def _reap(worker: int) -> int | None:
    """Takes leave of children that have ended; the exit code where the worker is one of them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _sweep(worker: int) -> None:
    """Kills everything below this process, until nothing is left or is not to be killed."""
    ends = time.monotonic() + _SWEEP_S
    with suppress(OSError):  # where orphans are not ours
        os.killpg(worker, signal.SIGKILL)
    while time.monotonic() < ends:
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def descendants(pid: int) -> Iterator[int]:
    """Children, theirs and so on."""
    left = [pid]
    while left:  # no recursion: a chain of processes may be longer than that goes deep
        found = list(children(left.pop()))
        yield from found
        left += found


def children(pid: int) -> Iterator[int]:
    """Of all threads of a process. Nothing where /proc does not tell."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                yield from map(int, file.read().split())
        except OSError:
            continue


def _memory(limit: int) -> int:
    """Bytes that the worker and what it started hold; exact where they are near the limit."""
    pids = list(descendants(os.getpid()))
    used = sum(resident(pid) for pid in pids)
    if used > limit and len(pids) > 1:  # what forks share is counted in each of them
        return sum(_proportional(pid) for pid in pids)
    return used


def resident(pid: int | str) -> int:
    """Bytes of a process in memory, shared ones included; 0 where it is gone or the system does not tell."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return resident(pid)


def _bound_log(log: int, log_bytes: int) -> None:
    """Takes the beginning away from the file of descriptor `log`, to which others append meanwhile."""
    with suppress(OSError):  # no file, or a full disk
        found = os.fstat(log)
        if found.st_size <= log_bytes or not stat.S_ISREG(found.st_mode):
            return
        file = os.open(f"/dev/fd/{log}", os.O_RDWR)  # what appends writes at the end only
        try:
            begin = found.st_size - log_bytes // 2
            if _collapse(log, begin - begin % found.st_blksize):
                os.pwrite(file, _LEFT_OUT, 0)
            else:
                _move_to_front(file, begin)
        finally:
            os.close(file)


def _collapse(log: int, count: int) -> bool:
    """Takes `count` bytes, whole blocks, off the file's beginning, in one step between two writes of others. False
    where system or file system cannot (ext4 and XFS can)."""
    if sys.platform != "linux":
        return False
    collapse = ctypes.CDLL(None).fallocate
    return bool(collapse(log, _COLLAPSE_RANGE, ctypes.c_int64(0), ctypes.c_int64(count)) == 0)


def _move_to_front(file: int, begin: int) -> None:
    """The same by copying what stands behind `begin`: what others write between the last two calls is lost."""
    end = os.pwrite(file, _LEFT_OUT, 0)
    for _ in range(64):  # what has come since, but no race with one that writes without end
        more = os.pread(file, 1 << 20, begin)
        if not more:
            break
        begin += len(more)
        end += os.pwrite(file, more, end)
    os.ftruncate(file, end)


def ignore(number: int, frame: object) -> None:
    pass


def adopt_orphans() -> None:
    """What is left without a parent below this process becomes its child."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(what: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(what, value, 0, 0, 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
