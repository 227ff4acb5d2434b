"""Notices rollouts that have stopped coming, says once what is pending where, and acts as configured.

    nothing has arrived for 120 s (stall.after_s): 2 being played, the oldest: 'p7' (131.0 s, 1 of 8 done, waits 128.4 s
    for reply 'p7#1/0' at http://127.0.0.1:30001 and 6 more); gate: {...} at version 3; engine: {...}; stall.action:
    requeue

Promises: it runs on a thread of its own, so it also speaks when the rollout thread is stuck in somebody's blocking
call, and names that call's line; one line a stall, then at 2, 4, 8 ... times the span while it lasts, and one when it
is over; an action is taken as often as a line is written, unless it could not help, and then the line says why.

Users' code that keeps the event loop, on which all episodes are played, for two seconds or three is named as well, the
first, second, fourth, eighth ... time, though nothing stalls. Only what was seen to run, twice within one such span, is
blamed: of a process that was stopped, or has no time because an engine computes in it, nothing is said.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, Protocol, get_args

from app import checks
from datamodules.inference.protocol import ServerEngine
from datamodules.pending import Pending, servers
from datamodules.pipeline.limits import Limits
from datamodules.processes import foreign
from datamodules.processes.awake import awake

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
_KEPT_S = 2.0  # without an answer of the event loop
_SEEN_S = 0.9  # of these at least, users' code was seen in its place: looks are a second apart
_REMEDY = "workflows must await what takes long (an asynchronous client), or run it with await asyncio.to_thread(...)"
Action = Literal["warn", "requeue", "restart_server", "stop"]


class RolloutsStalled(RuntimeError):
    """Nothing arrived for too long and `stall.action` says stop; the message is the watchdog's line."""


@dataclass(frozen=True)
class Stall:
    """When rollouts count as stalled, and what to do then: the nested `data.stall` of a config.

    Attributes:
        after_s: seconds without any reply, reward or end of an episode after which the watchdog says, in one line, what
            is pending where; None for half of the shorter of the limits' deadlines.
        action: "warn" logs only; "requeue" gives up what is being played and plays the prompts again, before any
            others; "restart_server" restarts the servers at which replies are waited for (engines that start their
            own); "stop" ends the run with an error.
        max_requeues: with "requeue" only: a prompt that stalls more often costs its group; None for 2.

    Raises:
        ValueError: an option out of range or without effect.
    """

    after_s: float | None = None
    action: Action = "warn"
    max_requeues: int | None = None

    def __post_init__(self) -> None:
        checks.deadline({"stall.after_s": self.after_s})
        checks.one_of("stall.action", self.action, get_args(Action))
        checks.at_least(1, {"stall.max_requeues": self.max_requeues})
        if self.action != "requeue":
            checks.no_effect(f"with stall.action: {self.action}", {"stall.max_requeues": self.max_requeues})

    def seconds(self, limits: Limits) -> float:
        """`after_s`, or its default. Raises ValueError where `limits` end the run before."""
        if self.after_s is None:
            return min(limits.episode_deadline_s, limits.collect_deadline_s) / 2
        if self.after_s >= limits.collect_deadline_s:
            raise ValueError(
                f"stall.after_s: {self.after_s:g} has no effect, limits.collect_deadline_s:"
                f" {limits.collect_deadline_s:g} ends the run first; lower the one or raise the other"
            )
        return self.after_s


class Watched(Protocol):
    """What a watchdog looks at: a `Producer`."""

    trainer_waits: bool
    thread: threading.Thread | None
    stream: Any
    player: Any

    @property
    def is_validating(self) -> bool: ...

    def pending(self) -> list[Pending]: ...
    def describe(self) -> str: ...
    def requeue_stalled(self, most: int) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def ping(self, pong: threading.Event) -> None:
        """Sets `pong` from the rollout thread's event loop."""


class Watchdog:
    """Watches one producer.

    Args:
        stall: when and what to do.
        limits: of the run.
        watched: the producer.
    """

    def __init__(self, stall: Stall, limits: Limits, watched: Watched) -> None:
        self._after_s = stall.seconds(limits)
        self._action = stall.action
        self._max_requeues = stall.max_requeues or 2
        self._watched = watched
        self._owed_since: float | None = None  # since when something should arrive
        self._lines = 0  # about the stall that lasts
        self._pong = threading.Event()
        self._ping_at: float | None = None
        self._seen_at: float | None = None  # since when each look at a loop that does not answer has found users' code
        self._told = False  # of the span in which it does not answer
        self._kept = 0  # such spans
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts looking, ten times in the span that counts as a stall, once a second at most."""
        self._thread = threading.Thread(target=self._run, name="rollout-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops looking. A restart of a server that is under way ends by itself."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def look(self, now: float) -> None:
        """One look; `now` is a time of `awake`."""
        watched, after = self._watched, self._after_s
        if self._trainers_turn() or not (watched.pending() or watched.trainer_waits):
            self._owed_since = None
            self._over(now)
            return
        if self._owed_since is None:
            self._owed_since = now
        blocked_s = self._blocked_for(now)
        self._look_inside(now, blocked_s)
        idle = now - max(watched.stream.arrivals.last, self._owed_since)
        if idle < after:
            self._over(now)
            return
        if idle < after * 2**self._lines:
            return
        self._lines += 1
        where = f"; {self._blocked_line(blocked_s)}" if blocked_s >= after / 2 else ""
        line = f"nothing has arrived for {idle:.1f} s (stall.after_s: {after:g}): {watched.describe()}{where}"
        self._act(line, blocked=bool(where))

    def _trainers_turn(self) -> bool:
        """Whether the engine stands still because the trainer computes on its GPUs."""
        engine = self._watched.player.engine
        in_turns = isinstance(engine, ServerEngine) and engine.in_turns
        return in_turns and bool(self._watched.player.engine.health()["paused"])

    def _run(self) -> None:
        while not self._closing.wait(max(0.01, min(1.0, self._after_s / 10))):
            try:
                self.look(awake())
            except Exception:  # its own fault must not end the run, nor the watch
                _log.exception("the rollout watchdog failed to look; it will look again")

    def _over(self, now: float) -> None:
        if self._lines:
            self._lines = 0
            _log.warning("rollouts arrive again")

    # ---- acting

    def _act(self, line: str, blocked: bool) -> None:
        action = self._action
        if action == "warn":
            _log.warning("%s; stall.action: warn", line)
        elif action == "stop":
            _log.error("%s; stall.action: stop", line)
            self._watched.fail(RolloutsStalled(line))
        elif reason := self._helpless(blocked):
            _log.warning("%s; stall.action: %s does nothing: %s", line, action, reason)
        elif action == "requeue":
            _log.warning("%s; stall.action: requeue", line)
            self._watched.requeue_stalled(self._max_requeues)
        else:
            self._restart(line)

    def _helpless(self, blocked: bool) -> str:
        """Why nothing but a warning would help; "" when something might."""
        if blocked:
            return "the rollout thread itself is stuck"
        if self._watched.is_validating and self._action == "requeue":
            return "validation is being played, which limits.collect_deadline_s ends"
        if self._watched.player.engine.health().get("paused"):
            return "the engine is paused"
        if not self._watched.pending():
            return "nothing is being played"
        return ""

    def _restart(self, line: str) -> None:
        engine = self._watched.player.engine
        names = servers(self._watched.pending(), engine.where) if isinstance(engine, ServerEngine) else []
        if not names:
            _log.warning("%s; stall.action: restart_server does nothing: no reply is waited for at a server", line)
            return
        _log.warning("%s; stall.action: restart_server, %s", line, ", ".join(names))
        for name in names:
            try:
                engine.restart(name)
            except Exception as error:
                _log.error("server %s could not be restarted: %s: %s", name, type(error).__name__, error)

    # ---- a rollout thread that is stuck

    def _blocked_for(self, now: float) -> float:
        """Seconds since which the rollout thread's event loop has answered nothing; 0 when it answers."""
        if self._ping_at is None or self._pong.is_set():
            self._pong.clear()
            self._ping_at = now
            self._watched.ping(self._pong)
            return 0.0
        return now - self._ping_at

    def _look_inside(self, now: float, blocked_s: float) -> None:
        """Names the users' code that keeps the event loop from answering."""
        if blocked_s == 0:
            self._seen_at, self._told = None, False
            return
        found = foreign.inside(self._frame())
        self._seen_at = (now if self._seen_at is None else self._seen_at) if found else None
        if self._told or self._seen_at is None or now - self._seen_at < _SEEN_S or blocked_s < _KEPT_S:
            return
        self._told = True
        self._kept += 1
        if self._kept & (self._kept - 1) == 0:
            again = f", for the {self._kept:,}. time" if self._kept > 1 else ""
            kept = f"has kept their event loop for {blocked_s:.0f} s{again}"
            _log.warning("all rollouts wait for %s, which %s: %s", found, kept, _REMEDY)

    def _frame(self) -> FrameType | None:
        """What the rollout thread is inside of."""
        thread = self._watched.thread
        return sys._current_frames().get(thread.ident) if thread is not None and thread.ident is not None else None

    def _blocked_line(self, seconds: float) -> str:
        frame = self._frame()
        if frame is None:
            return "the rollout thread is gone"
        stack = traceback.extract_stack(frame)
        calls = " < ".join(f"{one.name} ({one.filename}:{one.lineno})" for one in reversed(stack[-3:]))
        return f"the rollout thread has been stuck for {seconds:.0f} s in {calls}: {_REMEDY}"
