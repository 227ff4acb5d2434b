"""Direct preference optimisation (DPO, Rafailov et al. 2023, eq. 7)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from app.batch import BatchError
from modules.episodes import differ, sequence_sums, spread_sequences
from modules.objectives.ratio import check_above
from modules.objectives.traits import traits


@traits(aggregation="episode_mean")
def dpo(
    logprobs: Tensor,
    reference: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    groups: Tensor,
    episodes: Tensor,
    rewards: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss of a pair = -log sigmoid(beta (d_chosen - d_rejected)), d = log pi(y) - log ref(y).

    A pair is a group of two episodes; the one of larger reward is the chosen one. Both carry the pair's loss, so that
    aggregation "episode_mean", the default here, gives the mean over pairs. Where both have the same reward (as
    rollouts often do, or after a penalty) neither is preferred: the loss is 0, and denominators count the pair.

    Args:
        logprobs, reference: [T], in nats; the episode's is the sum over its trained tokens, of all its turns.
        mask: bool [T]. cu_seqlens: int64 [n + 1]. groups, episodes: int64 [n]. rewards: [n], the episode's, with
            those of single calls and less penalties.
        beta: > 0.
        label_smoothing: in [0, 0.5), the share of pairs that are believed to be the wrong way round (conservative DPO,
            Mitchell 2023, eq. 3).

    Returns:
        loss [T]; "margin": beta (d_chosen - d_rejected); "preferred": whether it is positive; "tied": whether the
        rewards are equal, with a margin of 0. All averaged as the loss is.

    Raises:
        BatchError: a group that is no pair, naming it.
    """
    check_above("beta", beta)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"objective_options.label_smoothing: {label_smoothing}, must be at least 0 and below 0.5")
    pairs, of_sequence = torch.stack([groups, episodes], dim=1).unique(dim=0, return_inverse=True)
    names, group, sizes = pairs[:, 0].unique(return_inverse=True, return_counts=True)
    if bool((sizes != 2).any()):
        bad = int((sizes != 2).nonzero()[0])
        raise BatchError(
            f"RolloutBatch.group_ids: group {int(names[bad])} has {int(sizes[bad])} episodes in one optimizer step; dpo"
            " needs exactly two, a chosen and a rejected one (and at most as many minibatches as groups)"
        )
    per_sequence = sequence_sums(logprobs - reference, mask, cu_seqlens)
    drift = per_sequence.new_zeros(len(pairs)).index_add(0, of_sequence, per_sequence)
    reward = drift.new_zeros(len(pairs)).index_copy(0, of_sequence, rewards.to(drift))
    first, second = torch.arange(len(pairs), device=drift.device).view(-1, 2).unbind(1)  # `pairs` is sorted by group
    gap = reward[first] - reward[second]
    tied = ~differ(reward[first], reward[second])
    margin = beta * gap.sign().masked_fill(tied, 0) * (drift[first] - drift[second])
    loss = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    loss = loss.masked_fill(tied, 0.0)
    of_token = spread_sequences(group[of_sequence], cu_seqlens, len(logprobs))
    stats = {"margin": margin.detach(), "preferred": margin > 0, "tied": tied}
    return loss[of_token], {name: value[of_token] for name, value in stats.items()}
