"""REINFORCE++: token returns, normalised over the whole batch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from app import checks
from app.batch import RolloutBatch
from modules.advantages.scan import discounted_sums
from modules.advantages.statistics import centred_over, whiten
from modules.episodes import episodes, group_sizes, turns


def reinforce_pp(
    batch: RolloutBatch,
    token_rewards: Tensor,
    baseline: Literal["none", "group"] = "none",
    gamma: float = 1.0,
    eps: float = 1e-8,
) -> Tensor:
    """A_t = r - b + sum of gamma^l token_rewards_(t+l), then (A - mean) / (std + eps) over the trained tokens of the
    batch (REINFORCE++, Hu et al. 2025, eqs. 4 to 6; `baseline` "group" is its REINFORCE++-baseline).

    A batch-wide scale is not biased by how hard a prompt is, as a group's own is; long answers weigh more in it.

    Args:
        token_rewards: [T], added to the rewards of trained tokens: put the KL regulariser into the reward to get the
            paper's k1 penalty.
        baseline: "group" subtracts the mean reward of the group first.
        gamma: in [0, 1], a token, of the token rewards and the episode's reward alike.

    Returns:
        float32 [T], in standard deviations; 0 on tokens that are not trained.
    """
    checks.one_of("advantage_options.baseline", baseline, ("none", "group"))
    if not 0 <= gamma <= 1:
        raise ValueError(f"advantage_options.gamma: {gamma}, must be between 0 and 1")
    rewards, groups, of_sequence = episodes(batch)
    if baseline == "group":
        rewards = centred_over(rewards, group_sizes(batch, groups, "reinforce_pp")[0], "group")
    turn = turns(batch, of_sequence)
    trained = batch.loss_mask.nonzero()[:, 0]
    steps = trained[torch.argsort(turn.of_token[trained], stable=True)]
    episode = turn.episode[turn.of_token[steps]]
    reward = token_rewards[steps].double()
    if len(steps):
        ends = torch.cat([episode[1:] != episode[:-1], torch.ones(1, dtype=torch.bool)])
        reward = reward + rewards[episode] * ends
    advantages = torch.zeros(batch.num_tokens, dtype=torch.float32)
    advantages[steps] = whiten(discounted_sums(reward, episode, gamma), eps).float()
    return advantages
