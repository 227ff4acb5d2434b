"""Two real SGLang servers on CPU that outlive the runs that use them, and ways to hurt one.

Promises: a server that ended is started again at its address (as `arborist serve` does); frozen ones go on when the
context ends; `close` leaves no process, port or shared memory behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from datamodules.inference.sglang.launcher import ServerDidNotStart, ServerOptions, ServerProcess
from datamodules.inference.sglang.server import leftovers

START_S = 400.0
_PROCESS_POLL_S = 0.2
_log = logging.getLogger(__name__)


class Servers:
    """Servers of one model, to be given to engines as `urls`.

    Args:
        model_path: directory written by `save_pretrained`.
        context: most tokens of a request.
        logs: directory for their logs.
        count: how many.
        changes: further fields of `ServerOptions`.
    """

    def __init__(self, model_path: Path, context: int, logs: Path, count: int = 2, **changes: object) -> None:
        settings = {"context": context, "max_running_requests": 64, "kv_cache_tokens": 16384, "num_threads": 1}
        options = ServerOptions(str(model_path), dtype="float32", **(settings | changes))  # type: ignore[arg-type]
        self.processes = [ServerProcess(options, logs / f"server_{index}.log") for index in range(count)]
        self._closing = threading.Event()
        self._supervisors: list[threading.Thread] = []

    def start(self) -> Servers:
        """Returns when all are up. Raises ServerDidNotStart."""

        async def up() -> None:
            await asyncio.gather(*(process.ready(START_S) for process in self.processes))

        try:
            asyncio.run(up())
        except BaseException:
            self.close()
            raise
        for process in self.processes:  # from now on always there
            process.options = replace(process.options, port=process.port)
            self._supervisors.append(threading.Thread(target=self._supervise, args=(process,), daemon=True))
            self._supervisors[-1].start()
        return self

    @property
    def urls(self) -> list[str]:
        return [process.url for process in self.processes]

    def kill(self, index: int) -> None:
        """kill -9 of the server's main process."""
        os.kill(self._group(index), signal.SIGKILL)

    def _supervise(self, process: ServerProcess) -> None:
        """Starts it again where it was, whenever it has ended."""
        while not self._closing.wait(_PROCESS_POLL_S):
            if not process.running:
                process.stop(0.0)
                try:
                    asyncio.run(process.ready(START_S))
                except ServerDidNotStart as error:
                    _log.error("%s", error)

    @contextmanager
    def frozen(self, index: int) -> Iterator[None]:
        """It keeps its connections, accepts new ones and never answers."""
        members = leftovers.members(self._group(index))
        try:
            _signal(members, signal.SIGSTOP)
            yield
        finally:
            _signal(members, signal.SIGCONT)

    def slow_down(self, index: int, seconds: float, factor: int = 10, period_s: float = 0.1) -> None:
        """For `seconds` it runs one part in `factor` of the time."""
        members = leftovers.members(self._group(index))
        ends = time.monotonic() + seconds
        try:
            while time.monotonic() < ends:
                _signal(members, signal.SIGSTOP)
                time.sleep(period_s * (factor - 1) / factor)
                _signal(members, signal.SIGCONT)
                time.sleep(period_s / factor)
        finally:
            _signal(members, signal.SIGCONT)

    @contextmanager
    def without_files(self, index: int) -> Iterator[None]:
        """The process that loads its weights can open no file. SGLang 0.5.21 ends when it has to load some then."""
        main = psutil.Process(self._group(index))
        loaders = [child for child in main.children(recursive=True) if "schedul" in " ".join(child.cmdline())]
        assert loaders, f"no scheduler among {[child.cmdline() for child in main.children(recursive=True)]}"
        before = {child.pid: resource.prlimit(child.pid, resource.RLIMIT_NOFILE) for child in loaders}
        try:
            for pid, (_, hard) in before.items():
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
            yield
        finally:
            for pid, limits in before.items():
                with suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    def close(self) -> None:
        self._closing.set()
        for thread in self._supervisors:
            thread.join(START_S)
        for process in self.processes:
            process.stop(0.0)

    def _group(self, index: int) -> int:
        pid = self.processes[index].pid
        assert pid is not None
        return pid


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
