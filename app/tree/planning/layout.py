"""The attention of one chunk over itself, as a short list of dense parts: pure data.

Promises: every (query, key) pair of tokens on a common path with key <= query is in exactly one part, and pairs of
different branches are in none, except inside small masked blocks. Rows are the chunk's tokens in the order of
its pieces (depth first, heaviest child first), so a branch and its heaviest descendants are one causal square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.tree.planning.plan import Chunk, Piece
from app.tree.prefix_tree import Bools, Ints

MASKED_BLOCK = 256
"""Sibling branches that fit a block of so many rows are one masked call: one kernel beats many tiny ones."""


@dataclass(frozen=True, eq=False)
class Part:
    """Queries [q_start, q_stop) over keys [k_start, k_stop), both rows of the chunk; with `path`, keys of the path.

    `causal`: a square, lower triangle only. `mask`: bool [queries, keys], True = visible; None = all (or causal).
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool = False
    mask: Bools | None = None
    path: bool = False


@dataclass(frozen=True, eq=False)
class Layout:
    """Rows of a chunk (or of its anchors): tree tokens int64 [n], the first row of each piece and the piece above it
    (-1: none in the chunk), attention parts, and `ends` int64 [n]: one past the last row that sees each row as a key
    (the end of its subtree)."""

    tokens: Ints
    piece_rows: tuple[int, ...]
    piece_parents: tuple[int, ...]
    parts: tuple[Part, ...]
    ends: Ints


def layout(chunk: Chunk, only: Sequence[int] | None = None, masked_block: int | None = None) -> Layout:
    """Rows and attention parts of `chunk`, or of its pieces `only` (ascending, closed under parents). `masked_block`:
    rows of the masked parts, instead of `MASKED_BLOCK`; 0: none, every branch is a causal square of its own."""
    chosen = list(range(len(chunk.pieces))) if only is None else list(only)
    renumber = {piece: k for k, piece in enumerate(chosen)}
    pieces = [chunk.pieces[p] for p in chosen]
    local = [Piece(p.start, p.stop, renumber[p.parent] if p.parent >= 0 else -1) for p in pieces]
    sizes = [piece.tokens for piece in local]
    rows = np.cumsum([0, *sizes]).tolist()
    tokens = np.concatenate([np.arange(piece.start, piece.stop) for piece in local])
    ends = _subtree_ends(local, rows)
    parts = _parts(local, rows, ends, MASKED_BLOCK if masked_block is None else masked_block)
    parents = tuple(piece.parent for piece in local)
    return Layout(tokens, tuple(rows[:-1]), parents, tuple(parts), np.repeat(np.array(ends, np.int64), sizes))


def _subtree_ends(pieces: list[Piece], rows: list[int]) -> list[int]:
    """Row one past each piece's subtree."""
    end = [rows[k + 1] for k in range(len(pieces))]
    for k in range(len(pieces) - 1, -1, -1):
        parent = pieces[k].parent
        if parent >= 0:
            end[parent] = max(end[parent], end[k])
    return end


def _parts(pieces: list[Piece], rows: list[int], end: list[int], masked_block: int) -> list[Part]:
    children: list[list[int]] = [[] for _ in pieces]
    for k, piece in enumerate(pieces):
        if piece.parent >= 0:
            children[piece.parent].append(k)

    # A forest: siblings with all below them, on neighbouring rows. They do not see each other, and each could be a part
    # of its own; but a tiny call costs as much as a small one, so neighbours that fit a block share one masked part.
    parts: list[Part] = []
    forests = [[k for k, piece in enumerate(pieces) if piece.parent < 0]]
    while forests:
        small: list[int] = []  # roots gathered for one block
        for root in [*forests.pop(), -1]:  # -1: the end, where what was gathered becomes a part
            fits = root >= 0 and end[root] - (rows[small[0]] if small else rows[root]) <= masked_block
            if small and not fits:
                parts.append(_block(rows[small[0]], end[small[-1]], small, children, rows, end))
                small = []
                fits = root >= 0 and end[root] - rows[root] <= masked_block
            if fits:
                small.append(root)
            elif root >= 0:
                # Too large: one square for the heaviest way down; what branches off are forests again.
                forests.extend(_chain(root, children, rows, end, parts))
    return parts


def _chain(root: int, children: list[list[int]], rows: list[int], end: list[int], parts: list[Part]) -> list[list[int]]:
    """One causal square down the heaviest children; what branches off attends to the square and is returned."""
    start, piece, left = rows[root], root, []
    while children[piece]:
        rest = children[piece][1:]
        if rest:
            # One dense rectangle for all lighter siblings: they are neighbours, and see the whole way down to here.
            parts.append(Part(rows[rest[0]], end[piece], start, rows[piece + 1]))
            left.append(rest)
        piece = children[piece][0]
    stop = rows[piece + 1]
    parts.append(Part(start, stop, start, stop, causal=True))
    return left


def _block(start: int, stop: int, roots: list[int], children: list[list[int]], rows: list[int], end: list[int]) -> Part:
    """A small forest as one call: causal when it is a single chain, masked otherwise."""
    last = np.empty(stop - start, np.int64)
    chain = len(roots) == 1
    stack = list(roots)
    while stack:
        piece = stack.pop()
        last[rows[piece] - start : rows[piece + 1] - start] = end[piece] - start
        chain = chain and len(children[piece]) <= 1
        stack.extend(children[piece])
    if chain:
        return Part(start, stop, start, stop, causal=True)
    query = np.arange(stop - start)[:, None]
    key = np.arange(stop - start)[None, :]
    return Part(start, stop, start, stop, mask=(key <= query) & (query < last[None, :]))
