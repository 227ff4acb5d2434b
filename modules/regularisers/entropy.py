"""Entropy bonus."""

from __future__ import annotations

from torch import Tensor


def entropy(entropy: Tensor) -> Tensor:
    """-H: [T] -> [T], nats, H being the entropy of the distribution each token was drawn from, which a loss with this
    cost raises (Schulman et al. 2017, eq. 9)."""
    return -entropy
