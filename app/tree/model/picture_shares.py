"""Pictures over a group of ranks: whose tower makes the features of each, and how rows of features travel.

    rank 0   picture A  ── rows of A ──>  ranks whose tokens are at them  ── gradients ──>  rank 0, added up
    rank 1   picture B  ── rows of B ──>  ranks whose tokens are at them  ── gradients ──>  rank 1, added up

Promises: a picture has one owner in a group, the same on every rank, so that it goes through one tower and its gradient
is counted once; every rank issues the same collectives, one exchange for a run that shows a picture to any of them and
one for its backward, whoever has rows or pictures. Without a group nothing travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from app.tree.attention.groups import RankGroup, exchange_rows
from app.tree.prefix_tree import Ints, PrefixTree
from app.tree.transfer import on_device


def dealt(tree: PrefixTree, size: int) -> list[list[int]]:
    """The pictures at tokens of a tree by their owners among `size` ranks, who get similar numbers of rows."""
    rows = tree.picture_rows
    shown = np.unique(picture_of(tree, rows[rows >= 0])).tolist()
    owned: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for picture in sorted(shown, key=lambda k: (-tree.pictures[k].tokens, tree.pictures[k].key)):
        least = loads.index(min(loads))
        owned[least].append(picture)
        loads[least] += tree.pictures[picture].tokens
    return owned


def picture_of(tree: PrefixTree, rows: Ints) -> Ints:
    """The pictures that rows of features are of."""
    found: Ints = np.searchsorted(tree.picture_starts, rows, "right") - 1
    return found


@dataclass(frozen=True, eq=False)
class Route:
    """How the rows of features of one run travel.

    Attributes:
        group: None where they do not.
        given: int64 [n], rows of this rank's pictures, for one rank after the other.
        send, receive: how many rows go to each rank, and come from it.
        order: int64 [m], which of the rows that this rank runs what it receives is for.
    """

    group: RankGroup | None
    given: Ints
    send: list[int]
    receive: list[int]
    order: Ints

    @classmethod
    def of(cls, group: RankGroup | None, wanted: Sequence[Ints], owners: Sequence[Ints]) -> Route:
        """`wanted`: the rows of features that each rank runs, in order; `owners`: of the picture of each of these."""
        rank, size = (0, 1) if group is None else (group.rank, group.size)
        given = [rows[by == rank] for rows, by in zip(wanted, owners, strict=True)]
        own = owners[rank]
        receive = np.bincount(own, minlength=size).tolist()
        return cls(group, np.concatenate(given), list(map(len, given)), receive, np.argsort(own, kind="stable"))

    def there(self, rows: Tensor) -> Tensor:
        """Collective: those given [n, W] -> those that this rank runs [m, W]."""
        if self.group is None:
            return rows
        received = exchange_rows(self.group, rows, self.send, self.receive)
        return received.new_empty(received.shape).index_copy_(0, on_device(self.order, rows.device), received)

    def back(self, rows: Tensor) -> Tensor:
        """Collective: gradients of those that this rank runs [m, W] -> of those given [n, W]."""
        if self.group is None:
            return rows
        return exchange_rows(self.group, rows[on_device(self.order, rows.device)], self.receive, self.send)
