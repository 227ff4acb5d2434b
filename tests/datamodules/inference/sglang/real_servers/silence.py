"""A server that neither answers nor breaks its connections, for a while."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """All processes of a server are stopped by a signal, as by a machine that swaps; afterwards they go on."""
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    try:
        for process in tree:
            os.kill(process.pid, signal.SIGSTOP)
        yield
    finally:
        for process in tree:
            os.kill(process.pid, signal.SIGCONT)
