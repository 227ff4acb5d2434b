"""The directory of a run: chosen, made, and locked before anything in it is touched.

Promises: a launch without `--run_dir` gets a fresh `runs/<name>/<time>`; one directory has one run at a time, held by
a lock on `.lock` that the system frees when its process ends, however it ends; what cannot be used is refused in one
line that names the path and the remedy, before anything in the directory is changed. New directories are for their
owner alone (0700): samples and configurations may not be for every user of a shared machine.

The lock is `flock`. On NFS it reaches other hosts where the server keeps locks (Linux since 2.6.12, unless mounted with
`nolock` or `local_lock=flock`: then each host has locks of its own). A file system without locks gets a warning.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

LOCK_FILE = ".lock"
_FOR_ITS_OWNER = 0o700

# What a full, read-only or failing disk says, and what is meant to be done about it.
_DISK_TROUBLE = {
    errno.ENOSPC: "free space there, or choose another disk",
    errno.EDQUOT: "free space there, or ask for a larger quota",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "choose a directory that can be written",
    errno.EACCES: "choose a directory that you may write",
    errno.EPERM: "choose a directory that you may write",
    errno.EIO: "look at the disk's health (dmesg)",
    errno.ESTALE: "look at the network file system",
    errno.ENAMETOOLONG: "choose a shorter path",
}
_IN_THE_WAY = (FileExistsError, NotADirectoryError, IsADirectoryError)


class RunDirectoryError(RuntimeError):
    """A run directory cannot be used; the message names path and remedy."""


class RunDirectory:
    """A directory that this process alone writes a run into, until `close`.

    Args:
        path: made if need be, for its owner alone.

    Raises:
        RunDirectoryError: it cannot be made or written, or another process has a run in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir(mode=_FOR_ITS_OWNER, exist_ok=True)
            self._handle = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise RunDirectoryError(f"run_dir: {_what_is_wrong(error, path)}") from error
        try:
            self._lock()
        except BaseException:
            self.close()
            raise

    def holds_a_run(self) -> bool:
        """Whether a run was configured here before."""
        return (self.path / "config.yaml").exists()

    def close(self) -> None:
        """Frees the lock. The file stays: removing it would let two processes lock two files of that name."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(
                f"run_dir: {self.path} is in use by {self._holder()}; wait for that run, end it, or name another"
                " directory"
            ) from None
        except OSError as error:
            warnings.warn(
                f"run_dir: {self.path} cannot be locked ({error.strerror}): nothing keeps a second run out of it",
                stacklevel=2,
            )
            return
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": now}
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, (json.dumps(holder) + "\n").encode(), 0)
        except OSError as error:
            raise RunDirectoryError(f"run_dir: {_what_is_wrong(error, self.path / LOCK_FILE)}") from error

    def _holder(self) -> str:
        for _ in range(10):  # who has the lock may be about to write its name
            try:
                holder = json.loads(os.pread(self._handle, 4096, 0))
                return f"process {holder['pid']} on host {holder['host']}, since {holder['started']}"
            except (OSError, ValueError, LookupError, TypeError):
                time.sleep(0.05)
        return "another process"


def name_of(directory: Path) -> str:
    """<name> of runs/<name>/<time>, as `fresh` makes them; of another directory what it is called."""
    return directory.parent.name if directory.parent.parent.name == "runs" else directory.name


def run_of(checkpoint: Path) -> Path:
    """The run directory that a checkpoint is in: two above it, or further where its file name makes folders
    (`{val/accuracy:.3f}` does)."""
    above = checkpoint.absolute().parent.parent
    return next((one for one in (above, *above.parents[:2]) if (one / "config.yaml").is_file()), above)


def fresh(name: str) -> RunDirectory:
    """runs/<name>/<time>; two launches in one second get different ones. Raises as `RunDirectory`."""
    time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for attempt in range(1000):
        path = Path("runs") / name / (f"{time}_{attempt}" if attempt else time)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=_FOR_ITS_OWNER)
        except FileExistsError:
            if path.is_dir():
                continue
            raise RunDirectoryError(f"run_dir: {path.parent} cannot be made, a file is in the way") from None
        except OSError as error:
            raise RunDirectoryError(f"run_dir: {_what_is_wrong(error, path)}") from error
        return RunDirectory(path)
    raise RunDirectoryError(f"runs/{name}: a thousand runs started in one second; name them with run_dir")


def disk_trouble(error: BaseException) -> str | None:
    """What to tell a user whose disk refused something, in one line; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _DISK_TROUBLE:
        return None
    return _what_is_wrong(error, None)


@contextmanager
def naming(path: Path, option: str = "") -> Iterator[None]:
    """Around writing `path`: trouble with the disk is an error that names it; and the `option` that chooses it, where
    the trouble is there, and not with something that is read meanwhile. With an option, so is what is in the way."""
    try:
        yield
    except OSError as error:
        known = disk_trouble(error) is not None or (option and isinstance(error, _IN_THE_WAY))
        if not known or (option and not _is_of(error.filename, path.absolute())):
            raise
        raise RunDirectoryError((f"{option}: " if option else "") + _what_is_wrong(error, path)) from error


def _is_of(filename: str | None, path: Path) -> bool:
    """Whether a file that the system names is `path`, in or above it, or what is made beside it to take its place."""
    if filename is None:
        return True
    place = Path(filename).absolute()
    if path.is_relative_to(place):
        return True
    return place.is_relative_to(path.parent) and path.name in place.relative_to(path.parent).parts[0]


def _what_is_wrong(error: Exception, path: Path | None) -> str:
    if not isinstance(error, OSError):
        return f"{str(path)!r}: {error}; name another directory"
    place = path if path is not None else error.filename if error.filename is not None else "a file of the run"
    if isinstance(error, IsADirectoryError):
        return f"{place} is a directory; name a file"
    if isinstance(error, _IN_THE_WAY):
        return f"{place} cannot be made, a file is in the way; name another directory"
    return f"{place}: {error.strerror}; {_DISK_TROUBLE.get(error.errno or 0, 'name another directory')}"
