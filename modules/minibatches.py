"""Which sequences each optimizer step and each rank trains on.

Promises: every sequence is in exactly one minibatch of an epoch and on exactly one rank; minibatches are a function of
the batch and the seed alone, whatever the number of ranks; empty minibatches (fewer episodes than minibatches) and
empty ranks are ordinary.
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


def rank_shares(
    batch: RolloutBatch, share: str, ranks: int, tree: PrefixTree | None = None, **options: Any
) -> list[list[int]]:
    """The sequences that each of `ranks` ranks runs, ascending; balanced by the predicted cost of their trees.

    Args:
        share: see `PrefixTree.build`. tree: that of `build_tree`, where it is at hand.
        options: see `app.tree.partition`.
    """
    if ranks == 1:
        return [list(range(len(batch)))]
    parts = partition(build_tree(batch, share) if tree is None else tree, ranks, **options)
    return [sorted(part) for part in parts]
