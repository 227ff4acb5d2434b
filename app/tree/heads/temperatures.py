"""Temperatures of sequences, and of the tokens they share.

Promises: a number or a shape that cannot be is refused, naming it; so are sequences that share tokens and differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.tree.prefix_tree import PrefixTree
from app.tree.transfer import on_device


def token_temperatures(
    tree: PrefixTree, per_sequence: np.ndarray[Any, np.dtype[np.float64]], device: torch.device, dtype: torch.dtype
) -> Tensor | float:
    """Temperature of every tree token from those of the sequences through it, which have to agree."""
    low, high = np.full(tree.num_segments, np.inf), np.full(tree.num_segments, -np.inf)
    np.minimum.at(low, tree.sequence_segment, per_sequence)
    np.maximum.at(high, tree.sequence_segment, per_sequence)
    for segment in range(tree.num_segments - 1, -1, -1):
        parent = tree.segment_parent[segment]
        if parent >= 0:
            low[parent], high[parent] = min(low[parent], low[segment]), max(high[parent], high[segment])
    if (low != high).any():
        raise ValueError(
            "temperatures: sequences with different temperatures share tokens; build the tree with"
            " keys=<one integer per temperature>, so that only equal ones share"
        )
    if (low == low[0]).all():
        return float(low[0])
    return on_device(np.repeat(low, tree.segment_length), device, dtype)


def sequence_temperatures(tree: PrefixTree, temperatures: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """float64 [N]: one a sequence of the tree, above 0."""
    values = np.asarray(temperatures.detach().cpu() if isinstance(temperatures, Tensor) else temperatures, np.float64)
    if values.shape != (tree.num_sequences,):
        raise ValueError(
            f"temperatures: expected {tree.num_sequences} numbers, one a sequence, got shape {values.shape}"
        )
    if not (values > 0).all():
        raise ValueError(f"temperatures[{int(np.argmin(values > 0))}] must be above 0")
    return values
