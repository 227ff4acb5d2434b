"""The critic's loss (PPO, Schulman et al. 2017, eq. 9, with the clipping of its reference implementation)."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None) -> tuple[Tensor, Tensor]:
    """(V - R)^2 / 2, or with `clip` the larger of that and the same for V kept within `clip` of V_old.

    Args:
        values: [T], with gradient. old_values: [T], when the batch was prepared. returns: [T]. Units of reward.
        clip: above 0, units of reward.

    Returns:
        loss [T]; clipped bool [T]: whether a value has no gradient because it moved too far.
    """
    free = 0.5 * (values - returns) ** 2
    if clip is None:
        return free, torch.zeros_like(free, dtype=torch.bool)
    # Not V_old + the clipped difference, which differs from V by rounding where nothing is clipped.
    bounded = 0.5 * (values.clamp(old_values - clip, old_values + clip) - returns) ** 2
    return torch.maximum(free, bounded), bounded > free
