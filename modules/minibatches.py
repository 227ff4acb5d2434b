"""Which sequences each optimizer step and each rank trains on.

Promises: every sequence is in exactly one minibatch of an epoch and on exactly one rank; minibatches are a function of
the batch and the seed alone, whatever the number of ranks; empty ranks are ordinary, and so are empty minibatches where
a batch has fewer episodes than minibatches (the last of a pass over recorded tasks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.batch import RolloutBatch
from app.tree import PrefixTree, partition


def build_tree(batch: RolloutBatch, share: str, indices: Sequence[int] | None = None) -> PrefixTree:
    """The prefix tree of the sequences `indices` (default: all) of a batch: trained tokens are scored, and only equal
    temperatures share tokens (a token's log-probability depends on its sequence's temperature). `share`: see
    `PrefixTree.build`."""
    if indices is not None and not len(indices):
        return PrefixTree.build([])
    sequences, scored, temperatures = batch.sequences(), batch.split(batch.loss_mask), batch.temperatures
    if indices is not None and len(indices) < len(batch):
        sequences, scored = [sequences[i] for i in indices], [scored[i] for i in indices]
        temperatures = temperatures[list(indices)]
    keys = temperatures.unique(return_inverse=True)[1]
    return PrefixTree.build(sequences, scored=scored, keys=keys.numpy(), share=share)


def split_minibatches(
    batch: RolloutBatch, count: int, seed: Sequence[int], whole_groups: bool = False
) -> list[list[int]]:
    """Sequence indices (ascending) of `count` minibatches.

    What stays together is a group, whose samples share their prompt and whose advantages balance; when there are fewer
    groups than minibatches, an episode, whose turns extend one another. These are shuffled by `seed` (any number
    of integers, for example seed, policy version, epoch) and dealt in equal numbers.

    Args:
        whole_groups: some minibatches are empty rather than that a group is taken apart.
    """
    if count == 1:
        return [list(range(len(batch)))]
    groups = batch.group_ids.numpy()
    pairs = np.stack([groups, batch.episode_ids.numpy()], axis=1)
    units = np.unique(groups, return_inverse=True)[1]
    if units.max() + 1 < count and not whole_groups:
        units = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.random.default_rng([*seed]).permutation(units.max() + 1)
    return [np.flatnonzero(np.isin(units, part)).tolist() for part in np.array_split(order, count)]


def rank_shares(
    batch: RolloutBatch,
    share: str,
    ranks: int,
    tree: PrefixTree | None = None,
    indices: Sequence[int] | None = None,
    **options: Any,
) -> list[list[int]]:
    """Which sequences of `indices` (default: all) each of `ranks` ranks runs, as ascending positions in `indices`;
    balanced by the predicted cost of their trees.

    Args:
        share: see `PrefixTree.build`. tree: that of `build_tree` for `indices`, where it is at hand.
        options: see `app.tree.partition`.
    """
    if ranks == 1:
        return [list(range(len(batch) if indices is None else len(indices)))]
    parts = partition(build_tree(batch, share, indices) if tree is None else tree, ranks, **options)
    return [sorted(part) for part in parts]
