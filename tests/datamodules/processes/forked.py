"""What is called in processes that tests fork: their imports are seen in there."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def seen(*names: str) -> dict[str, Any]:
    """What this process is and has."""
    return {
        "loaded": [name in sys.modules for name in names],
        "environment": {name: value for name, value in os.environ.items() if name != "ARBORIST_GUARDED"},
        "session": os.getsid(0) == os.getpid(),
        "guardian": Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[1].rpartition("/")[2],
        "handles": [str(signal.getsignal(one)) for one in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1)],
        "nice": os.nice(0),
        "open": sorted(os.readlink(f"/proc/self/fd/{one}").partition(":")[0] for one in _descriptors()),
        "inherited": [one for one in _descriptors() if one > 2 and os.get_inheritable(one)],
        "path": sys.path,
        "directory": os.getcwd(),
    }


def _descriptors() -> list[int]:
    listed = [int(one) for one in os.listdir("/proc/self/fd")]
    return [one for one in listed if os.path.lexists(f"/proc/self/fd/{one}")]


def drawn() -> list[float]:
    import numpy as np  # here, since other functions are called where it is not to be seen

    return [random.random(), float(np.random.rand())]


def terminates_a_child() -> int:
    """By which signal it ends, as those of multiprocessing's pools have to."""
    if (pid := os.fork()) == 0:
        time.sleep(1000)
    os.kill(pid, signal.SIGTERM)
    for _ in range(500):
        if (ended := os.waitpid(pid, os.WNOHANG))[0]:
            return os.WTERMSIG(ended[1])
        time.sleep(0.01)
    return 0


def loaded(*names: str) -> list[bool]:
    return [name in sys.modules for name in names]


def leaves_sleepers_and_kills(path: str, what: str) -> None:
    sleepers = [subprocess.Popen(["sleep", "1000"], start_new_session=True)]
    if (pid := os.fork()) == 0:
        os.setsid()
        time.sleep(1000)
    guardian = os.getppid()
    nursery = int(Path(f"/proc/{guardian}/stat").read_text().rpartition(")")[2].split()[1])
    Path(path).write_text(json.dumps([os.getpid(), pid, *(one.pid for one in sleepers)]))
    os.kill({"guardian": guardian, "nursery": nursery}[what], signal.SIGKILL)
    time.sleep(1000)


def takes(megabytes: int) -> int:
    return len(bytearray(os.urandom(1) * (megabytes * 10**6)))
