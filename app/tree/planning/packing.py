"""Packs the tree's tokens into chunks, bottom up: pure data, no cost, no graphs.

Promises: every token that has to run is in exactly one chunk; a chunk holds at most the budget; its pieces hang
together or below one token, and cut no run of `uncut` tokens; parents come before children; no recursion, and linear
time but for sorting.

At every segment the groups still open below it are packed into bins of one chunk each (best fit, largest first). Full
bins are closed; one bin may stay open, and is joined with as much of the segment's lower end as fits. What is left of
the segment's upper end stays open for its parent.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal

from app.tree.planning.plan import Chunk, Piece
from app.tree.planning.uncut import Uncut
from app.tree.prefix_tree import PrefixTree

Order = Literal["heaviest", "longest"]

_NONE: list[int] = []
"""No pieces; never changed."""


@dataclass(frozen=True)
class Packing:
    """One way to pack.

    Attributes:
        budget: most tokens of a chunk.
        join: whether the emptiest bin below a segment stays open and runs together with the segment's lower end.
        order: which child comes first in a chunk, and so continues its parent's causal square: the one with most
            tokens below it, or the one with the longest path.
        even: long segments are cut into pieces of equal length, not into full ones and a rest.
    """

    budget: int
    join: bool = True
    order: Order = "heaviest"
    even: bool = False

    def __str__(self) -> str:
        words = [f"chunks of {self.budget:,}", "joined" if self.join else "apart", f"{self.order} first"]
        return ", ".join(words + ["even"] * self.even)


def pack(tree: PrefixTree, packing: Packing, uncut: Uncut | None = None) -> list[Chunk]:
    """The chunks of `tree`, parents before children; anchors and graphs are not decided yet. `uncut`: runs, none longer
    than the budget, that stay whole."""
    return _Packer(tree, packing, uncut).chunks()


class _Packer:
    """Piece ids are its own until `_build` renumbers them."""

    def __init__(self, tree: PrefixTree, packing: Packing, uncut: Uncut | None) -> None:
        self.tree, self.packing, self.budget, self.uncut = tree, packing, packing.budget, uncut
        self.start: list[int] = []  # tree tokens of each piece
        self.stop: list[int] = []
        self.joined: list[list[int]] = []  # pieces below it in the same chunk
        self.weight: list[int] = []  # tokens of the piece and everything joined below it
        self.reach: list[int] = []  # tokens of the longest path from the piece's first token down to a chunk's end
        self.older: list[int] = []  # the piece that was opened below the same segment before it, or -1
        self.closed: list[tuple[list[int], int]] = []  # (top pieces, piece above) of each chunk

    def chunks(self) -> list[Chunk]:
        parents = self.tree.segment_parent.tolist()
        offsets, needed = self.tree.segment_offset.tolist(), self.tree.segment_needed.tolist()
        # Pieces still open below each segment (the last entry: of roots, whose parent is -1) as chains of piece ids:
        # tens of thousands of small lists would wake the garbage collector, which then costs more than the packing.
        newest, older = [-1] * (len(parents) + 1), self.older
        for segment in range(len(parents) - 1, -1, -1):
            if needed[segment]:
                start = offsets[segment]
                piece = self._segment(start, start + needed[segment], self._chain(newest[segment]))
                older[piece], newest[parents[segment]] = newest[parents[segment]], piece
        for bin_, _ in self._bins(self._chain(newest[-1])):
            self.closed.append((bin_, -1))
        return self._build()

    def _chain(self, piece: int) -> list[int]:
        """A piece and those opened before it below the same segment, oldest first."""
        if piece < 0:
            return _NONE
        chain = []
        while piece >= 0:
            chain.append(piece)
            piece = self.older[piece]
        chain.reverse()
        return chain

    def _segment(self, start: int, stop: int, groups: list[int]) -> int:
        """Closes what is full at one segment and returns the piece that stays open."""
        bins = self._bins(groups)
        kept, held = _NONE, 0
        if bins and self.packing.join:
            emptiest = min(range(len(bins)), key=lambda b: bins[b][1])
            if bins[emptiest][1] < self.budget:
                kept, held = bins.pop(emptiest)
        low = self._low(start, stop, self.budget - held)
        if low == stop:  # a run that has no room beside what is below
            bins.append((kept, held))
            kept, held = _NONE, 0
            low = self._low(start, stop, self.budget)
        piece = self._piece(low, stop, kept, held)
        self.closed.extend((bin_, piece) for bin_, _ in bins)
        while low > start:
            stop, low = low, self._low(start, low, self.budget)
            above = self._piece(low, stop, _NONE, 0)
            self.closed.append(([piece], above))
            piece = above
        return piece

    def _low(self, start: int, stop: int, room: int) -> int:
        """Where the piece begins that ends at `stop`, in a segment from `start` on and a chunk with `room`."""
        low = max(start, stop - self._first(stop - start, room))
        return low if self.uncut is None else self.uncut.around(low, stop, room)

    def _first(self, tokens: int, room: int) -> int:
        """How many of a segment's last `tokens` go into a chunk with `room`."""
        if not self.packing.even or tokens <= room:
            return room
        rest = -(-(tokens - room) // self.budget)  # chunks the others need anyway
        return min(room, -(-tokens // (rest + 1)))

    def _piece(self, start: int, stop: int, joined: list[int], held: int) -> int:
        self.start.append(start)
        self.stop.append(stop)
        self.older.append(-1)
        self.joined.append(joined)
        self.weight.append(stop - start + held)
        self.reach.append(stop - start + max((self.reach[p] for p in joined), default=0))
        return len(self.start) - 1

    def _bins(self, groups: list[int]) -> list[tuple[list[int], int]]:
        """(pieces, tokens) of each bin. Best fit, largest first: a group goes where it leaves the least room."""
        weight, budget = self.weight, self.budget
        if not groups:
            return []
        total = sum([weight[piece] for piece in groups])
        if total <= budget:  # nearly always
            return [(groups, total)]
        bins: list[list[int]] = []
        room: list[tuple[int, int]] = []
        for piece in sorted(groups, key=lambda p: (-weight[p], p)):
            at = bisect_left(room, (weight[piece], -1))
            if at == len(room):
                bins.append([piece])
                insort(room, (budget - weight[piece], len(bins) - 1))
            else:
                left, chosen = room.pop(at)
                bins[chosen].append(piece)
                insort(room, (left - weight[piece], chosen))
        left_in = {chosen: left for left, chosen in room}
        return [(bin_, budget - left_in[b]) for b, bin_ in enumerate(bins)]

    def _build(self) -> list[Chunk]:
        """Closed groups as chunks, parents before children, pieces renumbered within their chunk."""
        depth = self.tree.token_depth
        size = self.weight if self.packing.order == "heaviest" else self.reach
        chunk_of, place = [0] * len(self.start), [0] * len(self.start)  # of each piece id
        chunks: list[Chunk] = []
        for tops, above in reversed(self.closed):  # a chunk is closed after everything below it
            pieces: list[Piece] = []
            stack = [(top, -1) for top in _rising(tops, size)]
            while stack:
                piece, parent = stack.pop()
                chunk_of[piece], place[piece] = len(chunks), len(pieces)
                if self.joined[piece]:
                    stack.extend((p, len(pieces)) for p in _rising(self.joined[piece], size))
                pieces.append(Piece(self.start[piece], self.stop[piece], parent))
            parent_chunk, parent_piece = (chunk_of[above], place[above]) if above >= 0 else (-1, -1)
            path = int(depth[pieces[0].start])
            tokens = sum(self.weight[top] for top in tops)
            chunks.append(Chunk(tuple(pieces), parent_chunk, parent_piece, path, tokens))
        return chunks


def _rising(pieces: list[int], size: list[int]) -> list[int]:
    return sorted(pieces, key=size.__getitem__) if len(pieces) > 1 else pieces
