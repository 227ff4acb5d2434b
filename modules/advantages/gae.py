"""Generalised advantage estimation, a step a token."""

from __future__ import annotations

import torch
from torch import Tensor

from app.batch import RolloutBatch
from modules.advantages.estimate import Estimate
from modules.advantages.scan import discounted_sums, next_in_episode
from modules.advantages.statistics import whiten as whitened
from modules.episodes import episodes, turns


def gae(
    batch: RolloutBatch,
    values: Tensor,
    token_rewards: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_lam: float | None = None,
    whiten: bool = True,
    eps: float = 1e-8,
) -> Estimate:
    """A_t = sum_l (gamma lam)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t (GAE, Schulman et al. 2016, eq. 16).

    Steps are the trained tokens of an episode through all its turns: after the last token of a turn comes the first of
    the next one, whose value has seen what the environment said. The episode's reward comes with its last token, after
    which the value is 0.

    Args:
        values: [T], units of reward; read on trained tokens.
        token_rewards: [T], added to the rewards of trained tokens.
        gamma, lam: in [0, 1], a token.
        value_lam: lambda of the returns the critic learns, where it is to differ (1.0 is unbiased over long answers:
            VC-PPO, Yuan et al. 2025, section 3.2); default: `lam`.
        whiten: advantages to mean 0 and standard deviation 1 over the trained tokens of the batch.

    Returns:
        advantages float32 [T], 0 on tokens that are not trained; returns A + V before whitening.
    """
    for name, given in (("gamma", gamma), ("lam", lam), ("value_lam", value_lam)):
        if given is not None and not 0 <= given <= 1:
            raise ValueError(f"advantage_options.{name}: {given}, must be between 0 and 1")
    rewards, _, of_sequence = episodes(batch)
    turn = turns(batch, of_sequence)
    trained = batch.loss_mask.nonzero()[:, 0]
    steps = trained[torch.argsort(turn.of_token[trained], stable=True)]  # by episode, turn, position
    episode = turn.episode[turn.of_token[steps]]
    value, reward = values[steps].double(), token_rewards[steps].double()
    if len(steps):
        ends = torch.cat([episode[1:] != episode[:-1], torch.ones(1, dtype=torch.bool)])
        reward = reward + rewards[episode] * ends
    delta = reward + gamma * next_in_episode(value, episode) - value
    estimate = discounted_sums(delta, episode, gamma * lam)
    target = estimate if value_lam is None else discounted_sums(delta, episode, gamma * value_lam)
    advantages, returns = torch.zeros(2, batch.num_tokens, dtype=torch.float32)
    returns[steps] = (target + value).float()
    advantages[steps] = (whitened(estimate, eps) if whiten else estimate).float()
    return Estimate(advantages, returns, batch.loss_mask)
