"""One reward worker process, seen from the trainer: its end of the pipe, its memory, its end.

Promises: every wait has a deadline; `kill` ends the process and whatever it started, however it behaves.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from contextlib import suppress
from typing import Any

import psutil

from datamodules.rewards import worker

_WATCH_S = 0.1  # how often the memory of a working process is looked at


class OverMemory(RuntimeError):
    """A process holds more memory than it may."""


class WorkerProcess:
    """A process of the fork server that runs one reward.

    Args:
        pickled_reward: what it calls.
        memory_bytes: most resident memory it may have while it is waited for; None for no limit.
    """

    def __init__(self, pickled_reward: bytes, memory_bytes: int | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=worker.main, args=(theirs, pickled_reward), daemon=True, name="reward-worker"
        )
        self.process.start()
        theirs.close()
        self.answers = 0
        self._memory_bytes = memory_bytes

    async def receive(self, seconds: float) -> tuple[str, Any]:
        """The next message: its kind and its content.

        Raises:
            TimeoutError: none after `seconds`.
            OverMemory: the process holds too much memory.
            EOFError, OSError: the process is gone.
        """
        if not self.connection.poll():
            loop = asyncio.get_running_loop()
            readable = asyncio.Event()
            ends = loop.time() + seconds
            loop.add_reader(self.connection.fileno(), readable.set)
            try:
                while not readable.is_set():
                    left = ends - loop.time()
                    if left <= 0:
                        raise TimeoutError
                    self.check_memory()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(left if self._memory_bytes is None else min(left, _WATCH_S)):
                            await readable.wait()
            finally:
                loop.remove_reader(self.connection.fileno())
        message: tuple[str, Any] = self.connection.recv()
        return message

    def check_memory(self) -> None:
        """Raises OverMemory when the process holds more than it may."""
        if self._memory_bytes is None:
            return
        with suppress(psutil.Error):  # it is gone: the pipe says so
            used = psutil.Process(self.process.pid).memory_info().rss
            if used > self._memory_bytes:
                raise OverMemory(f"{used / 1e6:.0f} MB of {self._memory_bytes / 1e6:.0f} MB (reward_options.memory_mb)")

    def kill(self, is_gone: bool = False) -> str:
        """Ends the process and its children at once; says how it ended. `is_gone`: its end of the pipe is closed."""
        pid = self.process.pid
        assert pid is not None
        self.process.join(1.0 if is_gone else 0.0)  # lets its own exit code arrive
        own_code = self.process.exitcode
        with suppress(ProcessLookupError, PermissionError):  # not yet, or no longer, the head of a group
            os.killpg(pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(5.0)
        self.connection.close()
        return "was killed" if own_code is None else f"exited with code {own_code}"
