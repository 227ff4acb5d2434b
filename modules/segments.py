"""Sums and means over the sequences of flat tensors, without loops and without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def of_token(cu_seqlens: Tensor, total: int) -> Tensor:
    """int64 [T]: which sequence each token belongs to. `cu_seqlens` int64 [n + 1], on the device of the result."""
    sequences = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    return sequences.repeat_interleave(cu_seqlens.diff(), output_size=total)


def sequence_sums(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [n]: sums over the masked tokens of each sequence."""
    chosen = torch.where(mask, values, torch.zeros_like(values))
    zeros = values.new_zeros(len(cu_seqlens) - 1)
    return zeros.index_add(0, of_token(cu_seqlens, len(values)), chosen)


def sequence_means(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [n]: means over the masked tokens of each sequence; 0 for sequences without any."""
    counts = sequence_sums(torch.ones_like(values), mask, cu_seqlens)
    return sequence_sums(values, mask, cu_seqlens) / counts.clamp(min=1)


def spread(per_sequence: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """[n] -> [T]: each token gets its sequence's number."""
    return per_sequence[of_token(cu_seqlens, total)]
