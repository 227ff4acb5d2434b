"""What an estimator with a critic returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Estimate(NamedTuple):
    """Advantages, and what the critic is to learn.

    Attributes:
        advantages: float [T].
        returns: float [T], targets of the values; same units as the reward.
        value_mask: bool [T], tokens whose values are trained.
    """

    advantages: Tensor
    returns: Tensor
    value_mask: Tensor
