"""What executing chunks comes to, counted without a model: tokens, query-key pairs, calls.

Promises: the counts of exactly the runs the engine makes (anchors without gradient, second runs, checkpointed layers);
attention pairs and calls from the very parts attention computes, or, for plans of very many pieces, pairs exactly and
calls from the same rule in the large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from app.tree.planning.layout import Part, layout
from app.tree.planning.plan import Chunk
from app.tree.prefix_tree import Ints, PrefixTree
from app.tree.states.piece_tree import PieceTree

_EXACT_PIECES = 3_000
"""Plans of at most so many pieces are laid out for their costs (a few milliseconds); larger ones are estimated."""


class Calls(Protocol):
    """How a backend computes a chunk over itself; the path is one more call.

    `masked_block`: rows of the masked parts it wants from `layout` (None: the layout's own choice).
    """

    masked_block: int | None

    def calls(self, parts: Sequence[Part]) -> int:
        """Kernel calls a layer for these parts."""
        ...

    def estimated_calls(self, pieces: int, tokens: int) -> int:
        """The same in the large, for a chunk of so many pieces and tokens."""
        ...


@dataclass(frozen=True)
class Work:
    """Sums over all runs of a backward pass; "again" is the part of the forward that is computed a second time.

    Attributes:
        tokens, tokens_again: rows through the layers.
        pairs, pairs_again: query-key pairs that attention computes, hidden ones inside masked blocks included.
        runs, runs_again: forwards of a chunk.
        parts, parts_again: attention calls a layer.
        path: sum over runs with gradient of the path's length (its gradients are added up after each).
        scored: rows that reach the vocabulary.
        scanned, scanned_again: rows of a scan's blocks, padding included; levels, levels_again: steps of a scan, one
            after the other. 0 for models without scans.
    """

    tokens: int
    pairs: int
    runs: int
    parts: int
    tokens_again: int
    pairs_again: int
    runs_again: int
    parts_again: int
    path: int
    scored: int
    scanned: int = 0
    scanned_again: int = 0
    levels: int = 0
    levels_again: int = 0


def count_work(tree: PrefixTree, chunks: Sequence[Chunk], backend: Calls, scans: bool = False) -> Work:
    """The work of a backward pass over `chunks`, whose graphs have been decided, with this attention backend. `scans`:
    whether layers carry states, whose blocks are counted as well."""
    exact = sum(len(chunk.pieces) for chunk in chunks) <= _EXACT_PIECES
    measure = _laid_out if exact else _estimated
    once, again = np.zeros(6, np.int64), np.zeros(6, np.int64)

    def count(chunk: Chunk, only: Sequence[int] | None) -> Ints:
        tokens = chunk.tokens if only is None else chunk.anchor_tokens
        scan = _scan(chunk, only) if scans else (0, 0)
        return np.array([tokens, *measure(tree, chunk, only, backend), 1, *scan], np.int64)

    for chunk in chunks:
        whole = count(chunk, None)
        once += whole
        if chunk.checkpoint:
            again += whole
        if not chunk.keep:
            again += count(chunk, chunk.anchors)
    path = sum(chunk.path_tokens for chunk in chunks)
    tokens, pairs, parts, runs, scanned, levels = once.tolist()
    tokens_2, pairs_2, parts_2, runs_2, scanned_2, levels_2 = again.tolist()
    return Work(
        tokens,
        pairs,
        runs,
        parts,
        tokens_2,
        pairs_2,
        runs_2,
        parts_2,
        path,
        len(tree.scored_tokens),
        scanned,
        scanned_2,
        levels,
        levels_2,
    )


def _scan(chunk: Chunk, only: Sequence[int] | None) -> tuple[int, int]:
    """Rows and levels of one run's blocks."""
    chosen = range(len(chunk.pieces)) if only is None else only
    renumber = {piece: k for k, piece in enumerate(chosen)}
    parents = [renumber.get(chunk.pieces[piece].parent, -1) for piece in chosen]
    return PieceTree([chunk.pieces[piece].tokens for piece in chosen], parents).scanned


def _laid_out(tree: PrefixTree, chunk: Chunk, only: Sequence[int] | None, backend: Calls) -> tuple[int, int]:
    """Pairs and calls of one run."""
    rows = layout(chunk, only, backend.masked_block)
    pairs = len(rows.tokens) * chunk.path_tokens
    for part in rows.parts:
        queries, keys = part.q_stop - part.q_start, part.k_stop - part.k_start
        pairs += queries * (queries + 1) // 2 if part.causal else queries * keys
    return pairs, backend.calls(rows.parts) + (chunk.path_tokens > 0)


def _estimated(tree: PrefixTree, chunk: Chunk, only: Sequence[int] | None, backend: Calls) -> tuple[int, int]:
    pieces = chunk.pieces if only is None else [chunk.pieces[p] for p in only]
    depth = tree.token_depth
    pairs = sum(p.tokens * int(depth[p.start]) + p.tokens * (p.tokens + 1) // 2 for p in pieces)
    tokens = sum(p.tokens for p in pieces)
    return pairs, backend.estimated_calls(len(pieces), tokens) + (chunk.path_tokens > 0)
