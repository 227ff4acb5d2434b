"""Where the rows of a tree of pieces lie for convolutions and for scans over blocks: pure data.

Promises: every row has its own ancestors, however short the pieces above it are; index arrays only, no torch.

A forward runs `rows` tokens, cut into *pieces*: piece p is rows [first[p], first[p] + length[p]) and continues piece
`parent[p]` of the same forward, or, where that is negative, the given *start* number -1 - parent[p].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from app.tree.prefix_tree import Ints

BLOCKS = (1, 4, 16, 32, 64)
"""Rows of a block of a scan, to choose from. Every piece begins a block of its own, so short pieces want small ones."""

_BLOCK_ROWS, _LEVEL_ROWS = 64, 64
"""Rows that a block costs beside its own (products of states, each as large as some 64 rows), and that one more step
along the longest path costs (a few small calls)."""


@dataclass(frozen=True, eq=False)
class ConvolutionRows:
    """Rows for a convolution whose window reaches so many tokens back.

    Attributes:
        gather: int64 [m], rows of [starts | rows]: each piece behind the tokens before it.
        select: int64 [n], where in these m rows each row's output stands.
        tails: int64 [pieces, reach], the last tokens up to each piece's end, as rows of [starts | rows].
    """

    gather: Ints
    select: Ints
    tails: Ints


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Blocks of a scan, ordered by level: those of one level need only states of the level before, or starts.

    Attributes:
        rows: int64 [blocks, size], row of each place, or n where there is none.
        places: int64 [n], place of each row in the blocks laid end to end.
        above: int64 [blocks], which block of the level before each starts from the end of; in the first level, which
            start it starts from.
        levels: first block of each level, and the number of blocks.
        last: int64 [pieces], the block each piece ends with.
    """

    rows: Ints
    places: Ints
    above: Ints
    levels: tuple[int, ...]
    last: Ints


@dataclass(frozen=True, eq=False)
class Wave:
    """Pieces whose parents have all run: what a kernel that takes sequences of any length can run in one call.

    Attributes:
        rows: int64 [m], rows of its pieces laid end to end.
        pieces: int64 [p]. above: int64 [p], which piece of the wave before, or in the first wave which start, each
            continues.
        tree: its pieces by themselves, each a root with a start of its own.
    """

    rows: Ints
    pieces: Ints
    above: Ints
    tree: PieceTree


class PieceTree:
    """Pieces, depth first (a parent comes before its children), and the starts that their roots continue.

    `kept`: what is derived from the tree and shared by all layers that run over it.
    """

    def __init__(self, lengths: Sequence[int] | Ints, parents: Sequence[int] | Ints, starts: int = 1) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self.parents = np.asarray(parents, np.int64)
        self.starts = starts
        self.first: Ints = np.cumsum(self.lengths) - self.lengths
        self.rows = int(self.lengths.sum())
        self._convolutions: dict[int, ConvolutionRows] = {}
        self._blocks: dict[int, BlockRows] = {}
        self.kept: dict[Any, Any] = {}

    def convolution(self, reach: int) -> ConvolutionRows:
        """Rows for a window of `reach` tokens before each."""
        if reach not in self._convolutions:
            base = self.starts * reach
            before: list[Ints] = []
            tails: list[Ints] = []
            for parent, first, length in zip(self.parents, self.first, self.lengths, strict=True):
                start = reach * (-1 - parent)
                before.append(tails[parent] if parent >= 0 else np.arange(start, start + reach))
                own = base + np.arange(first + max(0, length - reach), first + length)
                tails.append(np.concatenate([before[-1], own])[len(own) :])
            runs = [
                np.concatenate([above, base + np.arange(first, first + length)])
                for above, first, length in zip(before, self.first, self.lengths, strict=True)
            ]
            pieces = np.repeat(np.arange(len(self.lengths)), self.lengths)
            select = np.arange(self.rows) + reach * (pieces + 1)
            self._convolutions[reach] = ConvolutionRows(np.concatenate(runs), select, np.array(tails, np.int64))
        return self._convolutions[reach]

    @cached_property
    def block(self) -> int:
        """The size of `BLOCKS` with the least work: rows, padding included, and levels."""
        return min(BLOCKS, key=lambda size: (self._work(size), size))

    @property
    def scanned(self) -> tuple[int, int]:
        """Rows of the blocks, padding included, and levels."""
        counts = -(-self.lengths // self.block)
        return int(counts.sum()) * self.block, int(self._depths(counts).max(initial=0))

    def blocks(self, size: int) -> BlockRows:
        """The blocks of a scan, `size` rows each."""
        if size not in self._blocks:
            counts = -(-self.lengths // size)
            begins = np.cumsum(counts) - counts
            piece = np.repeat(np.arange(len(counts)), counts)
            within = np.arange(len(piece)) - begins[piece]
            level = self._depths(counts)[piece] - counts[piece] + within
            order = np.argsort(level, kind="stable")
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            place = within[:, None] * size + np.arange(size)
            inside = place < self.lengths[piece][:, None]
            rows = np.where(inside, self.first[piece][:, None] + place, self.rows)[order]
            last = rank[begins + counts - 1]
            parent = self.parents[piece]
            bounds = np.searchsorted(level[order], np.arange(int(level.max(initial=-1)) + 2))
            before = np.where(within > 0, rank[np.arange(len(piece)) - 1], last[np.maximum(parent, 0)])
            above = np.where((within == 0) & (parent < 0), -1 - parent, before - bounds[np.maximum(level - 1, 0)])
            places = np.empty(self.rows, np.int64)
            flat = rows.reshape(-1)
            places[flat[flat < self.rows]] = np.flatnonzero(flat < self.rows)
            self._blocks[size] = BlockRows(rows, places, above[order], tuple(bounds.tolist()), last)
        return self._blocks[size]

    @cached_property
    def waves(self) -> tuple[Wave, ...]:
        """All pieces, by how many of the same forward are above them."""
        depth = np.zeros(len(self.lengths), np.int64)
        place = np.zeros(len(self.lengths), np.int64)
        waves: list[list[int]] = []
        for piece, parent in enumerate(self.parents.tolist()):
            depth[piece] = 0 if parent < 0 else depth[parent] + 1
            if depth[piece] == len(waves):
                waves.append([])
            place[piece] = len(waves[depth[piece]])
            waves[depth[piece]].append(piece)
        found = []
        for members in waves:
            pieces = np.array(members, np.int64)
            parents = self.parents[pieces]
            rows = np.concatenate([np.arange(f, f + n) for f, n in zip(self.first[pieces], self.lengths[pieces])])
            own = PieceTree(self.lengths[pieces], -1 - np.arange(len(pieces)), len(pieces))
            found.append(Wave(rows, pieces, np.where(parents < 0, -1 - parents, place[np.maximum(parents, 0)]), own))
        return tuple(found)

    def _work(self, size: int) -> int:
        """Work in rows of a small block. Each row of a block meets all others, so in larger ones it costs more."""
        counts = -(-self.lengths // size)
        levels = int(self._depths(counts).max(initial=0))
        return int(counts.sum()) * (size * (128 + size) // 128 + _BLOCK_ROWS) + _LEVEL_ROWS * levels

    def _depths(self, counts: Ints) -> Ints:
        """int64 [pieces]: blocks on the path from a start to each piece's end."""
        depths = counts.copy()
        for piece, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                depths[piece] += depths[parent]
        return depths
