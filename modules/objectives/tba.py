"""Trajectory balance, the variance form (TBA, Bartoldson et al. 2025, "Trajectory balance with asynchrony")."""

from __future__ import annotations

import torch
from torch import Tensor

from modules.episodes import sequence_sums, spread_sequences
from modules.objectives.ratio import check_above
from modules.objectives.traits import traits


@traits(aggregation="episode_mean", compares_episodes=True)
def tba(
    logprobs: Tensor,
    reference: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    groups: Tensor,
    episodes: Tensor,
    rewards: Tensor,
    beta: float = 0.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss = (log Z + log pi(y) - log ref(y) - r / beta)^2 of an episode, log Z = mean over its group of
    (log ref(y) - log pi(y) + r / beta), without gradient (section 3.1, VarGrad).

    The default aggregation is "episode_mean", the mean over episodes.

    Off-policy by construction: at the optimum pi = ref exp(r / beta) / Z, whoever sampled. It has no ratio, so
    neither `advantage` nor `correction` have a place in it.

    Args:
        logprobs, reference: [T], in nats; the episode's is the sum over its trained tokens, of all its turns.
        mask: bool [T]. cu_seqlens: int64 [n + 1].
        groups, episodes: int64 [n]; episodes are numbered within the group or over all.
        rewards: [n], the episode's, with those of single calls and less penalties.
        beta: temperature of the reward, > 0, units of reward a nat.

    Returns:
        loss [T], nats^2, one value for all tokens of an episode; "log_z_gap": its root, in nats, averaged as it is.

    A group of which a step has one episode is its own log Z: its loss is 0.
    """
    check_above("beta", beta)
    pairs, of_sequence = torch.stack([groups, episodes], dim=1).unique(dim=0, return_inverse=True)
    per_sequence = sequence_sums(logprobs - reference, mask, cu_seqlens)
    drift = per_sequence.new_zeros(len(pairs)).index_add(0, of_sequence, per_sequence)
    reward = drift.new_zeros(len(pairs)).index_copy(0, of_sequence, rewards.to(drift))
    gap = drift - reward / beta
    group = pairs[:, 0].unique(return_inverse=True)[1]
    count = torch.bincount(group).to(gap.dtype)
    log_z = -gap.detach().new_zeros(len(count)).index_add(0, group, gap.detach()) / count
    gap = gap + log_z[group]
    per_token = spread_sequences(gap[of_sequence], cu_seqlens, len(logprobs))
    return per_token.square(), {"log_z_gap": per_token.detach().abs()}
