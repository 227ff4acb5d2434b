"""Time that a test moves on: what is late is late because the test says so, not because the machine was busy."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """In place of a module's `time`: from its second reading on an hour has passed as soon as `over()` is true, and
    nothing is late before that."""

    sleep = staticmethod(time.sleep)

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over
        self._began = False

    def monotonic(self) -> float:
        later, self._began = self._began and self._over(), True
        return time.monotonic() + 3600.0 * later
