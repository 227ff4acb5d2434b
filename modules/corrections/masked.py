"""Masked importance sampling (IcePop, Ling team 2025, "Every step evolves", section 3; MIS)."""

from __future__ import annotations

from torch import Tensor

from modules.corrections.levels import Level, importance_ratio


def masked(
    old: Tensor,
    behavior: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    level: Level = "token",
    low: float = 0.5,
    high: float = 5.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """w = exp(old - behavior) where that lies in [low, high], else 0: tokens (or sequences) that trainer and sampler
    disagree about too much, in either direction, teach nothing.

    Args:
        old, behavior: [T], nats. mask: bool [T]. cu_seqlens: int64 [n + 1].
        level: see `importance_ratio`; with an objective whose ratio is a sequence's (`gspo`) "geometric" by default.
        low, high: 0 <= low <= 1 <= high.

    Returns:
        w [T]; "correction_cut": whether it was set to 0.
    """
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"correction_options: low={low} and high={high} must enclose 1 and not be negative")
    ratio = importance_ratio(old, behavior, mask, cu_seqlens, level)
    cut = (ratio < low) | (ratio > high)
    return ratio.masked_fill(cut, 0.0), {"correction_cut": cut}
