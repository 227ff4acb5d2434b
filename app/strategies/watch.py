"""Watches the ranks of a run: who is gone, who is missing from a collective, and where it is instead.

Promises: a rank that dies, or fails by an error of its own, ends the run on every rank within `death_timeout` plus
`GRACE` seconds, whatever the others are waiting in, and is named there with its last known place; a collective that
waits for half of the run's timeout is reported once, with the ranks that have not entered it. A rank that is only
slow is left alone: what counts is whether its process answers.

Every rank publishes a beat (what it does, and where) to a small store of its own on rank 0; rank 0 reads all beats, the
others read rank 0's verdict, so that a thousand ranks cost a thousand reads an interval.
"""

from __future__ import annotations

import _thread
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

GRACE = 20.0
"""Seconds a rank that was told to end has for closing files, servers and processes of its own."""
_PATIENCE = 5.0  # seconds: a rank that failed is about to tell the others itself, in the collective they share


@dataclass
class Beat:
    """What one rank says of itself. `collective` counts the collectives entered; `waits_in` names the one it is in."""

    rank: int
    host: str
    pid: int
    number: int = 0
    collective: int = 0
    waits_in: str | None = None
    seconds: float = 0.0
    at: str = ""
    failed: str | None = None
    left: bool = False

    def __str__(self) -> str:
        who = f"rank {self.rank} (host {self.host}, process {self.pid})"
        if self.failed is not None:
            return f"{who} failed: {self.failed}"
        if self.waits_in is not None:
            return (
                f"{who} waits in collective {self.collective}, {self.waits_in}, for {self.seconds:.0f} s, at {self.at}"
            )
        return f"{who} has been through {self.collective} collectives and is at {self.at}"


class Progress:
    """The collectives of this rank: one writer, the thread that runs them; read by the watch."""

    def __init__(self) -> None:
        self.count = 0
        self.current: tuple[str, float] | None = None

    def enter(self, what: str) -> None:
        self.count += 1
        self.current = (what, time.monotonic())

    def leave(self) -> None:
        self.current = None


class RankWatch:
    """The watch of one rank; `start` is a collective.

    Args:
        rank, size: this rank of how many.
        address: where rank 0 can be reached.
        progress: this rank's collectives.
        timeout: seconds a collective may wait (the process group's own timeout).
        death_timeout: seconds without a beat after which a rank is dead.
    """

    def __init__(
        self, rank: int, size: int, address: str, progress: Progress, timeout: float, death_timeout: float
    ) -> None:
        self.rank, self.size = rank, size
        self._progress = progress
        self._timeout, self._death_timeout = timeout, death_timeout
        self._interval = min(5.0, death_timeout / 6, timeout / 8)
        self._main = threading.main_thread().ident
        self._beat = Beat(rank, socket.gethostname(), os.getpid())
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._reported = 0
        self._address = address
        self._store: dist.TCPStore | None = None

    def open_store(self) -> int:
        """On rank 0: the port that the others need for `start`."""
        self._store = dist.TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=self._patience)
        return self._store.port

    def start(self, port: int) -> None:
        """Begins to beat, and to listen."""
        if self._store is None:
            self._store = dist.TCPStore(self._address, port, wait_for_workers=False, timeout=self._patience)
        self._seen[0] = (Beat(0, "", 0), time.monotonic())
        self._publish()
        threading.Thread(target=self._run, name="rank-watch", daemon=True).start()

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank ends with an error of its own."""
        self._beat.failed = f"{type(error).__name__}: {error}"[:2000]
        self._try_to_publish()

    def close(self) -> None:
        """Ends the watch: this rank will not be missed."""
        self._closed.set()
        self._beat.left = True
        self._try_to_publish()

    def explain(self, seconds: float | None = None) -> str:
        """After a failed collective: who died, failed or is missing. Waits up to `seconds` (the death timeout) for the
        signs of it."""
        end = time.monotonic() + (self._death_timeout if seconds is None else seconds)
        while True:
            beats = self._read(range(self.size))
            gone = [beat for beat in beats if self._is_gone(beat)]
            if not beats:
                return "rank 0 no longer answers: look for the first error in its output"
            missing = self._missing(beats)
            if gone or missing or time.monotonic() > end:
                break
            time.sleep(min(0.5, self._interval))
        if gone:
            return "; ".join(str(beat) if beat.failed else f"{beat} when it died" for beat in gone)
        if missing:
            return "missing: " + "; ".join(map(str, missing))
        return "every rank still answers: " + "; ".join(map(str, beats[:8]))

    # The thread

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            self._try_to_publish()
            verdict = self._judge(self._read(range(self.size) if self.rank == 0 else [0]))
            if verdict is not None and not self._closed.is_set() and self._beat.failed is None:
                self._end(verdict)
                return
            self._report_waiting()

    def _judge(self, beats: list[Beat]) -> str | None:
        if self.rank != 0:
            first = self._seen[0][0]
            return f"{first} when it died" if self._is_gone(first) else self._get("verdict") or None
        patience = min(_PATIENCE, self._death_timeout)
        for beat in beats:
            if self._is_gone(beat) and self._silent_for(beat.rank) > (patience if beat.failed else 0.0):
                verdict = str(beat) if beat.failed else f"{beat} when it died"
                self._set("verdict", verdict)
                return verdict
        return None

    def _end(self, verdict: str) -> None:
        sys.stderr.write(f"rank {self.rank}: this run ends, because {verdict}\n")
        sys.stderr.flush()
        _thread.interrupt_main()  # works unless the main thread is inside a collective that cannot be interrupted
        if not self._closed.wait(GRACE):
            os._exit(1)

    def _report_waiting(self) -> None:
        current = self._progress.current
        if current is None or self._reported == self._progress.count:
            return
        seconds = time.monotonic() - current[1]
        if seconds > self._timeout / 2:
            self._reported = self._progress.count
            missing = "; ".join(map(str, self._missing(self._read(range(self.size))))) or "nobody"
            sys.stderr.write(
                f"rank {self.rank} has waited {seconds:.0f} s of at most {self._timeout:.0f} in {current[0]}"
                f" (collective {self._progress.count}); missing: {missing}\n"
            )
            sys.stderr.flush()

    # Beats

    def _missing(self, beats: list[Beat]) -> list[Beat]:
        """Those who have not entered the collective this rank is in (or was in last)."""
        return [b for b in beats if b.rank != self.rank and not b.left and b.collective < self._progress.count]

    def _is_gone(self, beat: Beat) -> bool:
        if beat.left or beat.rank == self.rank:
            return False
        if beat.rank == 0 and beat.failed is not None and self.rank != 0:
            return self._silent_for(0) > min(_PATIENCE, self._death_timeout)
        if beat.failed is not None or self._silent_for(beat.rank) > self._death_timeout:
            return True
        return beat.host == self._beat.host and not _runs(beat.pid)  # known at once on the same host

    def _silent_for(self, rank: int) -> float:
        with self._lock:
            return time.monotonic() - self._seen[rank][1] if rank in self._seen else 0.0

    def _publish(self) -> None:
        beat, current = self._beat, self._progress.current
        beat.number += 1
        beat.collective = self._progress.count
        beat.waits_in, since = current if current is not None else (None, time.monotonic())
        beat.seconds = time.monotonic() - since
        beat.at = _place(sys._current_frames().get(self._main or 0))
        self._set(str(self.rank), json.dumps(asdict(beat)))

    def _try_to_publish(self) -> None:
        if self._store is not None:
            self._publish()

    def _read(self, ranks: Iterable[int]) -> list[Beat]:
        """The beats of those who have published one; [] when the store does not answer."""
        beats = []
        for rank in ranks:
            text = self._get(str(rank))
            if text is None:
                return []
            if not text:
                continue
            beat = Beat(**json.loads(text))
            beats.append(beat)
            with self._lock:
                before = self._seen.get(rank)
                moved = before is None or before[0].failed != beat.failed
                if moved or (beat.failed is None and before is not None and before[0].number != beat.number):
                    self._seen[rank] = (beat, time.monotonic())
        return beats

    @property
    def _patience(self) -> timedelta:
        return timedelta(seconds=self._death_timeout)

    def _set(self, key: str, value: str) -> None:
        assert self._store is not None
        try:
            self._store.set(key, value)
        except RuntimeError:  # rank 0 is gone, or closed its store: reading says so, in time
            return

    def _get(self, key: str) -> str | None:
        """The value, "" when there is none yet, None when the store does not answer."""
        assert self._store is not None
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError:
            return None


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # another user's, or a system without /proc
        return True
    return state not in ("Z", "X")


def _place(frame: FrameType | Any | None) -> str:
    """File, line and function of the innermost frame outside installed packages."""
    innermost = frame
    while frame is not None and (
        "site-packages" in frame.f_code.co_filename or "/lib/python" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "an unknown place"
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} ({frame.f_code.co_name})"
