"""What a part of the tree will cost, in seconds of this run on this machine.

A rank's tree pass takes about `a * tokens + b * attention pairs`: linear layers and attention have their own speeds,
and only the ratio b / a moves the cut. Promises: all ranks use the same coefficients at every step (rank 0 fits them to
the measurements of all ranks and broadcasts them at fixed steps); measurements that say nothing about the ratio leave
it alone; with calibration off the cut is a function of the batch only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from app.strategies.ranks.collectives import Communicator

DEFAULT_RATIO = 1 / 8192  # pairs to a token; see app.tree.partition
_KEPT = 64  # measurements a rank remembers
_LIMITS = (DEFAULT_RATIO / 64, DEFAULT_RATIO * 64)  # outside of them a fit has seen noise
Observation = tuple[float, float, float]


class Calibration:
    """The coefficients and the measurements behind them.

    Args:
        enabled: fit at all.
        every: optimizer steps between fits.

    Attributes:
        ratio: cost of an attention pair in units of a token's.
        seconds_per_token: of the last fit; nan before.
        imbalance: (seconds of the slowest rank x ranks) / seconds of all ranks, over the steps of the last window.
    """

    def __init__(self, enabled: bool, every: int = 10) -> None:
        self.enabled, self.every = enabled, every
        self.ratio = DEFAULT_RATIO
        self.seconds_per_token = float("nan")
        self.imbalance = float("nan")
        self._seen: deque[Observation] = deque(maxlen=_KEPT)
        self._steps = 0

    def cost(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Cost of running prefixes of `lengths` tokens from the root; see `app.tree.partition`."""
        n = lengths.astype(np.float64)
        return n + self.ratio * n * (n + 1) / 2

    def observe(self, ranks: Communicator, tokens: int, pairs: int, seconds: float) -> None:
        """Collective, once an optimizer step: this rank's tree pass took `seconds` for so many tokens and pairs."""
        self._steps += 1
        if self._steps > 1:  # the first pass allocates and compiles
            self._seen.append((float(tokens), float(pairs), seconds))
        if self._steps % self.every or ranks.size == 1:
            return
        mine = torch.full((_KEPT, 3), float("nan"), dtype=torch.float64)
        if self._seen:
            mine[: len(self._seen)] = torch.tensor(list(self._seen), dtype=torch.float64)
        everyone = ranks.gather(mine, "times of tree passes")
        last = len(self._seen)
        self.imbalance = _imbalance(everyone[:, max(0, last - self.every) : last, 2])
        if self.enabled:
            found = torch.tensor(fit(everyone.view(-1, 3).tolist(), self.ratio), dtype=torch.float64)
            self.seconds_per_token, self.ratio = ranks.broadcast_(found, "coefficients of the partition").tolist()


def fit(observations: Iterable[Observation], ratio: float) -> tuple[float, float]:
    """Least squares of relative errors, coefficients not negative.

    Args:
        observations: (tokens, pairs, seconds); incomplete ones (nan) and empty parts are left out.
        ratio: what is believed so far.

    Returns:
        Seconds a token, and cost of a pair in units of a token; `ratio` itself where pairs and tokens vary together too
        closely to tell them apart.
    """
    seen = np.array([o for o in observations if o[0] > 0 and o[2] > 0], np.float64).reshape(-1, 3)
    if not len(seen):
        return float("nan"), ratio
    tokens, pairs, seconds = seen.T
    depth = pairs / tokens
    a, b = np.linalg.lstsq(np.stack([tokens, pairs], 1) / seconds[:, None], np.ones(len(seen)), rcond=None)[0]
    told_apart = len(seen) >= 8 and depth.std() > 0.05 * depth.mean()
    if told_apart and a > 0 and b > 0 and _LIMITS[0] < b / a < _LIMITS[1]:
        return float(a), float(b / a)
    units = (tokens + ratio * pairs) / seconds
    return float(units.sum() / (units**2).sum()), ratio


def _imbalance(seconds: torch.Tensor) -> float:
    """`seconds` [ranks, steps] of the same steps."""
    seconds = torch.nan_to_num(seconds)
    total = float(seconds.sum())
    return float(seconds.max(dim=0).values.sum()) * len(seconds) / total if total > 0 else float("nan")
