"""Tree + token budgets -> the cheapest `ExecutionPlan` of a few, by predicted time.

Promises: what a plan promises (`app.tree.planning.plan`) holds for every candidate; the same input gives the same plan
on every rank; 20,000 sequences are planned in well under a second, for which large trees get fewer candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

from app.tree.planning.packing import Packing, pack
from app.tree.planning.plan import Chunk, ExecutionPlan, schedule
from app.tree.planning.retention import decide_graphs
from app.tree.planning.uncut import Uncut
from app.tree.prefix_tree import PrefixTree

_WORK = 30_000
"""Pieces that all candidates together may have (about 0.4 s of packing); there are two candidates at least."""


class Predictor(Protocol):
    """Predicts seconds of a backward pass; `app.tree.planning.timing.TimeModel` is one."""

    def predict(self, tree: PrefixTree, chunks: Sequence[Chunk]) -> float: ...


def plan(
    tree: PrefixTree,
    chunk_tokens: int,
    live_tokens: int,
    predictor: Predictor | None = None,
    share: float = 1.0,
    packing: Packing | None = None,
    uncut: Uncut | None = None,
) -> ExecutionPlan:
    """Plans the tree under two budgets in tokens, both at least 1, and at least as many as the longest of `uncut`.

    Args:
        chunk_tokens: most tokens of a chunk. Chunks larger than `live_tokens` are possible by checkpointing alone.
        live_tokens: most tokens whose activations are alive at once.
        predictor: ranks the candidates; without one the first is taken: chunks as large as they may be.
        share: live tokens that a token of a checkpointed chunk counts for, above 0; 1.0: no checkpointing.
        packing: this way of packing instead of candidates.
        uncut: runs of tokens that no chunk cuts.

    Raises:
        ValueError: a budget or share out of range, naming it.
    """
    for name, budget in (("chunk_tokens", chunk_tokens), ("live_tokens", live_tokens)):
        if budget < 1:
            raise ValueError(f"{name} must be at least 1 token, got {budget}")
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1], got {share}")
    most = min(chunk_tokens, max(live_tokens, int(live_tokens / share)))
    least = 1 if uncut is None else max(1, uncut.longest)
    if most < least:
        name = "chunk_tokens" if chunk_tokens < least else "live_tokens"
        raise ValueError(
            f"{name}: a picture has {least} placeholders next to each other that see each other, which have to run in"
            f" one chunk, and there is room for {most} tokens; set {name} to at least {least}, or show smaller pictures"
        )
    if packing is not None:
        candidates = [packing]
    else:
        candidates = list(_candidates(tree, min(chunk_tokens, live_tokens), most, least))
        candidates = _affordable(tree, candidates) if predictor is not None else candidates[:1]
    best: tuple[float, Packing, tuple[Chunk, ...]] | None = None
    for candidate in candidates:
        chunks = decide_graphs(pack(tree, candidate, uncut), live_tokens, share)
        seconds = predictor.predict(tree, chunks) if predictor is not None else 0.0
        if best is None or seconds < best[0]:
            best = (seconds, candidate, chunks)
    assert best is not None, "there is a candidate"
    seconds, chosen, chunks = best
    return ExecutionPlan(
        tree,
        chunks,
        tuple(schedule(chunks)),
        chosen.budget,
        live_tokens,
        share,
        str(chosen),
        None if predictor is None else seconds,
    )


def _affordable(tree: PrefixTree, candidates: list[Packing]) -> list[Packing]:
    """The first of them that `_WORK` pays for: a segment is one piece, and one more for every chunk it fills."""
    pieces = [tree.num_segments + tree.num_needed_tokens // candidate.budget for candidate in candidates]
    within = sum(spent <= _WORK for spent in itertools.accumulate(pieces))
    return candidates[: max(2, within)]


def _candidates(tree: PrefixTree, plain: int, most: int, least: int) -> Iterator[Packing]:
    """Packings worth a try, the likeliest first. `plain`: the largest chunk without checkpointing, `most`: with it;
    `least`: the smallest. Budgets above the tree's size are all alike."""
    whole = max(1, tree.num_needed_tokens)
    sizes = [plain, plain // 2, most, 3 * plain // 4, plain // 4, 2 * plain]
    budgets = list(dict.fromkeys(min(size, whole) for size in sizes if least <= size <= most))
    yield Packing(budgets[0])
    yield Packing(budgets[0], join=False)
    yield Packing(budgets[0], even=True)
    yield Packing(budgets[0], order="longest")
    for budget in budgets[1:]:
        yield Packing(budget)
        yield Packing(budget, join=False)
        yield Packing(budget, even=True)
