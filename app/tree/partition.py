"""Splits a tree over ranks (or minibatches), so that the part that costs most costs little.

Promises: every sequence is in exactly one part; a sequence that another one extends stays with it; parts may
be empty (fewer leaves than parts); no cut into parts that are contiguous in depth-first order is better, and the same
tree is split in the same way everywhere.

Contiguous parts repeat little of each other, and the best of them are found exactly. Where episodes are long and parts
many they are uneven all the same: then subtrees are dealt too, the costliest first, each to the part that is cheapest
with it ("longest processing time first", Graham 1969, with costs that know what a part has already).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from app.tree.prefix_tree import Ints, PrefixTree

Floats = npt.NDArray[np.float64]
PrefixCost = Callable[[Ints], npt.ArrayLike]


TOWER = 0.4
"""Cost of a picture's way through a tower, of that of its placeholders through the layers: what the FLOPs are for a
picture of 228 placeholders in a 4B Qwen3-VL."""


def tokens_and_pairs(lengths: Ints) -> Floats:
    """Cost of running prefixes of `lengths` tokens: tokens + attention pairs / 8192 (linear and quadratic FLOPs balance
    near 8,192 tokens of context for the model sizes in use)."""
    n = lengths.astype(np.float64)
    return n + n * (n + 1) / 2 / 8192


def partition(
    tree: PrefixTree,
    num_parts: int,
    cost: PrefixCost | None = None,
    token_limit: int | None = None,
    together: Ints | None = None,
) -> list[list[int]]:
    """Sequence indices of `num_parts` parts, each in depth-first order, some possibly empty; the parts in the order of
    their first sequences.

    Args:
        tree: the tree of the whole batch.
        num_parts: ranks or minibatches, at least 1.
        cost: maps prefix lengths (int64 [n]) to the cost of running one prefix of that length from the root
            (non-decreasing); a part costs what its own prefix tree costs: its paths, each shared token once.
            Default: `tokens_and_pairs`. A picture adds `TOWER` times the cost of as many tokens as it has, once for
            the paths that share its first place.
        token_limit: most dense tokens of a part (what its per-token columns and outputs take memory for).
        together: [sequences] those of one number are in one part. They are looked at in the order of the numbers' first
            sequences, so that parts may be out of depth-first order, and cost less than was counted, where sequences of
            one number lie among those of others.

    Raises:
        ValueError: no contiguous cut keeps the limit, and none was found that is not contiguous.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    groups = _leaf_groups(tree)
    if not groups:
        return [[] for _ in range(num_parts)]
    run_cost = cost or tokens_and_pairs
    leaves = np.array([group[-1] for group in groups], np.int64)
    full = np.asarray(run_cost(tree.sequence_length[leaves]), np.float64)
    shared = _shared_between_groups(tree, groups)
    labels = None
    if together is not None:
        order, labels = _labelled(groups, together)
        shared = _shared_in_order(shared, order)
        groups, leaves, full = [groups[leaf] for leaf in order], leaves[order], full[order]
    again = np.asarray(run_cost(shared), np.float64)
    if tree.pictures:
        each = TOWER * np.asarray(run_cost(np.array([picture.tokens for picture in tree.pictures])), np.float64)
        full += np.array([_towers(tree, leaf, tree.sequence_length[leaf], each) for leaf in leaves])
        again += np.array([_towers(tree, leaf, stop, each) for leaf, stop in zip(leaves, shared)])
    dense = np.array([tree.sequence_length[group].sum() for group in groups], np.int64)
    if labels is not None:
        starts = np.flatnonzero(np.diff(labels, prepend=-1))
        runs = np.split(np.arange(len(groups)), starts[1:])
        groups = [[i for leaf in run for i in groups[leaf]] for run in runs]
        full, again, dense = _merged(full, again, dense, starts)
    most = int(dense.sum()) if token_limit is None else token_limit
    best = _contiguous(full, again, dense, most, num_parts)
    for share in _UNITS if num_parts > 1 else ():
        cut = _dealt(full, again, dense, most, num_parts, share)
        if cut is not None and (best is None or cut[0] < _WORTH * best[0]):
            best = cut
    if best is None:
        raise ValueError(
            f"token_limit={token_limit}: {dense.sum()} tokens, at most {dense.max()} of them inseparable,"
            f" cannot be cut into {num_parts} parts of at most so many; raise the limit, use more parts, or make the"
            " batch smaller"
        )
    return [[i for leaf in part for i in groups[leaf]] for part in best[1]]


_Cut = tuple[float, list[list[int]]]  # largest cost of a part; leaves of each part
_UNITS = (1.0, 0.5, 0.25)  # subtrees that are dealt cost at most this share of the average part
_MOST_UNITS = 16  # a part: finer ones tear shared prefixes apart, and take time
_WORTH = 0.999  # of the cost: a gain below is none


def _contiguous(full: Floats, again: Floats, dense: Ints, most: int, num_parts: int) -> _Cut | None:
    """The best cut of leaves in depth-first order; None where none keeps the limit.

    Args:
        full: [leaves] cost of each alone.
        again: [leaves] cost of what it shares with the leaf before it.
        dense: [leaves] tokens, those of its prefix sequences included; `most`: of a part.

    The cost of a part is (cost of its leaves beyond what they share with their left neighbour) + (the prefix its first
    leaf shares with the part before it, which has to be computed again). As the left end moves right the cost of a part
    never rises, so for a given bound greedy filling is optimal and bisection finds the smallest bound.
    """
    total = np.concatenate([[0.0], np.cumsum(full - again)])  # total[j] - total[i] + again[i]: cost of leaves i..j-1
    tokens = np.concatenate([[0], np.cumsum(dense)])
    furthest = np.searchsorted(tokens, tokens + most, side="right") - 1  # the latest end of a part, by its start
    low, high = float(full.max()), float(total[-1] + again[0])
    low = max(low, high / num_parts * (1 - 1e-9))
    low = min(low, high)
    if _fill(total, again, furthest, high, num_parts) is None:
        return None
    if _fill(total, again, furthest, low, num_parts) is not None:
        high = low
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _fill(total, again, furthest, middle, num_parts) is None:
            low = middle
        else:
            high = middle
    bounds = _fill(total, again, furthest, high, num_parts)
    assert bounds is not None, "the whole tree fits the largest bound"
    costs = [total[b] - total[a] + again[a] for a, b in pairwise(bounds) if b > a]
    return float(max(costs)), [list(range(a, b)) for a, b in pairwise(bounds)]


def _dealt(full: Floats, again: Floats, dense: Ints, most: int, num_parts: int, share: float) -> _Cut | None:
    """Subtrees of at most `share` of the average part, dealt one by one; None where there are too many of them, or one
    finds no part with room. Arguments as `_contiguous`."""
    total = np.concatenate([[0.0], np.cumsum(full - again)])
    starts = _subtrees(total, again, share * total[-1] / num_parts, _MOST_UNITS * num_parts)
    if starts is None:
        return None
    ends = np.append(starts[1:], len(full))
    # What two subtrees share is the least of these between them: the places where they were taken apart lie among them.
    cost, again, tokens = _merged(full, again, dense, starts)
    there = np.zeros((num_parts, len(starts)))  # cost of what a part has of a subtree already
    loads, held = np.zeros(num_parts), np.zeros(num_parts, np.int64)
    owners = np.empty(len(starts), np.int64)
    for unit in np.argsort(-cost, kind="stable"):
        after = np.where(held + tokens[unit] <= most, loads + cost[unit] - there[:, unit], np.inf)
        part = int(np.argmin(after))
        if after[part] == np.inf:
            return None
        owners[unit], loads[part] = part, after[part]
        held[part] += tokens[unit]
        right, left = there[part, unit + 1 :], there[part, :unit]
        np.maximum(right, np.minimum.accumulate(again[unit + 1 :]), out=right)
        np.maximum(left, np.minimum.accumulate(again[unit:0:-1])[::-1], out=left)
    dealt = [[k for u in np.flatnonzero(owners == p) for k in range(starts[u], ends[u])] for p in range(num_parts)]
    return float(loads.max()), sorted(dealt, key=lambda part: part or [len(full)])


def _merged(full: Floats, again: Floats, dense: Ints, starts: Ints) -> tuple[Floats, Floats, Ints]:
    """The three, as `_contiguous` takes them, of the runs of leaves that begin at `starts`."""
    total = np.concatenate([[0.0], np.cumsum(full - again)])
    ends = np.append(starts[1:], len(full))
    return total[ends] - total[starts] + again[starts], again[starts], np.add.reduceat(dense, starts)


def _labelled(groups: list[list[int]], together: Ints) -> tuple[Ints, Ints]:
    """The leaves in the order of their numbers' first leaves, and each one's number (of its rank in that order).
    Numbers of a sequence and of one that extends it are one."""
    names = np.unique(together, return_inverse=True)[1]
    for group in groups:
        for other in {*names[group].tolist()} - {int(names[group[-1]])}:
            names[names == other] = names[group[-1]]
    _, first, number = np.unique(names[[group[-1] for group in groups]], return_index=True, return_inverse=True)
    order = np.argsort(first[number], kind="stable")
    return order, first[number][order]


def _shared_in_order(shared: Ints, order: Ints) -> Ints:
    """What each leaf of `order` shares with the one before it there; `shared`: the same of depth-first order."""
    found = np.zeros_like(shared)
    for place, (before, leaf) in enumerate(pairwise(order.tolist()), start=1):
        found[place] = shared[min(before, leaf) + 1 : max(before, leaf) + 1].min()
    return found


def _towers(tree: PrefixTree, sequence: int, stop: int, each: Floats) -> float:
    """What the distinct pictures in the first `stop` tokens of a sequence cost; `each`: by picture."""
    rows = tree.picture_rows[tree.sequence_tokens([sequence])[:stop]]
    return float(each[np.unique(np.searchsorted(tree.picture_starts, rows[rows >= 0], "right") - 1)].sum())


def _subtrees(total: Floats, again: Floats, limit: float, most: int) -> Ints | None:
    """First leaf of each: runs of leaves are parted where they share least until they cost at most `limit`; None where
    that makes more than `most`."""
    starts, left = list[int](), [(0, len(again))]
    while left:
        a, b = left.pop()
        if b - a == 1 or total[b] - total[a] + again[a] <= limit:
            starts.append(a)
            continue
        middle = a + 1 + int(np.argmin(again[a + 1 : b]))
        left += [(middle, b), (a, middle)]
        if len(starts) + len(left) > most:
            return None
    return np.array(starts, np.int64)


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


def _fill(total: Floats, again: Floats, furthest: Ints, bound: float, num_parts: int) -> list[int] | None:
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
