"""How token losses become one loss: a weight a token, so that the loss of an optimizer step is a plain weighted sum.

Weights are computed from the counts of the whole optimizer step (all ranks), so partial sums of ranks, chunks and
branches add up to the same loss however the step is cut.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from app import checks

Aggregation = Literal["token_mean", "sequence_mean", "episode_mean", "constant"]
AGGREGATIONS = ("token_mean", "sequence_mean", "episode_mean", "constant")


def token_weights(
    trained: Tensor, mode: Aggregation, constant: float | None = None, episodes: Tensor | None = None
) -> Tensor:
    """Weight of every trained token of each sequence of one optimizer step.

    - "token_mean": sum over tokens / (trained tokens of the step). Long sequences weigh more (DAPO, eq. 8).
    - "sequence_mean": mean over each sequence's tokens, then over its episode's sequences, then over episodes (GRPO,
      eq. 3, and GSPO, eq. 5, whose episodes are one sequence each). Denominators: the sequence's trained tokens, the
      episode's sequences that have any, the step's episodes that have any.
    - "episode_mean": mean over the tokens of all an episode's sequences taken together, then over episodes.
      Denominators: the episode's trained tokens, the step's episodes that have any.
    - "constant": sum over tokens / (`constant` x the step's episodes that have trained tokens): no bias towards short
      or long answers (Dr.GRPO, Liu et al. 2025, section 3.2, `constant` being the longest allowed answer).

    Which is the default is the objective's to say (`traits`): "token_mean" unless it says another.

    An episode counts once in the last three, whatever the number of its turns and of the sequences they make; in
    "token_mean" and "constant" a token weighs the same wherever its episode is split.

    Args:
        trained: int64 [N], trained tokens of each sequence of the step, over all ranks; 0 is ordinary.
        constant: tokens; for mode "constant" only.
        episodes: int64 [N], the episode of each sequence; for all modes but "token_mean".

    Returns:
        float64 [N]; 0 for sequences without trained tokens.
    """
    counts = trained.to(torch.float64)
    has_tokens = trained > 0
    checks.one_of("aggregation", mode, AGGREGATIONS)
    if mode == "token_mean":
        return has_tokens / counts.sum().clamp(min=1)
    assert episodes is not None
    of_sequence = episodes.unique(return_inverse=True)[1]

    def of_episode(values: Tensor) -> Tensor:
        """Their sums over each sequence's episode, [N]."""
        return (
            torch.zeros(len(trained), dtype=torch.float64).index_add(0, of_sequence, values)[of_sequence].clamp(min=1)
        )

    sequences = of_episode(has_tokens.double())
    number = (has_tokens / sequences).sum().round().clamp(min=1)  # of episodes with trained tokens
    if mode == "sequence_mean":
        return has_tokens / (counts.clamp(min=1) * sequences * number)
    if mode == "episode_mean":
        return has_tokens / (of_episode(counts) * number)
    assert constant is not None
    return has_tokens / (number * torch.tensor(constant, dtype=torch.float64))
