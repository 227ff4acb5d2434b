"""In which order a finite source is dealt, again and again.

Promises: every lap deals every position once; the order is a function of (seed, lap) alone, so that a stream resumes
from one number; only the lap last asked for is kept.
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
        self._last: tuple[int, list[int]] = (-1, [])

    def at(self, index: int) -> int:
        """The thing at stream position `index` >= 0, from 0 to `count` - 1."""
        lap, position = divmod(index, self.count)
        if not self.shuffle:
            return position
        if self._last[0] != lap:
            order = list(range(self.count))
            random.Random(f"{self.seed}/{lap}").shuffle(order)
            self._last = (lap, order)
        return self._last[1][position]
