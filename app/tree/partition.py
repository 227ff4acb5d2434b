"""Splits a tree over ranks (or minibatches): contiguous in depth-first order, smallest possible maximum of the cost.

Promises: every sequence is in exactly one part; a sequence that another one extends stays with it; parts may
be empty (fewer leaves than parts); the cut is optimal among contiguous ones and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from app.tree.prefix_tree import Ints, PrefixTree

PrefixCost = Callable[[Ints], npt.ArrayLike]


def tokens_and_pairs(lengths: Ints) -> npt.NDArray[np.float64]:
    """Cost of running prefixes of `lengths` tokens: tokens + attention pairs / 8192 (linear and quadratic FLOPs balance
    near 8,192 tokens of context for the model sizes in use)."""
    n = lengths.astype(np.float64)
    return n + n * (n + 1) / 2 / 8192


def partition(
    tree: PrefixTree, num_parts: int, cost: PrefixCost | None = None, token_limit: int | None = None
) -> list[list[int]]:
    """Sequence indices of `num_parts` parts, in depth-first order, some possibly empty.

    Args:
        tree: the tree of the whole batch.
        num_parts: ranks or minibatches, at least 1.
        cost: maps prefix lengths (int64 [n]) to the cost of running one prefix of that length from the root
            (non-decreasing); a part costs what its own prefix tree costs: its paths, each shared token once.
            Default: `tokens_and_pairs`.
        token_limit: most dense tokens of a part (what its per-token columns and outputs take memory for).

    Raises:
        ValueError: no contiguous cut keeps the limit.

    The cost of a part is (cost of its leaves beyond what they share with their left neighbour) + (the prefix its first
    leaf shares with the part before it, which has to be computed again). As the left end moves right the cost of a part
    never rises, so for a given bound greedy filling is optimal and bisection finds the smallest bound.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    groups = _leaf_groups(tree)
    if not groups:
        return [[] for _ in range(num_parts)]
    run_cost = cost or tokens_and_pairs
    leaves = np.array([group[-1] for group in groups], np.int64)
    full = np.asarray(run_cost(tree.sequence_length[leaves]), np.float64)
    again = np.asarray(run_cost(_shared_between_groups(tree, groups)), np.float64)
    total = np.concatenate([[0.0], np.cumsum(full - again)])  # total[j] - total[i] + again[i]: cost of leaves i..j-1
    dense = np.concatenate([[0], np.cumsum([tree.sequence_length[group].sum() for group in groups])])
    most = dense[-1] if token_limit is None else token_limit
    furthest = np.searchsorted(dense, dense + most, side="right") - 1  # the latest end of a part, by its start

    low, high = float(full.max()), float(total[-1] + again[0])
    low = max(low, high / num_parts * (1 - 1e-9))
    low = min(low, high)
    if _cut(total, again, furthest, high, num_parts) is None:
        raise ValueError(
            f"token_limit={token_limit}: {int(dense[-1])} tokens, at most {np.diff(dense).max()} of them inseparable,"
            f" cannot be cut into {num_parts} parts of at most so many; raise the limit, use more parts, or make the"
            " batch smaller"
        )
    if _cut(total, again, furthest, low, num_parts) is not None:
        high = low
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _cut(total, again, furthest, middle, num_parts) is None:
            low = middle
        else:
            high = middle
    bounds = _cut(total, again, furthest, high, num_parts)
    assert bounds is not None, "the whole tree fits the largest bound"
    return [[i for group in groups[a:b] for i in group] for a, b in pairwise(bounds)]


def _leaf_groups(tree: PrefixTree) -> list[list[int]]:
    """Each leaf sequence with the sequences that are prefixes of it (or equal to it) and precede it."""
    groups: list[list[int]] = []
    pending: list[int] = []
    is_leaf = np.zeros(tree.num_sequences, bool)
    is_leaf[tree.leaf_sequences] = True
    for i in tree.sorted_sequences.tolist():
        pending.append(i)
        if is_leaf[i]:
            groups.append(pending)
            pending = []
    return groups


def _shared_between_groups(tree: PrefixTree, groups: list[list[int]]) -> Ints:
    """int64 [groups]: tokens each group's leaf shares with the leaf of the group before it."""
    sizes = np.array([len(group) for group in groups])
    starts = np.cumsum(sizes) - sizes
    return tree.shared_with_previous[starts]


def _cut(
    total: npt.NDArray[np.float64], again: npt.NDArray[np.float64], furthest: Ints, bound: float, num_parts: int
) -> list[int] | None:
    """Greedy bounds of at most `num_parts` parts, each costing at most `bound` and ending at most at `furthest[start]`;
    None when that is not possible."""
    slack = bound * (1 + 1e-12)
    bounds = [0]
    last = len(total) - 1
    for _ in range(num_parts):
        start = bounds[-1]
        if start == last:
            bounds.append(last)
            continue
        stop = int(np.searchsorted(total, slack + total[start] - again[start], side="right")) - 1
        stop = min(stop, int(furthest[start]))
        if stop <= start:
            return None
        bounds.append(stop)
    return bounds if bounds[-1] == last else None
