"""Lets a run that hangs say where: `arborist doctor --dump PID`, or `kill -USR2 PID`, makes every thread's stack and
the tables of what is pending appear in `doctor/` of the run directory.

    doctor/rank0.HOST.PID.txt     what this rank was asked for so far

Two parts, because a hung process can do two kinds of things. The stacks are written by a signal handler in C, which
needs neither the main thread nor the interpreter lock. The rest (thread names, step, pending prompts, gate, asyncio
tasks) is added by a thread that waits for the first part to appear; it runs while the main thread is blocked in a
collective or any call that lets go of the lock.

Promises: nothing is computed until it is asked for; asking does not disturb the run (system calls are restarted, the
signal is one that Lightning leaves alone: on SLURM it takes USR1); each part that does not answer is named, after
seconds, and the others are written all the same.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from app import interruption
from callbacks.base import run_dir
from datamodules.inference.protocol import RolloutData

SIGNAL = getattr(signal, "SIGUSR2", None)
FOLDER = "doctor"
END = "== end of this rank's answer =="
_REQUEST_POLL_S = 0.2
_ANSWER_S = 3.0  # what one source of the report may take

Source = Callable[[], str]


def dump_path(directory: Path, rank: int) -> Path:
    """Where this process answers: rank, host and process id are in the name."""
    return directory.absolute() / FOLDER / f"rank{rank}.{socket.gethostname()}.{os.getpid()}.txt"


class Dumper:
    """Answers the signal, for the whole process, until `close`.

    Args:
        path: file that answers are appended to; its directory is made.
        rank: of this process, for the heading.
    """

    def __init__(self, path: Path, rank: int) -> None:
        assert SIGNAL is not None, "see install"
        self.path = path
        self.rank = rank
        self.sources: dict[str, Source] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        # Stays open: the handler in C writes to its descriptor. Without a buffer, so that nothing is left to be written
        # when it closes: the disk may be full.
        self._file = path.open("ab", buffering=0)
        self._closing = threading.Event()
        self._answered = self._size()  # before anybody can ask: what comes later is a question
        faulthandler.unregister(SIGNAL)  # a handler that others replaced would count as installed
        faulthandler.register(SIGNAL, file=self._file, all_threads=True, chain=False)
        self._thread = threading.Thread(target=self._run, name="hang-dump", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The signal means again what it meant before; an answer that was never asked for leaves no file."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(_ANSWER_S)
        assert SIGNAL is not None
        faulthandler.unregister(SIGNAL)
        self._file.close()
        with suppress(OSError):
            if self.path.stat().st_size == 0:
                self.path.unlink()
                self.path.parent.rmdir()  # when it is empty

    def _run(self) -> None:
        while not self._closing.wait(_REQUEST_POLL_S):
            try:
                self._look()
            except Exception as error:  # a full disk: the next question may find room
                self._answered = self._size()
                with suppress(OSError, ValueError):
                    sys.stderr.write(f"warning: {self.path} is not complete: {type(error).__name__}: {error}\n")

    def _look(self) -> None:
        size = self._size()
        if size == self._answered:
            return
        while True:  # until the handler has written all of it
            time.sleep(_REQUEST_POLL_S / 2)
            grown = self._size()
            if grown == size:
                break
            size = grown
        left = memoryview(self._report().encode(errors="backslashreplace"))
        while left:
            left = left[self._file.write(left) :]
        self._answered = self._size()

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _report(self) -> str:
        names = "".join(f"\n  0x{one.ident:016x} {one.name}" for one in threading.enumerate() if one.ident)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        parts = [f"\n== rank {self.rank}, pid {os.getpid()} on {socket.gethostname()}, {now} ==\nthreads:{names}"]
        for title, source in list(self.sources.items()):
            parts.append(f"{title}:\n{_indented(_bounded(source))}")
        return "\n".join([*parts, END, ""])


_current: Dumper | None = None


def install(directory: Path, rank: int) -> Dumper | None:
    """The dumper of this process, for this run directory; None where the platform has no such signal."""
    global _current
    if SIGNAL is None or not hasattr(faulthandler, "register"):
        return None
    path = dump_path(directory, rank)
    if _current is None or _current.path != path:
        if _current is not None:
            _current.close()
        _current = Dumper(path, rank)
    return _current


@atexit.register
@interruption.at_forced_end
def _at_exit() -> None:
    if _current is not None:
        _current.close()


class HangDump(Callback):
    """Answers `arborist doctor --dump PID` on every rank. The command line adds it to every run by itself."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        dumper = install(run_dir(trainer), trainer.global_rank)
        if dumper is None:
            return
        data: object = trainer.datamodule
        dumper.sources["trainer"] = lambda: _trainer(trainer, pl_module)
        if trainer.is_global_zero and isinstance(data, RolloutData):
            dumper.sources["rollouts"] = data.diagnose

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning gives signals their old meaning back right after this, and USR2's is to end the process: whoever
        # finds the answer's file open would send it.
        global _current
        if _current is not None:
            _current.close()
            _current = None


def _trainer(trainer: Trainer, module: Any) -> str:
    version = getattr(module, "policy_version", None)
    doing = ", ".join(one.value for one in (trainer.state.fn, trainer.state.stage) if one is not None)
    weights = "" if version is None else f", policy version {version}"
    return f"{doing}, rank {trainer.global_rank} of {trainer.world_size}, step {trainer.global_step}{weights}"


def _bounded(source: Source) -> str:
    """The source's answer, or why there is none: it may wait for a lock that the hung part of the run holds."""
    answer: list[str] = []

    def ask() -> None:
        try:
            answer.append(source())
        except Exception as error:
            answer.append(f"failed: {type(error).__name__}: {error}")

    asking = threading.Thread(target=ask, name="hang-dump-source", daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    return answer[0] if answer else f"no answer within {_ANSWER_S:g} s: it waits for something that the run holds"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
