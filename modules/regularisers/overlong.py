"""DAPO's soft penalty on answers that are too long."""

from __future__ import annotations

from torch import Tensor

from modules.segments import sequence_sums, spread


def overlong(mask: Tensor, cu_seqlens: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """0 up to max_tokens - buffer_tokens, rising linearly to 1 at max_tokens, and 1 beyond (DAPO, Yu et al. 2025,
    eq. 13, with the sign of a cost).

    Args:
        mask: bool [T], trained tokens, whose number in a sequence is the answer's length. cu_seqlens: int64 [n + 1].
        max_tokens: longest answer that is allowed. buffer_tokens: where the penalty begins before it.

    Returns:
        [T], the sequence's cost at its last trained token, 0 elsewhere.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"regularisers.overlong: buffer_tokens={buffer_tokens} must be above 0 and at most max_tokens={max_tokens}"
        )
    length = sequence_sums(mask.long(), mask, cu_seqlens)
    cost = ((length - (max_tokens - buffer_tokens)) / buffer_tokens).clamp(0, 1)
    number = mask.cumsum(0)  # of each trained token, through all sequences
    last = mask & (number == spread(length.cumsum(0), cu_seqlens, len(mask)))
    return spread(cost, cu_seqlens, len(mask)) * last
