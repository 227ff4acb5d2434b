"""In which order a finite source is dealt, again and again.

Promises: every lap deals every position once; the order is a function of (seed, lap) alone, so that a stream resumes
from one number; only the two laps last asked for are kept: prompts that are played again may be of the one before.
"""

from __future__ import annotations

import random


class DealingOrder:
    """The order of `count` things, lap after lap.

    Args:
        count: things in a lap, at least 1.
        shuffle: a new order every lap; False keeps the things' own.
        seed: of the order.
    """

    def __init__(self, count: int, shuffle: bool, seed: int | str) -> None:
        self.count = count
        self.shuffle = shuffle
        self.seed = seed
        self._laps: dict[int, list[int]] = {}

    def at(self, index: int) -> int:
        """The thing at stream position `index` >= 0, from 0 to `count` - 1."""
        lap, position = divmod(index, self.count)
        if not self.shuffle:
            return position
        if lap not in self._laps:
            order = list(range(self.count))
            random.Random(f"{self.seed}/{lap}").shuffle(order)
            self._laps = {**dict(list(self._laps.items())[-1:]), lap: order}
        return self._laps[lap][position]
