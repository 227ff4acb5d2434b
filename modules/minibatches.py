"""Which sequences each optimizer step and each rank trains on.

Promises: every sequence is in exactly one minibatch of an epoch and on exactly one rank; the split is a function of the
batch and the seed alone, so ranks agree without talking, and minibatches do not depend on the number of ranks; empty
minibatches (fewer episodes than minibatches) and empty ranks are ordinary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.batch import RolloutBatch
from app.tree import PrefixTree, partition


def build_tree(batch: RolloutBatch, share: str) -> PrefixTree:
    """The prefix tree of a batch: trained tokens are scored, and only equal temperatures share tokens (a token's
    log-probability depends on its sequence's temperature). `share`: see `PrefixTree.build`."""
    keys = batch.temperatures.unique(return_inverse=True)[1]
    return PrefixTree.build(batch.sequences(), scored=batch.split(batch.loss_mask), keys=keys.numpy(), share=share)


def split_minibatches(batch: RolloutBatch, count: int, seed: Sequence[int]) -> list[list[int]]:
    """Sequence indices (ascending) of `count` minibatches.

    What stays together is a group, whose samples share their prompt and whose advantages balance; when there are fewer
    groups than minibatches, an episode, whose turns extend one another. These are shuffled by `seed` (any number
    of integers, for example seed, policy version, epoch) and dealt in equal numbers.
    """
    if count == 1:
        return [list(range(len(batch)))]
    groups = batch.group_ids.numpy()
    pairs = np.stack([groups, batch.episode_ids.numpy()], axis=1)
    units = np.unique(groups, return_inverse=True)[1]
    if units.max() + 1 < count:
        units = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.random.default_rng([*seed]).permutation(units.max() + 1)
    return [np.flatnonzero(np.isin(units, part)).tolist() for part in np.array_split(order, count)]


def rank_share(
    batch: RolloutBatch, indices: Sequence[int], share: str, rank: int, ranks: int, **options: Any
) -> list[int]:
    """The sequences among `indices` that rank `rank` of `ranks` runs; balanced by the predicted cost of their trees.
    `options`: see `app.tree.partition`."""
    if ranks == 1 or not indices:
        return list(indices)
    parts = partition(build_tree(batch.select(indices), share), ranks, **options)
    return sorted(indices[i] for i in parts[rank])
