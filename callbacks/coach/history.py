"""Metrics of a run as the coach's rules ask for them (of now, of the past, of the first steps), and its validations.

Promises: memory is bounded by the window, not by the run; what was not measured is left out, never taken for 0.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping

from callbacks.coach.held_out import HeldOut

_LONG = 4  # windows that count as the past


class History:
    """Metrics of the last steps, and of the first ones; `held_out`: validations.

    Args:
        window: steps that count as now; four rollout batches at least.
        passes: optimizer steps a rollout batch. Metrics of rollouts come with its first alone.
    """

    def __init__(self, window: int, passes: int = 1) -> None:
        self.window, self._passes = max(window, 4 * passes), passes
        self._rows: deque[Mapping[str, float]] = deque(maxlen=_LONG * self.window + 1)
        self._first: defaultdict[str, list[float]] = defaultdict(list)
        self.steps, self.held_out = 0, HeldOut()

    def add(self, metrics: Mapping[str, float]) -> None:
        """One step's; those that are not numbers are taken as not measured."""
        row = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.steps += 1
        self._rows.append(row)
        for name, value in row.items():
            if len(self._first[name]) < self.due(name):
                self._first[name].append(value)

    def last(self, name: str) -> float | None:
        """Of the last step; None where it was not measured."""
        return self._rows[-1].get(name) if self._rows else None

    def now(self, name: str) -> list[float]:
        """Of the last `window` steps, where it was measured."""
        return _values(list(self._rows)[-self.window :], name)

    def past(self, name: str) -> list[float]:
        """Of the steps before `now`, four windows with it at most."""
        return _values(list(self._rows)[: -self.window], name)

    def first(self, name: str) -> list[float]:
        """Of the first window in which it was measured: later than others where a critic alone warms up."""
        return list(self._first[name])

    def mean(self, name: str) -> float | None:
        """Of `now`; None when it was measured in less than half of these steps, or batches."""
        values = self.now(name)
        return sum(values) / len(values) if 2 * len(values) >= self.due(name) else None

    def due(self, name: str) -> int:
        """How often it is measured in a window."""
        return self.window // self._passes if name.startswith("rollouts/") else self.window

    def gained(self, name: str) -> float:
        """What a counter grew by over `now`; 0 for one that is not there."""
        values = _values(list(self._rows)[-self.window - 1 :], name)
        return values[-1] - values[0] if values else 0.0


def _values(rows: list[Mapping[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]
