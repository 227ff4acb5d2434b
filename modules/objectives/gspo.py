"""Sequence-level ratio (GSPO, Zheng et al. 2025, "Group sequence policy optimization")."""

from __future__ import annotations

import torch
from torch import Tensor

from modules.episodes import sequence_means, spread_sequences
from modules.objectives.ratio import MAX_LOG_RATIO, check_clip
from modules.objectives.traits import traits


@traits(aggregation="sequence_mean", sequence_ratio=True)
def gspo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """s = exp(mean over the sequence of (logp_t - old_t)); loss = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)
    (eqs. 5 and 7). With one advantage a sequence, as in the paper, all its tokens carry the same loss and
    aggregation "sequence_mean", the default here, gives eq. 5. Advantages that differ within a sequence make it
    GSPO-token (eq. 13): the ratio is the sequence's, its gradient a token's own. A `correction` is of
    `level: geometric` unless it names another one; with `level: token` the gradient is sum_t w_t s d logp_t, as in
    GSPO-token, not that of the weighted loss.

    Args:
        logprobs, old, advantages: [T]. mask: bool [T]. cu_seqlens: int64 [n + 1].
        clip_low, clip_high: far smaller than a token's, because a mean of many log-ratios moves little.

    Returns:
        loss [T]; "clip_fraction": whether clipping cut its sequence off.
    """
    check_clip(clip_low, clip_high)
    log_ratio = sequence_means(logprobs - old, mask, cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).detach()
    # The value is s, the gradient s * d logp_t: summed over a sequence with weights 1 / length, that of s itself.
    ratio = spread_sequences(log_ratio.exp(), cu_seqlens, len(logprobs)) * (logprobs - logprobs.detach()).exp()
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, bounded), {"clip_fraction": bounded < free}
