"""Group-relative advantages whose credit fades towards early turns."""

from __future__ import annotations

import torch
from torch import Tensor

from app.batch import RolloutBatch
from modules.advantages.grpo import grpo
from modules.advantages.statistics import Over
from modules.episodes import episodes, turns


def discounted(
    batch: RolloutBatch, gamma: float = 0.9, mean: Over = "group", std: Over = "group", eps: float = 1e-6
) -> Tensor:
    """A_k = gamma^(K - 1 - k) A for turn k of the K turns of an episode: the return of a reward that comes at the end,
    discounted by turns (Sutton and Barto, eq. 3.8), with A the episode's `grpo` advantage.

    Args:
        gamma: in (0, 1]; with 1 this is `grpo`.
        mean, std, eps: as for `grpo`.

    Returns:
        float32 [T], one value for all tokens of a turn; 0 on tokens that are not trained.
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"advantage_options.gamma: {gamma}, must be above 0 and at most 1")
    turn = turns(batch, episodes(batch)[2])
    fade = torch.tensor(gamma, dtype=torch.float64) ** (turn.of - 1 - turn.place)
    trained = batch.loss_mask
    advantages = torch.zeros(batch.num_tokens, dtype=torch.float32)
    advantages[trained] = grpo(batch, mean, std, eps)[trained] * fade[turn.of_token[trained]].float()
    return advantages
