"""Placeholders of pictures that see each other: runs of tree tokens that no chunk may cut. Pure data.

Promises: a run is what the model takes for one picture, placeholders next to each other; none is cut by a fork, and
what would make one of two pictures is refused.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from app.tree.planning.layout import Part
from app.tree.prefix_tree import Ints, PrefixTree


class Ahead(NamedTuple):
    """What rows of a chunk see of those after them: `parts`, in `layers`."""

    layers: frozenset[int]
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Uncut:
    """Runs of tree tokens [starts[k], stops[k]), ascending."""

    starts: list[int]
    stops: list[int]

    @classmethod
    def of(cls, tree: PrefixTree) -> Uncut:
        """Those of a tree's pictures.

        Raises:
            ValueError: pictures without a token of text between them, or one whose placeholders stand next to each
                other in one sequence and apart in another.
        """
        refuse_adjacent(tree)
        rows, parents = tree.picture_rows, tree.token_parent
        goes_on = (rows >= 0) & (parents >= 0) & (rows[parents] >= 0)
        apart = goes_on[tree.segment_offset]
        if apart.any():
            row = int(rows[tree.segment_offset[int(apart.argmax())]])
            raise ValueError(
                f"pictures[{int(np.searchsorted(tree.picture_starts, row, 'right')) - 1}] has text between its"
                " placeholders in one sequence and none at the same place in another, and placeholders next to each"
                " other see each other; lay it out alike in all"
            )
        starts = np.flatnonzero((rows >= 0) & ~goes_on)
        stops = np.flatnonzero((rows >= 0) & ~np.append(goes_on[1:], False)) + 1
        return cls(starts.tolist(), stops.tolist())

    @property
    def longest(self) -> int:
        """Tokens of the longest; 0 where there is none."""
        return max((stop - start for start, stop in zip(self.starts, self.stops)), default=0)

    def around(self, cut: int, stop: int, room: int) -> int:
        """Where to cut tokens that end at `stop` instead of at `cut`, so that no run is cut: after the run there, else
        before it if what follows then has `room`, else `stop`."""
        k = bisect_right(self.starts, cut) - 1
        if k < 0 or not self.starts[k] < cut < self.stops[k]:
            return cut
        if self.stops[k] < stop:
            return self.stops[k]
        return self.starts[k] if stop - self.starts[k] <= room else stop

    def parts(self, tokens: Ints) -> tuple[Part, ...]:
        """What rows of a chunk, which are these tree tokens, see of those after them."""
        found = []
        firsts = np.flatnonzero(np.isin(tokens, self.starts))
        for first, token in zip(firsts.tolist(), tokens[firsts].tolist()):
            more = self.stops[bisect_right(self.starts, token) - 1] - token - 1
            if more:
                seen = np.triu(np.ones((more, more), bool))
                found.append(Part(first, first + more, first + 1, first + 1 + more, mask=seen))
        return tuple(found)


def refuse_adjacent(tree: PrefixTree) -> None:
    """Raises ValueError for two pictures without a token of text between them, which a model would take for one."""
    rows, parents = tree.picture_rows, tree.token_parent
    first = np.isin(rows, tree.picture_starts[:-1]) & (parents >= 0) & (rows[parents] >= 0)
    if first.any():
        picture = int(np.searchsorted(tree.picture_starts, rows[int(first.argmax())]))
        raise ValueError(
            f"pictures[{picture}] follows another without a token between them, and the model would count both as one;"
            " put the tokens around pictures that the model's chat template does"
        )
