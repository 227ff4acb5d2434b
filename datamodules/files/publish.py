"""Files that appear whole, under names that nobody else has taken.

Promises: of several processes that publish under one name, one succeeds and the others are told; nothing is
overwritten; a name stands for a whole file or for none, whatever the disk refuses.

A file system without hard links has no call that does so. There a lock beside it, `NAME.lock`, is made by whoever looks
whether the name is free and takes it. One that a killed process left is never broken, since it looks like one that
another machine holds: whoever wants that name waits for `held_s` and is told to delete it.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_HELD_S = 10.0  # a lock is held for two calls of the file system
_LOOK_S = 0.01


def aside_of(path: Path) -> Path:
    """Where to write it first; of this process alone."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")


def open_as_others(paths: Iterable[Path]) -> None:
    """Gives files the mode of any new file in their directory (the process's umask decides), so that whoever may read
    the others (a server or colleague of another name) may read them. safetensors 0.8 keeps its files to their owner."""
    for path in paths:
        other = aside_of(path)
        other.touch()
        mode = other.stat().st_mode
        other.unlink()
        path.chmod(mode & 0o777)


def publish(aside: Path, path: Path, held_s: float = _HELD_S) -> None:
    """Gives a whole file its name.

    Args:
        aside: the file.
        path: its name from now on, in the same directory.
        held_s: seconds to wait for another process that is publishing under this name, without hard links.

    Raises:
        FileExistsError: another file has it.
        OSError: the disk refuses it, or the lock stays.
    """
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:
        _publish_locked(aside, path, held_s)
    else:
        aside.unlink()


def _publish_locked(aside: Path, path: Path, held_s: float) -> None:
    lock, ends = path.with_name(f"{path.name}.lock"), time.monotonic() + held_s
    while True:
        _raise_if_taken(path)
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if time.monotonic() >= ends:
                why = f"{lock.name} is there; delete it if no other process writes there, for one was killed as it did"
                raise OSError(errno.EBUSY, why, str(lock)) from None
        time.sleep(_LOOK_S)
    try:
        _raise_if_taken(path)  # since it was looked for last
        os.replace(aside, path)
    finally:
        with suppress(OSError):  # why the file has no name is told instead; once it has it, nobody looks for the lock
            lock.unlink()


def _raise_if_taken(path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
