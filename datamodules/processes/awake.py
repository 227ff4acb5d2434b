"""The clock that deadlines go by: seconds in which this process could run.

Promises: `awake()` never runs backwards, and goes as `time.monotonic` does but for spans of more than `_LONGEST_S` in
which no thread of this process ran: it was stopped (Ctrl-Z, a scheduler that suspends the job, a container or a machine
that was paused). Nobody could have been waited for meanwhile, and on waking nothing is late for it. Standard library
alone; of the processes that this one starts it says nothing.
"""

from __future__ import annotations

import os
import threading
import time

_TICK_S = 0.5
_LONGEST_S = 5.0  # a call that keeps all threads from running is shorter; a deadline does not notice as much


class _Clock:
    """A thread looks at the time; what it has not seen pass, nobody has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: int | None = None  # whose thread looks: a fork has none
        self._seen = self._stopped_s = 0.0

    def look(self) -> tuple[float, float]:
        """Now, and the seconds before it that nobody has seen pass."""
        with self._lock:
            now = time.monotonic()
            if self._process != os.getpid():
                self._process, self._seen = os.getpid(), now
                threading.Thread(target=self._run, name="awake-clock", daemon=True).start()
            if now - self._seen > _LONGEST_S:
                self._stopped_s += now - self._seen
            self._seen = now
            return now, self._stopped_s

    def _run(self) -> None:
        while True:
            time.sleep(_TICK_S)
            self.look()


_clock = _Clock()


def awake() -> float:
    """Seconds, from a beginning of no meaning."""
    now, stopped_s = _clock.look()
    return now - stopped_s


def stopped_s() -> float:
    """Seconds so far, since the first look at this clock, in which this process was stopped."""
    return _clock.look()[1]
