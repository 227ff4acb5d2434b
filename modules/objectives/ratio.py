"""Probability ratios that stay finite."""

from __future__ import annotations

import math

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here: exp stays finite, and so does the gradient of the branch that a `min` does not take."""

MAX_RATIO = math.exp(MAX_LOG_RATIO)
WIDEST_CLIP = 1e3
"""Largest `clip_high`. A ratio so far up is no trust region; objectives that do not clip have none."""


def ratio_of(logprobs: Tensor, old: Tensor) -> Tensor:
    """exp(logprobs - old), [T] -> [T], between e^-20 and e^20, beyond which it has no gradient."""
    return (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def check_clip(clip_low: float | None, clip_high: float) -> None:
    """Raises ValueError for clip ranges that cannot be meant."""
    if clip_low is not None and not 0 <= clip_low <= 1:
        raise ValueError(f"objective_options.clip_low: {clip_low}, must be between 0 and 1")
    if not 0 <= clip_high <= WIDEST_CLIP:
        raise ValueError(f"objective_options.clip_high: {clip_high}, must be between 0 and {WIDEST_CLIP:g}")


def check_above(name: str, value: float, least: float = 0.0) -> None:
    """Raises ValueError unless the option `name` is above `least`, and no more than a ratio can be."""
    if not least < value <= MAX_RATIO:
        raise ValueError(f"objective_options.{name}: {value}, must be above {least:g} and at most {MAX_RATIO:.3g}")
