"""Plain policy gradient (REINFORCE, Williams 1992)."""

from __future__ import annotations

from torch import Tensor


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """loss_t = -A_t logp_t: [T] -> [T]. No ratio: exact only for tokens the current policy sampled. For others name a
    `correction`, or an objective with a ratio."""
    return -advantages * logprobs
