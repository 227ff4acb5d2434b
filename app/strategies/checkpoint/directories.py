"""Directories that appear, and go, in one step: what a checkpoint is on the disk while it is written or deleted.

Promises: `replace` and `delete` may be interrupted anywhere without leaving half of something under a good name; what
is hidden meanwhile (`.partial-*`, `.replaced-*`) carries the name of the process that works on it, and `clean` removes
only what no living process works on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import time
from pathlib import Path

import psutil

from app.strategies.machine import this_machine

_PROC = Path("/proc/self/stat").exists()
_CLOCKS_S = 5  # without /proc: by which a process's start, asked for again, differs where clocks are set meanwhile
_ABANDONED = 3600.0  # seconds without a write after which what another machine began counts as left


def this_process() -> str:
    """Machine, process and when it started, as a part of a file's name."""
    return f"{_machine()}-{os.getpid()}-{_started(os.getpid())}"


def hidden(path: Path, role: str, process: str) -> Path:
    """A hidden name in the same directory. It does not contain the path's own: Lightning looks for checkpoints by
    parts of names."""
    return path.parent / f".{role}-{hashlib.sha256(path.name.encode()).hexdigest()[:12]}-{process}"


def clean(directory: Path, process: str) -> None:
    """Removes what `process`, or one that lives no more, left hidden here. Of another machine's, an older version's, or
    what was begun before this machine last started, only its age can be known."""
    for left in (*directory.glob(".partial-*"), *directory.glob(".replaced-*")):
        *_, machine, number, started = ["", "", "", *left.name.split("-")]
        if left.name.endswith(f"-{process}"):
            gone = True
        elif machine == _machine() and number.isdigit() and re.fullmatch(r"t\d+" if _PROC else r"\d+", started):
            gone = not _lives(int(number), started)
        else:
            gone = time.time() - _last_write(left) > _ABANDONED
        if gone:
            shutil.rmtree(left, ignore_errors=True)


def replace(new: Path, path: Path, process: str) -> None:
    """`new` becomes `path`, and whatever was there is gone afterwards; at no time is there nothing."""
    if os.path.lexists(path):
        if _exchange(new, path):
            delete(new, process)
        else:  # a file system without atomic exchange: an interruption here leaves the old one under its hidden name
            old = hidden(path, "replaced", process)
            delete(old, process)
            path.rename(old)
            new.rename(path)
            delete(old, process)
    else:
        new.rename(path)
    sync_directory(path.parent)


def delete(path: Path, process: str) -> None:
    """Removes a file, a link or a directory, if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        # Renamed first: a deletion that is cut off must not leave half a checkpoint under a good name.
        if not path.name.startswith("."):
            doomed = hidden(path, "replaced", process)
            delete(doomed, process)
            path = path.rename(doomed)
        shutil.rmtree(path)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file and waits for the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Waits until the disk has the names in a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _machine() -> str:
    return hashlib.sha256(this_machine().encode()).hexdigest()[:8]


def _lives(pid: int, started: str) -> bool:
    """Whether this very process is there: a number given again later is another one."""
    try:
        now = _started(pid)
    except (OSError, psutil.Error):
        return False
    return now == started or (not _PROC and abs(int(now) - int(started)) <= _CLOCKS_S)


def _started(pid: int) -> str:
    """When a process started: "t" and ticks since the machine did, which no clock that is set moves; where a system
    does not tell, seconds of the clock."""
    if _PROC:
        behind_its_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
        return f"t{int(behind_its_name.split()[19])}"  # field 22
    return str(round(psutil.Process(pid).create_time()))


def _last_write(path: Path) -> float:
    times = [0.0]
    for file in (path, *path.glob("*")):
        try:
            times.append(file.lstat().st_mtime)
        except OSError:  # its writer has just renamed it
            return time.time()
    return max(times)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two directory entries in one step, where the system can (Linux's renameat2)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_working_directory, exchange = -100, 2
    if rename is None:
        return False
    return rename(at_working_directory, bytes(first), at_working_directory, bytes(second), exchange) == 0
