"""Watches the ranks of a run: who is gone, who is missing from a collective, and where it is instead.

Promises: a rank that dies, or fails by an error of its own, ends the run on every rank within `death_timeout` plus
`GRACE` seconds, whatever the others are waiting in, and is named there with its last known place; a collective that
waits for half of the run's timeout is reported once, with the ranks that have not entered it, even when it was only
enqueued on a device and the rank went on. A rank that is only
slow is left alone: what counts is whether its process answers. One that was stopped itself takes nobody for dead on
waking.

Every rank publishes a beat (what it does, and where) to a small store of its own on rank 0; rank 0 reads all beats, the
others read rank 0's verdict, so that a thousand ranks cost a thousand reads an interval. The store asks nobody who
they are, so what it holds is signed with a key that ranks share: what else is written there is reported and ignored,
and nothing that is read there ends the watch.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app import interruption
from app.strategies.machine import this_machine
from app.strategies.ranks.listening import open_store
from app.text import printable, well_formed

GRACE = 20.0
"""Seconds a rank that was told to end has for closing files, servers and processes of its own."""
_PATIENCE = 5.0  # seconds: a rank that failed is about to tell the others itself, in the collective they share
_KEY_BYTES = 16
_SIGNED = 64  # characters of a signature
_TOLD = 100  # different complaints


@dataclass
class Beat:
    """What one rank says of itself. `collective` counts the collectives entered; `waits_in` names the one it is in, the
    `waits_for`-th: an earlier one where a device is behind. `asked` is the signal that asked this
    rank to end. `machine`: where `pid` names its process; `host` is for whoever reads."""

    rank: int
    host: str
    pid: int
    number: int = 0
    collective: int = 0
    waits_in: str | None = None
    waits_for: int = 0
    seconds: float = 0.0
    at: str = ""
    failed: str | None = None
    asked: int | None = None
    left: bool = False
    machine: str = ""

    def __str__(self) -> str:
        return printable(self._text())

    def _text(self) -> str:
        who = f"rank {self.rank} (host {self.host}, process {self.pid})"
        if self.failed is not None:
            return f"{who} failed: {self.failed}"
        if self.waits_in is not None:
            return (
                f"{who} waits in collective {self.waits_for}, {self.waits_in}, for {self.seconds:.0f} s, at {self.at}"
            )
        return f"{who} has been through {self.collective} collectives and is at {self.at}"


@dataclass(frozen=True)
class Waiting:
    """A collective that this rank is in: the `number`-th, entered at `since` (of `time.monotonic`). `done` says, where
    it was only enqueued on a device, whether it finished since."""

    number: int
    what: str
    since: float
    done: Callable[[], bool] | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class Progress:
    """The collectives of this rank: one writer, the thread that runs them; read by the watch.

    Attributes:
        count: how many were entered, of those that all ranks enter.
    """

    def __init__(self) -> None:
        self.count = 0
        self._inside: Waiting | None = None
        self._enqueued: deque[Waiting] = deque()
        self._lock = threading.Lock()

    def enter(self, what: str, counted: bool = True, number: int | None = None) -> None:
        """`number`: that of a collective which was entered before, and is waited for now."""
        self.count += counted
        self._inside = Waiting(self.count if number is None else number, what, time.monotonic())

    def enqueue(self, done: Callable[[], bool]) -> None:
        """The collective entered last goes on after `leave`, until `done`."""
        assert self._inside is not None, "enter comes first"
        if not done():
            with self._lock:
                self._enqueued.append(replace(self._inside, done=done))

    def leave(self) -> None:
        self._inside = None

    def forget(self) -> None:
        """Of those that are done, whose `done` may hold tensors, nothing is kept."""
        with self._lock:
            while self._enqueued and self._enqueued[0].done is not None and self._enqueued[0].done():
                self._enqueued.popleft()

    @property
    def unfinished(self) -> Waiting | None:
        """The first of those that were left but are not done."""
        self.forget()
        with self._lock:
            return self._enqueued[0] if self._enqueued else None

    @property
    def current(self) -> Waiting | None:
        """What keeps this rank waiting."""
        return self.unfinished or self._inside


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
        self._beat = Beat(rank, socket.gethostname(), os.getpid(), machine=this_machine())
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._reported = 0
        self._address = address
        self._store: dist.TCPStore | None = None
        self._key = b""
        self._told: set[str] = set()

    def invitation(self) -> Tensor:
        """Int64: what the others need for `start`, rank 0's; it opens the store there."""
        if self.rank != 0:
            return torch.zeros(1 + _KEY_BYTES, dtype=torch.int64)
        self._store = open_store(self._address, 0, self._patience)
        return torch.tensor([self._store.port, *secrets.token_bytes(_KEY_BYTES)])

    def start(self, invitation: Tensor) -> None:
        """Begins to beat, and to listen. `invitation`: rank 0's."""
        port, *key = invitation.tolist()
        self._key = bytes(key)
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
        began = time.monotonic()
        while not self._closed.wait(self._interval):
            if (now := time.monotonic()) - began > self._interval + _PATIENCE:
                # This process was stopped (Ctrl-Z, a scheduler that suspends the job): that it heard nobody says
                # nothing of the others.
                with self._lock:
                    self._seen = {rank: (beat, now) for rank, (beat, _) in self._seen.items()}
            try:
                verdict = self._look()
            except Exception as error:  # whatever it was: without a watch nobody would ever be missed
                self._tell(f"its watch of the other ranks goes on after {type(error).__name__}: {error}")
                verdict = None
            if verdict is not None and not self._closed.is_set() and self._beat.failed is None:
                self._end(verdict)
                return
            began = time.monotonic()

    def _look(self) -> str | None:
        """One beat; why the run has to end, or None."""
        self._try_to_publish()
        self._report_waiting()
        verdict = self._overdue() or self._judge(self._read(range(self.size) if self.rank == 0 else [0]))
        self._pass_on_requests()
        return verdict

    def _pass_on_requests(self) -> None:
        """Rank 0, which alone waits for what is outside the run, learns that another rank was asked to end."""
        asked = [beat.asked for beat, _ in list(self._seen.values()) if beat.asked is not None]
        if self.rank == 0 and asked:
            interruption.request(asked[0])

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
        _say(f"rank {self.rank}: this run ends, because {verdict}")
        interruption.end_now()  # works unless the main thread is inside a collective that cannot be interrupted
        if not self._closed.wait(GRACE):
            interruption.force_end(1)

    def _report_waiting(self) -> None:
        current = self._progress.current
        if current is None or self._reported >= current.number:
            return
        if current.seconds > self._timeout / 2:
            self._reported = current.number
            missing = "; ".join(map(str, self._missing(self._read(range(self.size))))) or "nobody"
            _say(
                f"rank {self.rank} has waited {current.seconds:.0f} s of at most {self._timeout:.0f} in {current.what}"
                f" (collective {current.number}); missing: {missing}"
            )

    def _overdue(self) -> str | None:
        """A device may keep the thread that enqueued a collective from saying that it takes too long."""
        current = self._progress.unfinished
        if current is None or current.seconds < self._timeout + self._death_timeout + GRACE:
            return None
        return f"{self._beat}, which is longer than it may; {self.explain(0.0)}"

    def _tell(self, what: str) -> None:
        """Once."""
        if what not in self._told and len(self._told) < _TOLD:
            self._told.add(what)
            _say(f"rank {self.rank}: {what}")

    # Beats

    def _missing(self, beats: list[Beat]) -> list[Beat]:
        """Those who have not entered the collective this rank is in (or was in last)."""
        current = self._progress.current
        number = current.number if current is not None else self._progress.count
        return [b for b in beats if b.rank != self.rank and not b.left and b.collective < number]

    def _is_gone(self, beat: Beat) -> bool:
        if beat.left or beat.rank == self.rank:
            return False
        if beat.rank == 0 and beat.failed is not None and self.rank != 0:
            return self._silent_for(0) > min(_PATIENCE, self._death_timeout)
        if beat.failed is not None or self._silent_for(beat.rank) > self._death_timeout:
            return True
        return beat.machine == self._beat.machine and not _runs(beat.pid)  # known at once on the same machine

    def _silent_for(self, rank: int) -> float:
        with self._lock:
            return time.monotonic() - self._seen[rank][1] if rank in self._seen else 0.0

    def _publish(self) -> None:
        beat, current = self._beat, self._progress.current
        beat.number += 1
        beat.collective = self._progress.count
        waits = (current.what, current.number, current.seconds) if current is not None else (None, 0, 0.0)
        beat.waits_in, beat.waits_for, beat.seconds = waits
        beat.asked = interruption.pending()
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
            beat = self._understood(rank, text)
            if beat is None:
                continue
            beats.append(beat)
            with self._lock:
                before = self._seen.get(rank)
                moved = before is None or before[0].failed != beat.failed
                if moved or (beat.failed is None and before is not None and before[0].number != beat.number):
                    self._seen[rank] = (beat, time.monotonic())
        return beats

    def _understood(self, rank: int, text: str) -> Beat | None:
        try:
            beat = Beat(**json.loads(text))
        except (ValueError, TypeError) as error:
            self._tell(f"what rank {rank} says of itself is ignored, it is no beat ({type(error).__name__}: {error})")
            return None
        return beat

    @property
    def _patience(self) -> timedelta:
        return timedelta(seconds=self._death_timeout)

    def _set(self, key: str, value: str) -> None:
        assert self._store is not None
        value = well_formed(value)
        try:
            self._store.set(key, self._sign(key, value) + value)
        except RuntimeError:  # rank 0 is gone, or closed its store: reading says so, in time
            return

    def _get(self, key: str) -> str | None:
        """The value, "" when no rank has written one yet, None when the store does not answer."""
        assert self._store is not None
        try:
            found = self._store.get(key) if self._store.check([key]) else b""
        except RuntimeError:
            return None
        signature, value = found[:_SIGNED], found[_SIGNED:].decode(errors="replace")
        if found and not hmac.compare_digest(signature, self._sign(key, value).encode()):
            self._tell(f"{key!r} in the store at {self._address} is ignored: no rank of this run wrote it")
            return ""
        return value

    def _sign(self, key: str, value: str) -> str:
        return hmac.new(self._key, f"{key}={value}".encode(), "sha256").hexdigest()


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # nobody listens: the run's end must not depend on it
        sys.stderr.write(f"{printable(line)}\n")
        sys.stderr.flush()


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
