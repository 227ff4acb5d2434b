"""The clock by which requests time out: it stands still while their engine does.

Promises: never runs backwards; `pause` and `resume` may be repeated; a process that was stopped is late for nothing.
"""

from __future__ import annotations

from datamodules.processes.awake import awake


class PausedClock:
    """Seconds, without those during which the engine stood still on request."""

    def __init__(self) -> None:
        self._left_out_s = 0.0
        self._paused_since: float | None = None

    def now(self) -> float:
        return (self._paused_since or awake()) - self._left_out_s

    @property
    def still_s(self) -> float:
        """Seconds left out so far."""
        since, left_out = self._paused_since, self._left_out_s
        return left_out if since is None else left_out + awake() - since

    def pause(self) -> None:
        self._paused_since = self._paused_since or awake()

    def resume(self) -> None:
        if self._paused_since is not None:
            self._left_out_s += awake() - self._paused_since
            self._paused_since = None
