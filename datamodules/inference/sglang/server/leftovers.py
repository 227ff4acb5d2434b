"""Ends a group of processes and removes what it left in shared memory. Standard library only: both sides import it.

A server that is killed cannot clean up after itself, and its files in /dev/shm carry no process id in their names;
so they are read off the open files and mappings of its processes while those live. Semaphores cannot be found that way:
Python's resource tracker removes them when the last process that used them is gone, so it is spared.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

# What SGLang and Python's multiprocessing make there. Other libraries' files may be shared with other processes.
_OURS = ("sglang_", "sgl_shm_", "psm_", "multi_tokenizer_args_")
_TRACKER = b"multiprocessing.resource_tracker"


def members(group: int) -> list[int]:
    """Ids of the living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if os.getpgid(int(entry.name)) == group and not _is_zombie(entry):
                    found.append(int(entry.name))
    return found


def shared_memory(group: int) -> set[Path]:
    """Files in /dev/shm, of the kinds a server makes, that processes of the group have open or mapped."""
    found: set[str] = set()
    for pid in members(group):
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    found.add(os.readlink(descriptor))
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found.update(line.split(maxsplit=5)[-1].strip() for line in maps)
    return {Path(name) for name in found if name.startswith(tuple(f"/dev/shm/{kind}" for kind in _OURS))}


def kill(group: int, *, spare: int = -1, trackers: bool = False) -> None:
    """SIGKILL for every process of the group but `spare`; resource trackers, which end by themselves, on request."""
    for pid in members(group):
        with suppress(OSError):
            if pid != spare:
                is_tracker = _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
                os.kill(pid, signal.SIGCONT if is_tracker and not trackers else signal.SIGKILL)


def remove(files: set[Path]) -> None:
    for file in files:
        with suppress(OSError):
            file.unlink()


def _is_zombie(process: Path) -> bool:
    # The command name, in parentheses, may hold anything; the state comes after the last one.
    return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
