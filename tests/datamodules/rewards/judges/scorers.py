"""Scorers that end or hang the process they run in, which imports this module: it imports no more than they need."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from datamodules.rewards.judges.scoring import Scorer


class Fragile(Scorer):
    """Ends its process when it sees these tokens."""

    def __init__(self, path: str, ends_it: Sequence[int]) -> None:
        super().__init__(path, "float32", "cpu", 1)
        self._ends_it = list(ends_it)

    def __call__(self, name: str, sequences: Any) -> list[list[float]]:
        size = len(self._ends_it)
        if any(list(ids[k : k + size]) == self._ends_it for ids, _ in sequences for k in range(len(ids))):
            os._exit(3)
        return super().__call__(name, sequences)


class Slow(Scorer):
    """Never answers, and needs no model for that."""

    def prepare(self) -> None: ...

    def __call__(self, name: str, sequences: Any) -> list[list[float]]:
        time.sleep(60)
        return []
