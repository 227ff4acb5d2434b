"""Commands of others in a worker process. Cheap to import: worker processes do it.

Promises: no shell takes part; the command reads what it is given from standard input, and what it prints goes where
the worker's own output goes; what it leaves running in its process group ends with it, and the rest with the worker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

_MOST_ANSWER = 1 << 16  # bytes of the output's end, in which the last line is looked for
_READ_ON_S = 2.0


def run_command(variables: Mapping[str, str], words: Sequence[str], given: str) -> str:
    """The last line of standard output with something in it, "" for none.

    Args:
        variables: of its environment, beside this process's.
        words: the program, which is looked for as a shell does, and its arguments.
        given: its standard input.

    Raises:
        OSError, ValueError: it cannot be started.
        RuntimeError: its exit code is not 0.
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
    last = _LastLine(process.stdout)
    reader = threading.Thread(target=last.read, daemon=True, name="stdout")
    reader.start()
    code = process.wait()  # not the end of its output, which may be held open by what it has left running
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    reader.join(_READ_ON_S)
    if code:
        how = f"exited with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
        raise RuntimeError(f"{words[0]} {how}")
    return last.text()


class _LastLine:
    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._end = b""

    def read(self) -> None:
        out = sys.stdout.fileno()
        while chunk := os.read(self._stream.fileno(), 1 << 16):
            with suppress(OSError):  # a full disk
                os.write(out, chunk)
            self._end = (self._end + chunk)[-_MOST_ANSWER:]

    def text(self) -> str:
        lines = self._end.decode("utf-8", "replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
