"""Commands of others in a worker process. Cheap to import: worker processes do it.

Promises: no shell takes part; the command reads what it is given from standard input, and what it prints goes where
the worker's own output goes; what it leaves running in its process group ends with it, and the rest with the worker.
Its answer is what it printed itself, whole, or an error: nothing that was printed after its end is part of it.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from datamodules.processes.worker import NotAnAnswer

_MOST_ANSWER = 1 << 20  # bytes of the output's end, in which the last line is looked for
_CHUNK = 1 << 16


def run_command(variables: Mapping[str, str], words: Sequence[str], given: str) -> str:
    """The last line of standard output with something in it, "" for none; lines end with a newline or a carriage
    return, and with nothing else.

    Args:
        variables: of its environment, beside this process's.
        words: the program, which is looked for as a shell does, and its arguments.
        given: its standard input.

    Raises:
        OSError, ValueError: it cannot be started.
        NotAnAnswer: its exit code is not 0, or its last line has more than 1 MB.
    """
    with tempfile.TemporaryFile() as stdin:
        stdin.write(given.encode("utf-8", "replace"))
        stdin.seek(0)
        process = subprocess.Popen(
            list(words),
            stdin=stdin,
            stdout=subprocess.PIPE,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout:
        printed = _printed(process, process.stdout.fileno())
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    if code := process.returncode:
        how = f"exited with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
        raise NotAnAnswer(how, "exception")
    lines = re.split(r"[\r\n]", printed.decode("utf-8", "replace"))
    if len(printed) > _MOST_ANSWER:
        del lines[0]  # whose beginning may be missing
        if not any(line.strip() for line in lines):
            raise NotAnAnswer("printed a last line of more than 1 MB, its answer; print a shorter one", "exception")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _printed(process: subprocess.Popen[bytes], stream: int) -> bytearray:
    """Waits for the command's end; of what it has printed until then, at least the last `_MOST_ANSWER` bytes, and more
    of them only where there was more. Not until the end of its output, which what it has left running may hold open.
    """
    printed = bytearray()

    def read(most: int) -> int:
        chunk = os.read(stream, most)
        with suppress(OSError):  # a full disk
            os.write(sys.stdout.fileno(), chunk)
        printed.extend(chunk)
        if len(printed) > 2 * _MOST_ANSWER:
            del printed[: -_MOST_ANSWER - 1]
        return len(chunk)

    ended, ends = os.pipe()

    def wait() -> None:
        process.wait()
        os.close(ends)

    waiter = threading.Thread(target=wait, daemon=True, name="command")
    waiter.start()
    while ended not in (ready := select.select([stream, ended], [], [])[0]) and read(_CHUNK):
        pass
    left = 0
    if ended in ready:  # what the pipe holds now was printed before
        left = int.from_bytes(fcntl.ioctl(stream, termios.FIONREAD, bytes(4)), sys.byteorder)
    while left > 0 and (count := read(min(left, _CHUNK))):
        left -= count
    waiter.join()
    os.close(ended)
    return printed
