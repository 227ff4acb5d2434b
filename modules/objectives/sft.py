"""Supervised imitation of the trained tokens."""

from __future__ import annotations

from torch import Tensor


def sft(logprobs: Tensor) -> Tensor:
    """loss_t = -logp_t: [T] -> [T]. Every trained token counts alike, whatever its reward: keep what is not to be
    imitated out of the data (`data.filter`)."""
    return -logprobs
