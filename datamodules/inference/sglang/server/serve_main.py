"""Runs in the server's own environment: `python serve_main.py LIFELINE [SGLang's arguments ...]`.

LIFELINE is the number of an inherited pipe whose other end the launcher holds. When the launcher ends, however it
ends, the pipe closes and this process takes its whole process group and their shared memory down with it.

Imports of this project are out of reach here, sglang's and torch's in the launcher. The API key comes in the
environment, where other users' `ps` cannot see it, and is blotted out of every log record (sglang logs its arguments)
and of whatever Python code prints or a traceback shows.
Everything at module level also runs in the processes sglang spawns: they import the main module again.
"""

from __future__ import annotations

import logging
import os
import runpy
import shutil
import signal
import sys
import threading
from typing import Any

import leftovers

KEY = "ARBORIST_SGLANG_API_KEY"

if os.environ.get("ARBORIST_SGLANG_DEVICE") == "cpu":
    import cpu_shims

    cpu_shims.install()


class _Blotted:
    """A text stream that never writes `key`."""

    def __init__(self, stream: Any, key: str) -> None:
        self._stream, self._key = stream, key

    def write(self, text: str) -> int:
        self._stream.write(text.replace(self._key, "***"))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _blot_out(key: str) -> None:
    sys.stdout, sys.stderr = _Blotted(sys.stdout, key), _Blotted(sys.stderr, key)
    make = logging.getLogRecordFactory()

    def record(*args: Any, **options: Any) -> logging.LogRecord:
        made = make(*args, **options)
        if key in str(made.msg) or key in str(made.args):
            made.msg, made.args = made.getMessage().replace(key, "***"), ()
        return made

    logging.setLogRecordFactory(record)


def _die_with_launcher(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: returns at the end of the launcher
    me, group = os.getpid(), os.getpgrp()
    files = leftovers.shared_memory(group)
    leftovers.kill(group, spare=me)
    leftovers.remove(files)
    for directory in os.environ["ARBORIST_SGLANG_SCRATCH"].split(os.pathsep):  # made by the launcher, which is no more
        shutil.rmtree(directory, ignore_errors=True)
    os.kill(me, signal.SIGKILL)


if key := os.environ.get(KEY):
    _blot_out(key)

if __name__ == "__main__":
    threading.Thread(target=_die_with_launcher, args=(int(sys.argv[1]),), daemon=True).start()
    sys.argv = ["sglang.launch_server", *sys.argv[2:], *(["--api-key", key] if key else [])]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
