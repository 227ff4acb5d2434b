"""What this process and those it started have open: so that what a run leaves behind can be named.

Only what our own processes were seen with counts: others work on the machine too. Ports are looked at for processes
that are to be killed only: one that lives on keeps the listeners of its process groups.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

_PATIENCE_S = 20.0


class Traces:
    """Look before a run, call `see` during it, and ask `left` after it.

    Args:
        stays: process ids that stay (servers), with their children; asked again at every look.
        root: a process of ours that is about to be killed, to be seen now with all it has; None looks at this one.
    """

    def __init__(self, stays: Callable[[], set[int]], root: int | None = None) -> None:
        self._root = psutil.Process(root or os.getpid())
        self._stays = stays
        self._seen_processes: dict[int, psutil.Process] = {}
        self._seen_files: set[str] = set()
        self._seen_ports: set[int] = set()
        self._before = set() if root else {process.pid for process in self._processes()}
        self._watches_ports = root is not None
        if root:
            self.see()

    def see(self) -> None:
        """Remembers processes and shared memory that there are now."""
        for process in self._processes():
            if process.pid in self._before:  # another run's, or a test's server
                continue
            self._seen_processes[process.pid] = process
            self._seen_files |= _shared_memory(process.pid)
        if self._watches_ports:
            self._seen_ports |= self._listening()

    def left(self) -> list[str]:
        """What is still there after a while, in words."""
        ends = time.monotonic() + _PATIENCE_S
        while (found := self._left()) and time.monotonic() < ends:
            time.sleep(0.2)
        return found

    def _left(self) -> list[str]:
        alive = {process.pid: process for process in self._processes() if process.pid not in self._before}
        alive |= {pid: one for pid, one in self._seen_processes.items() if _runs(one) and not self._is_to_stay(one)}
        found = [f"process {pid}: {_name(process)}" for pid, process in alive.items()]
        found += [f"port {port}" for port in sorted(self._seen_ports) if _listens(port)]
        held = {file for pid in self._stays() for file in _shared_memory(pid)} | _shared_memory(os.getpid())
        return found + [f"file {file}" for file in sorted(self._seen_files - held) if Path(file).exists()]

    def _processes(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            for child in self._root.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if not self._is_to_stay(child) and not _is_helper(child) and _runs(child):
                        found.append(child)
        return found

    def _is_to_stay(self, process: psutil.Process) -> bool:
        """Asked again of those seen before: a server is there a moment before it is known as one."""
        with suppress(psutil.NoSuchProcess):
            return bool(self._stays() & {process.pid, *(parent.pid for parent in process.parents())})
        return False

    def _listening(self) -> set[int]:
        with suppress(psutil.NoSuchProcess):
            return {c.laddr.port for c in self._root.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        return set()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _is_helper(process: psutil.Process) -> bool:
    """Python's own fork server and resource tracker last as long as the process that uses them."""
    line = " ".join(process.cmdline())
    return "multiprocessing.forkserver" in line or "resource_tracker" in line


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _name(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())[:120]
    return "(gone by now)"


def _shared_memory(pid: int) -> set[str]:
    found: set[str] = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(descriptor))
    with suppress(OSError):
        found |= {line.split(maxsplit=5)[-1].strip() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return {file for file in found if file.startswith("/dev/shm/") and "(deleted)" not in file}
