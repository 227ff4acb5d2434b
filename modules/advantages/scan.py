"""Discounted sums along episodes, for all of them at once."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_sums(values: Tensor, episodes: Tensor, factor: float) -> Tensor:
    """[M]: values[t] + factor * values[t + 1] + factor^2 * values[t + 2] + ..., as far as the episode goes.

    Doubles the reach in every pass: log2(longest episode) passes over [M], no loop over steps.

    Args:
        values: [M], ordered by episode and, within, by time.
        episodes: int64 [M], ascending.
        factor: in [0, 1].
    """
    sums, reach = values.clone(), 1
    longest = int(torch.bincount(episodes).max()) if len(episodes) else 0
    while reach < longest and factor > 0:
        same = episodes[reach:] == episodes[:-reach]
        # The right-hand side is a new tensor: sums on the left must not be read again within a pass.
        sums = torch.cat([sums[:-reach] + factor**reach * sums[reach:] * same, sums[-reach:]])
        reach *= 2
    return sums


def next_in_episode(values: Tensor, episodes: Tensor) -> Tensor:
    """[M]: values[t + 1], or 0 at the end of an episode."""
    if not len(values):
        return values
    return torch.cat([values[1:] * (episodes[1:] == episodes[:-1]), values.new_zeros(1)])
