"""Probability ratios that stay finite."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here: exp stays finite, and so does the gradient of the branch that a `min` does not take."""


def ratio_of(logprobs: Tensor, old: Tensor) -> Tensor:
    """exp(logprobs - old), [T] -> [T], between e^-20 and e^20, beyond which it has no gradient."""
    return (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def check_clip(clip_low: float | None, clip_high: float) -> None:
    """Raises ValueError for clip ranges that cannot be meant."""
    if clip_low is not None and not 0 <= clip_low <= 1:
        raise ValueError(f"objective_options.clip_low: must be between 0 and 1, got {clip_low}")
    if not clip_high >= 0:
        raise ValueError(f"objective_options.clip_high: must not be negative, got {clip_high}")
