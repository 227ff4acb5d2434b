"""How token losses become one loss: a weight a token, so that the loss of an optimizer step is a plain weighted sum.

Weights are computed from the counts of the whole optimizer step (all ranks), so partial sums of ranks, chunks and
branches add up to the same loss however the step is cut.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "episode_mean", "constant"]
AGGREGATIONS = ("token_mean", "sequence_mean", "episode_mean", "constant")


def token_weights(
    trained: Tensor, mode: Aggregation, constant: float | None = None, episodes: Tensor | None = None
) -> Tensor:
    """Weight of every trained token of each sequence of one optimizer step.

    - "token_mean": sum over tokens / (trained tokens of the step). Long sequences weigh more (DAPO, eq. 8).
    - "sequence_mean": mean over each sequence's tokens, then over sequences; the denominators are the sequence's
      trained tokens and the step's sequences that have any (GRPO, eq. 3).
    - "episode_mean": as "sequence_mean" with the tokens of all an episode's turns taken together, so that an episode of
      20 turns counts once.
    - "constant": sum over tokens / (`constant` x the step's sequences that have trained tokens): no bias towards short
      or long answers (Dr.GRPO, Liu et al. 2025, section 3.2, `constant` being the longest allowed answer).

    Args:
        trained: int64 [N], trained tokens of each sequence of the step, over all ranks; 0 is ordinary.
        constant: tokens; for mode "constant" only.
        episodes: int64 [N], the episode of each sequence; for mode "episode_mean" only.

    Returns:
        float64 [N]; 0 for sequences without trained tokens.
    """
    counts = trained.to(torch.float64)
    has_tokens = trained > 0
    if mode == "token_mean":
        weights = has_tokens / counts.sum().clamp(min=1)
    elif mode == "sequence_mean":
        weights = has_tokens / (counts.clamp(min=1) * has_tokens.sum().clamp(min=1))
    elif mode == "episode_mean":
        assert episodes is not None
        of_sequence = episodes.unique(return_inverse=True)[1]
        totals = torch.zeros(len(trained), dtype=torch.float64).index_add(0, of_sequence, counts)
        weights = has_tokens / (totals[of_sequence].clamp(min=1) * (totals > 0).sum().clamp(min=1))
    elif mode == "constant":
        assert constant is not None
        weights = has_tokens / (has_tokens.sum().clamp(min=1) * torch.tensor(constant, dtype=torch.float64))
    else:
        raise ValueError(f"aggregation: '{mode}' is not one of {', '.join(AGGREGATIONS)}")
    return weights
