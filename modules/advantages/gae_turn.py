"""Generalised advantage estimation, a step a turn."""

from __future__ import annotations

import torch
from torch import Tensor

from app.batch import RolloutBatch
from modules.advantages.estimate import Estimate
from modules.advantages.scan import discounted_sums, next_in_episode
from modules.advantages.statistics import whiten as whitened
from modules.episodes import episodes, turns


def gae_turn(
    batch: RolloutBatch,
    values: Tensor,
    token_rewards: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
    eps: float = 1e-8,
) -> Estimate:
    """GAE (Schulman et al. 2016, eq. 16) over turns: a whole turn is one action, so that discounting counts turns and a
    long answer fades no more than a short one (turn-level advantages as in VAGEN, Wang et al. 2025).

    V_k is the value where turn k begins, r_k the sum of the turn's token rewards; the episode's reward comes with its
    last turn. The critic is trained where turns begin, and nowhere else.

    Args:
        values, token_rewards: as for `gae`.
        gamma, lam: in [0, 1], a turn.
        whiten: to mean 0 and standard deviation 1 over the turns of the batch.

    Returns:
        advantages float32 [T], one value for all tokens of a turn; returns A + V before whitening, at turns' first
        tokens.
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"advantage_options.{name}: {value}, must be between 0 and 1")
    rewards, _, of_sequence = episodes(batch)
    turn = turns(batch, of_sequence)
    trained = batch.loss_mask
    reward = torch.zeros(len(turn), dtype=torch.float64)
    reward.index_add_(0, turn.of_token[trained], token_rewards[trained].double())
    reward += rewards[turn.episode] * (turn.place == turn.of - 1)
    value_k = values[turn.first].double()
    delta = reward + gamma * next_in_episode(value_k, turn.episode) - value_k
    estimate = discounted_sums(delta, turn.episode, gamma * lam)
    advantages, returns = torch.zeros(2, batch.num_tokens, dtype=torch.float32)
    value_mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
    returns[turn.first] = (estimate + value_k).float()
    value_mask[turn.first] = True
    credit = (whitened(estimate, eps) if whiten else estimate).float()
    advantages[trained] = credit[turn.of_token[trained]]
    return Estimate(advantages, returns, value_mask)
