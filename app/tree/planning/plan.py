"""What the engine executes: `ExecutionPlan`, chunks and a tuple of small frozen steps. Pure data.

Promises of every plan: each tree token that a scored one depends on goes forward with gradient exactly once (the others
never run); children finish before parents; a chunk holds at most `chunk_tokens` tokens; what is alive never exceeds
`live_tokens`. A plan can be printed, counted and costed without a model. `app.tree.planning.planner` makes them.

A *piece* is a run of tokens of one segment. A *chunk* is what goes through the model at once: pieces that hang
together, or several such groups below one token. A chunk that others hang below either keeps its graph while they run
(when `live_tokens` allows) or runs twice: its *anchors*, the pieces on the way to others, first without gradient to
provide keys and values, and all of it when its turn comes. A chunk may be *checkpointed*: its layers keep only their
inputs and run again in backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from app.tree.prefix_tree import Ints, PrefixTree

_ROWS = 60
"""Chunks that `print(plan)` lists."""

Action = Literal["forward", "anchor", "push", "pop", "backward"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tree tokens [start, stop) of one segment; `parent` is the piece above it in the same chunk, or -1."""

    start: int
    stop: int
    parent: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pieces that run through the model together.

    Attributes:
        pieces: depth first.
        parent: chunk whose piece `parent_piece` this one hangs below; -1 for chunks of roots.
        path_tokens: tokens from the root to the chunk, the length of its path.
        tokens: tokens in the chunk.
        anchors: pieces on the way to chunks below, in order; empty when there are none.
        keep: whether the graph is kept while chunks below run (chunks without anchors: always True).
        checkpoint: whether its layers are checkpointed.
    """

    pieces: tuple[Piece, ...]
    parent: int
    parent_piece: int
    path_tokens: int
    tokens: int
    anchors: tuple[int, ...] = ()
    keep: bool = True
    checkpoint: bool = False

    @property
    def anchor_tokens(self) -> int:
        return sum(self.pieces[p].tokens for p in self.anchors)


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction: `forward` (with gradient), `anchor` (keys and values only, no gradient), `push` / `pop` of a
    piece onto / off the live path, `backward`."""

    action: Action
    chunk: int
    piece: int = -1


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """What the engine executes for `tree`, in order. `print(plan)` shows it as a table.

    Attributes:
        chunk_tokens, live_tokens: the budgets it keeps.
        share: live tokens that a token of a checkpointed chunk counts for.
        packing: how it was packed, in words.
        seconds: predicted time of a backward pass; None where no cost was predicted.
        dense: whether every chunk is a sequence of its own that the model's own attention runs.
    """

    tree: PrefixTree
    chunks: tuple[Chunk, ...]
    steps: tuple[Step, ...]
    chunk_tokens: int
    live_tokens: int
    share: float = 1.0
    packing: str = ""
    seconds: float | None = None
    dense: bool = False

    @property
    def extra_forward_tokens(self) -> int:
        """Tokens that go forward a second time: anchors of chunks that are not kept, and checkpointed chunks."""
        return sum(
            (0 if chunk.keep else chunk.anchor_tokens) + (chunk.tokens if chunk.checkpoint else 0)
            for chunk in self.chunks
        )

    def live_cost(self, chunk: Chunk) -> int:
        """Live tokens that the graph of `chunk` counts for."""
        return math.ceil(self.share * chunk.tokens) if chunk.checkpoint else chunk.tokens

    @cached_property
    def peak_live_tokens(self) -> int:
        """Most live tokens at once."""
        live = peak = 0
        for step in self.steps:
            if step.action == "forward":
                live += self.live_cost(self.chunks[step.chunk])
                peak = max(peak, live)
            elif step.action == "backward":
                live -= self.live_cost(self.chunks[step.chunk])
        return peak

    @property
    def longest_path(self) -> int:
        """Tokens the path cache has to hold."""
        return max((c.path_tokens for c in self.chunks), default=0)

    @cached_property
    def token_chunk(self) -> Ints:
        """int64 [T]: chunk of every tree token, -1 for those that never run."""
        out = np.full(self.tree.num_tokens, -1, np.int64)
        for index, chunk in enumerate(self.chunks):
            for piece in chunk.pieces:
                out[piece.start : piece.stop] = index
        return out

    def __str__(self) -> str:
        tree, graphs = self.tree, [_graph(chunk) for chunk in self.chunks]
        kinds = ", ".join(f"{graphs.count(kind)} {kind}" for kind in dict.fromkeys(graphs) if kind != "-")
        ran = tree.num_needed_tokens
        lines = [
            f"{tree.num_sequences:,} sequences: {tree.num_dense_tokens:,} dense tokens, {tree.num_tokens:,} in the tree"
            f", {ran:,} to run, {self.extra_forward_tokens:,} of them twice",
            f"{len(self.chunks):,} chunks of at most {self.chunk_tokens:,} tokens"
            + (f" ({self.packing})" if self.packing else "")
            + f", at most {self.peak_live_tokens:,} of {self.live_tokens:,} tokens live"
            + (f"; graphs: {kinds}" if kinds else "")
            + ("" if self.seconds is None else f"; predicted {self.seconds:.3g} s"),
            f"{'chunk':>6} {'below':>6} {'path':>8} {'tokens':>7} {'pieces':>7} {'anchors':>8}  graph",
        ]
        shown = range(min(len(self.chunks), _ROWS))
        for index in shown:
            c = self.chunks[index]
            lines.append(
                f"{index:>6} {c.parent if c.parent >= 0 else '-':>6} {c.path_tokens:>8,} {c.tokens:>7,} "
                f"{len(c.pieces):>7,} {c.anchor_tokens:>8,}  {graphs[index]}"
            )
        if len(self.chunks) > len(shown):
            lines.append(f"{'...':>6} and {len(self.chunks) - len(shown):,} chunks more")
        return "\n".join(lines)


def _graph(chunk: Chunk) -> str:
    """What becomes of a chunk's graph, in words; "-" where there is nothing to decide."""
    words = ([] if not chunk.anchors else ["kept"] if chunk.keep else ["run twice"]) + [
        "checkpointed"
    ] * chunk.checkpoint
    return " and ".join(words) or "-"


def schedule(chunks: Sequence[Chunk]) -> Iterator[Step]:
    """Depth-first execution without recursion."""
    children: list[list[int]] = [[] for _ in chunks]
    for index, chunk in enumerate(chunks):
        if chunk.parent >= 0:
            children[chunk.parent].append(index)
    for below in children:
        below.sort(key=lambda index: (chunks[index].parent_piece, index))
    for root in (index for index, chunk in enumerate(chunks) if chunk.parent < 0):
        stack: list[tuple[int, Iterator[int], list[int]]] = []
        entering = root
        while True:
            if entering >= 0:
                chunk = chunks[entering]
                yield Step("forward" if chunk.keep else "anchor", entering)
                stack.append((entering, iter(children[entering]), []))
            index, rest, pushed = stack[-1]
            entering = next(rest, -1)
            if entering >= 0:
                yield from _switch(chunks[index], index, pushed, chunks[entering].parent_piece)
                continue
            yield from _switch(chunks[index], index, pushed, -1)
            if not chunks[index].keep:
                yield Step("forward", index)
            yield Step("backward", index)
            stack.pop()
            if not stack:
                break


def _switch(chunk: Chunk, index: int, pushed: list[int], target: int) -> Iterator[Step]:
    """Pops and pushes pieces until the live path within the chunk ends in piece `target` (-1: nothing of the chunk)."""
    wanted: list[int] = []
    while target >= 0:
        wanted.append(target)
        target = chunk.pieces[target].parent
    wanted.reverse()
    while pushed and pushed != wanted[: len(pushed)]:
        yield Step("pop", index, pushed.pop())
    for piece in wanted[len(pushed) :]:
        pushed.append(piece)
        yield Step("push", index, piece)


def path_rows(chunks: Sequence[Chunk], most: int) -> int:
    """The longest path below which a chunk hangs, in tokens, of each piece at most so many."""
    above: list[int] = []
    for chunk in chunks:  # parents come first
        rows, piece = (above[chunk.parent] if chunk.parent >= 0 else 0), chunk.parent_piece
        while chunk.parent >= 0 and piece >= 0:
            one = chunks[chunk.parent].pieces[piece]
            rows, piece = rows + min(most, one.tokens), one.parent
        above.append(rows)
    return max(above, default=0)


def most_waiting(chunks: Sequence[Chunk]) -> int:
    """Most tokens whose keys and values are kept for the path beside it, on one way from the first chunk down: those of
    anchors that ran without a graph, until the last of them is on the path."""
    held: list[int] = []  # of chunks with more to put there
    most = 0
    for chunk, hung in zip(chunks, _hung(chunks), strict=True):  # parents come first
        above, own = held[chunk.parent] if chunk.parent >= 0 else 0, 0 if chunk.keep else chunk.anchor_tokens
        most = max(most, above + own)
        held.append(above + (own if len(hung) > 1 else 0))
    return most


def most_ends(chunks: Sequence[Chunk]) -> int:
    """Most ends of pieces, that other chunks hang below, on one way from the first chunk down: what layers that carry a
    state keep of each until all below has run."""
    held: list[int] = []
    for chunk, hung in zip(chunks, _hung(chunks), strict=True):  # parents come first
        held.append(len(hung) + (held[chunk.parent] if chunk.parent >= 0 else 0))
    return max(held, default=0)


def _hung(chunks: Sequence[Chunk]) -> list[set[int]]:
    """The pieces of each chunk that other chunks hang below."""
    found: list[set[int]] = [set() for _ in chunks]
    for chunk in chunks:
        if chunk.parent >= 0:
            found[chunk.parent].add(chunk.parent_piece)
    return found
