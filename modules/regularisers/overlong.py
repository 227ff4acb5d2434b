"""DAPO's soft penalty on answers that are too long."""

from __future__ import annotations

import torch
from torch import Tensor

from modules.episodes import sequence_sums, spread_sequences


def overlong(
    mask: Tensor, cu_seqlens: Tensor, episodes: Tensor, turns: Tensor, max_tokens: int, buffer_tokens: int
) -> Tensor:
    """0 up to max_tokens - buffer_tokens, rising linearly to 1 at max_tokens, and 1 beyond (DAPO, Yu et al. 2025,
    eq. 13, with the sign of a cost). The length is that of the episode, all its turns together, whether these are one
    sequence or several.

    Args:
        mask: bool [T], trained tokens, whose number in an episode is the answer's length. cu_seqlens: int64 [n + 1].
        episodes, turns: int64 [n], of each sequence.
        max_tokens: longest answer that is allowed. buffer_tokens: where the penalty begins before it.

    Returns:
        [T], the episode's cost at its last trained token, 0 elsewhere.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"regularisers.overlong: buffer_tokens={buffer_tokens} must be above 0 and at most max_tokens={max_tokens}"
        )
    lengths = sequence_sums(mask.long(), mask, cu_seqlens)
    of_sequence = episodes.unique(return_inverse=True)[1]
    total = torch.zeros_like(lengths).index_add(0, of_sequence, lengths)[of_sequence]
    cost = ((total - (max_tokens - buffer_tokens)).float() / buffer_tokens).clamp(0, 1)
    place = torch.where(lengths > 0, turns * len(turns) + torch.arange(len(turns), device=turns.device), -1)
    latest = torch.full_like(place, -1).scatter_reduce(0, of_sequence, place, "amax")[of_sequence]
    cost = cost * ((place == latest) & (lengths > 0))
    number = mask.cumsum(0)  # of each trained token, through all sequences
    last = mask & (number == spread_sequences(lengths.cumsum(0), cu_seqlens, len(mask)))
    return spread_sequences(cost, cu_seqlens, len(mask)) * last
