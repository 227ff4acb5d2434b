"""Asks all ranks of a run on this machine where they are, and puts their answers into one file.

Promises: works on a run that hangs, whatever it hangs in; what a rank could not answer is said, with the likely reason;
bounded in time; no other process is ever sent a signal.
"""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from callbacks.hang_dump import END, FOLDER, SIGNAL

_NAME = re.compile(r"rank(\d+)\.(.+)\.(\d+)\.txt")
_ANSWER_POLL_S = 0.1


class NoSuchRun(ValueError):
    """A process that cannot be asked; the message says why."""


@dataclass
class Rank:
    """One process of the run: its rank, host and id, where it answers, and the bytes that were there before."""

    rank: int
    host: str
    pid: int
    path: Path
    before: int = 0

    @classmethod
    def of(cls, path: Path) -> Rank | None:
        match = _NAME.fullmatch(path.name)
        if match is None or path.parent.name != FOLDER:
            return None
        return cls(int(match.group(1)), match.group(2), int(match.group(3)), path)

    def answers(self) -> bool:
        """True when that process lives and holds its file open: nothing else is sent the signal."""
        try:
            return self.host == socket.gethostname() and self.path in _open_files(psutil.Process(self.pid))
        except psutil.Error:
            return False

    def new_text(self) -> str:
        with self.path.open("rb") as file:
            file.seek(self.before)
            return file.read().decode(errors="replace")


def dump(pid: int, deadline_s: float = 15.0) -> Path:
    """Writes the report on the run that process `pid` (or one it started) belongs to; returns the file.

    Args:
        pid: of any rank, or of a shell, make or launcher around it.
        deadline_s: for all answers together.

    Raises:
        NoSuchRun: no such process, or it is none of a run that can answer.
    """
    found = _find(pid)
    folder = found.path.parent
    known = [rank for path in sorted(folder.glob("rank*.txt")) if (rank := Rank.of(path)) is not None]
    ranks = sorted((rank for rank in known if rank.answers()), key=lambda rank: rank.rank)
    for rank in ranks:
        rank.before = rank.path.stat().st_size
    for rank in ranks:
        assert SIGNAL is not None
        os.kill(rank.pid, SIGNAL)
    ends = time.monotonic() + deadline_s
    while time.monotonic() < ends and not all(END in rank.new_text() for rank in ranks):
        time.sleep(_ANSWER_POLL_S)
    here = socket.gethostname()
    elsewhere = [f"rank {rank.rank} ran on {rank.host} (pid {rank.pid})" for rank in known if rank.host != here]
    now = datetime.now()
    lines = [f"run {folder.parent}", f"asked {now.isoformat(timespec='seconds')}: {len(ranks)} ranks on {here}"]
    if elsewhere:
        lines.append(f"ask the others there, with arborist doctor --dump: {', '.join(elsewhere)}")
    parts = ["\n".join(lines), *(_section(rank, deadline_s) for rank in ranks)]
    path = folder / f"dump_{now.strftime('%Y-%m-%d_%H-%M-%S_%f')}.txt"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def _find(pid: int) -> Rank:
    if SIGNAL is None:
        raise NoSuchRun("--dump: this platform has no signal to ask a run with")
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        raise NoSuchRun(f"--dump: there is no process {pid} on {socket.gethostname()}") from None
    denied = False
    for member in family:
        try:
            for path in _open_files(member):
                rank = Rank.of(path)
                if rank is not None and rank.pid == member.pid:
                    return rank
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            denied = True
    if denied:
        raise NoSuchRun(f"--dump: process {pid} belongs to somebody else; ask as its user")
    raise NoSuchRun(
        f"--dump: process {pid} ({process.name()}) is none of an arborist run, or has not got to its run directory yet;"
        " runs started from Python need callbacks.HangDump"
    )


def _open_files(process: psutil.Process) -> list[Path]:
    return [Path(file.path) for file in process.open_files()]


def _section(rank: Rank, deadline_s: float) -> str:
    text = rank.new_text().strip()
    heading = f"######## rank {rank.rank}, pid {rank.pid}"
    try:
        state = psutil.Process(rank.pid).status()
    except psutil.Error:
        state = "gone"
    if not text:
        return (
            f"{heading}: no answer within {deadline_s:g} s; the process is {state}: one that is stopped, or stuck in"
            " the kernel, cannot run a signal handler"
        )
    if END not in text:
        heading += (
            f" ({state}): stacks only; nothing else within {deadline_s:g} s, so the call on top of the main thread's"
            " stack probably holds the interpreter lock"
        )
    return f"{heading}\n{text}"
