"""A call made from a process that others may end at any time: a task of another system's, on another machine.

    that process -> relay (this program) -> guardian -> worker -> what it starts

Promises: however that process ends, by SIGKILL or after somebody has killed its children, all that the call started
ends on this machine: the relay's input closes with that process, and the guardian ends everything when the relay is
gone. That process imports nothing foreign and unpickles nothing. Arguments come over a pipe: they stand in no command
line, and in no environment but the call's own. What a call prints is on this machine until it ends; where its relay was
killed, until another one begins a minute later or more. Standard library alone, until the relay makes the call.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pickle
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("!Q")
_POLL_S = 0.1  # how soon an interrupt is noticed: Python's own wakes no wait
_ASK_S = 10.0  # a busy run answers late; where none does, a call's deadline is late by as much
_END_S = 18.0  # a question under way, and then the guardian's own bound
_SCRATCH, _LOCK = "arborist_call_", "lock"
_YOUNG_S = 60.0  # a folder may be there before its lock


def relayed(setup: Mapping[str, Any]) -> dict[str, Any]:
    """Makes one call. Interrupted (KeyboardInterrupt), it ends the call and says so.

    Args:
        setup: "functions", of `pickled_functions`; "job", of `pickled_call`; "seconds" it may run, or None;
            "memory_mb", "workers" and "keep_environment", see `ProcessCalls`; "folder" to run in, None for this one;
            "held", None or the url and key of a `Held` and what it said when the call was made; it is asked when the
            seconds begin and when they are over.

    Returns:
        "status": "ok", "failed", "deadline", "cancelled" or "lost" (somebody kills what this process has started);
        "content": the result, or why there is none; "printed": what a call without a result has printed.
    """
    try:
        relay = subprocess.Popen(
            [sys.executable, __file__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=setup["folder"],
            start_new_session=True,  # signals of this process's group are not for the relay
        )
    except OSError as error:
        return {"status": "failed", "content": f"cannot be started in {setup['folder']}: {error}", "printed": ""}
    assert relay.stdin is not None and relay.stdout is not None
    message = pickle.dumps({**setup, "sys_path": list(sys.path)})
    left = memoryview(_LENGTH.pack(len(message)) + message)
    received, is_interrupted = bytearray(), False
    try:
        with suppress(BrokenPipeError):
            while left:
                left = left[os.write(relay.stdin.fileno(), left) :]
        _read(relay.stdout.fileno(), received)
    except KeyboardInterrupt:
        is_interrupted = True
        relay.stdin.close()  # so the relay ends the call
        _read(relay.stdout.fileno(), received, _END_S)
    finally:
        relay.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            relay.wait(1.0)
        relay.kill()
        code = relay.wait()
        relay.stdout.close()
    with suppress(ValueError):  # nothing, or half an object, of a relay that was killed
        found: dict[str, Any] = json.loads(received)
        return found
    if is_interrupted:
        return {"status": "cancelled", "content": "was cancelled", "printed": ""}
    # Nothing foreign runs in the relay, so nothing of the call has killed it: this process is being ended.
    status, how = ("lost", "was killed") if code < 0 else ("failed", f"exited with code {code}")
    return {"status": status, "content": f"has lost its relay, which {how}", "printed": ""}


def _read(stream: int, received: bytearray, seconds: float | None = None) -> None:
    """Until its end, or for so long."""
    ends = None if seconds is None else time.monotonic() + seconds
    while ends is None or time.monotonic() < ends:
        if select.select([stream], [], [], _POLL_S)[0]:
            if not (more := os.read(stream, 1 << 16)):
                return
            received += more


def main() -> None:
    """The relay: reads a setup, makes its call, says what became of it."""
    head = sys.stdin.buffer.read(_LENGTH.size)
    message = sys.stdin.buffer.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
    if not message or len(message) < _LENGTH.unpack(head)[0]:  # whoever asked has ended
        return
    setup = pickle.loads(message)
    sys.path[:] = setup["sys_path"]
    with _scratch() as folder:
        found = asyncio.run(_called(setup, folder))
    with suppress(BrokenPipeError):  # nobody waits for it any more
        sys.stdout.write(json.dumps(found))
        sys.stdout.flush()


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder of this relay's own, locked while it lives. Those of relays that were killed are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # locked, gone, or somebody else's
            if time.time() - left.lstat().st_mtime > _YOUNG_S:
                with open(left / _LOCK, "r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH) as folder, open(Path(folder, _LOCK), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(folder)


async def _called(setup: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    from datamodules.processes.calls import CallFailed, DeadlinePassed, ProcessCalls  # found by the setup's path only

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def leave() -> None:  # nothing more is said on standard input: it has been closed
        loop.remove_reader(0)
        task.cancel()

    calls = ProcessCalls(setup["functions"], setup["workers"], setup["memory_mb"], setup["keep_environment"], once=True)
    calls.logs = folder
    output = folder / "output"
    held = None if setup.get("held") is None else _Asked(*setup["held"])
    loop.add_reader(0, leave)
    try:
        content = await calls.call_pickled(setup["job"], setup["seconds"], output, held)
        return {"status": "ok", "content": content, "printed": ""}
    except DeadlinePassed as error:
        status, why = "deadline", str(error)
    except CallFailed as error:
        status, why = "failed", str(error)
    except asyncio.CancelledError:
        status, why = "cancelled", "was cancelled"
    finally:
        loop.remove_reader(0)
        calls.stop()
    printed = output.read_text("utf-8", "replace") if output.exists() else ""
    return {"status": status, "content": why, "printed": printed}


class _Asked:
    """A `Held` of another machine. Where nobody answers as one should, no more is known than was said last."""

    def __init__(self, url: str, key: str, held_s: float) -> None:
        self._request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the key is for this one
        self._last_s = held_s

    def __call__(self) -> float:
        unknown = suppress(OSError, HTTPException, ValueError, KeyError, TypeError)
        with unknown, self._opener.open(self._request, timeout=_ASK_S) as said:
            self._last_s = float(json.load(said)["held_s"])
        return self._last_s


if __name__ == "__main__":
    main()
