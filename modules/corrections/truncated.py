"""Truncated importance sampling (TIS; Ionides 2008; for rollout engines Yao et al. 2025, "Your efficient RL framework
secretly brings you off-policy RL training")."""

from __future__ import annotations

from torch import Tensor

from app import checks
from modules.corrections.levels import Level, importance_ratio


def truncated(
    old: Tensor, behavior: Tensor, mask: Tensor, cu_seqlens: Tensor, level: Level = "token", cap: float = 2.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """w = min(exp(old - behavior), cap): every token keeps a gradient, and none more than `cap` times its own.

    Args:
        old, behavior: [T], nats. mask: bool [T]. cu_seqlens: int64 [n + 1].
        level: see `importance_ratio`; with an objective whose ratio is a sequence's (`gspo`) "geometric" by default.
        cap: at least 1.

    Returns:
        w [T]; "correction_cut": whether the cap changed it.
    """
    checks.at_least(1, {"correction_options.cap": cap})
    ratio = importance_ratio(old, behavior, mask, cu_seqlens, level)
    return ratio.clamp(max=cap), {"correction_cut": ratio > cap}
