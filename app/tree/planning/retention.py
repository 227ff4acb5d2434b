"""Which chunks keep their graph while others run below them, which run twice, and which are checkpointed.

Promises: the live tokens of the result never exceed the budget, whatever the tree; with room for everything nothing
runs twice. Pure data.

A chunk's graph costs its tokens while it is alive, or a `share` of them when its layers are checkpointed (their inputs
stay, and one layer at a time is computed again in backward). Bottom up, since what a chunk uses is free again for its
next sibling, each chunk with others below it takes the cheapest of what fits, counted in tokens that run again:

    keep         nothing, if it and what lies below fit together
    checkpoint   the tokens of those leaf chunks below it that would not fit beside it otherwise
    run twice    its anchors, first without gradient; holds nothing meanwhile

A chunk that alone is larger than the budget is checkpointed in any case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from app.tree.planning.plan import Chunk


def decide_graphs(chunks: Sequence[Chunk], live_tokens: int, share: float = 1.0) -> tuple[Chunk, ...]:
    """Fills in `anchors`, `keep` and `checkpoint`. `share`: live tokens a checkpointed token counts for; 1.0: chunks
    are never checkpointed, and none may be larger than `live_tokens`."""
    anchors: list[set[int]] = [set() for _ in chunks]
    below: list[list[int]] = [[] for _ in chunks]
    need = [0] * len(chunks)  # most live tokens a chunk's subtree uses
    keep = [True] * len(chunks)
    checkpoint = [chunk.tokens > live_tokens for chunk in chunks]

    def cost(index: int) -> int:
        return math.ceil(share * chunks[index].tokens) if checkpoint[index] else chunks[index].tokens

    for index in range(len(chunks) - 1, -1, -1):  # parents come before children: bottom up
        chunk, own = chunks[index], cost(index)
        most = max((need[child] for child in below[index]), default=0)
        need[index] = own + most
        if below[index] and own + most > live_tokens:
            # Leaf chunks alone shrink by their share: what a chunk with others below needs is not all its own.
            large = [child for child in below[index] if own + need[child] > live_tokens]
            shrinks = share < 1 and all(
                not below[child] and not checkpoint[child] and own + math.ceil(share * need[child]) <= live_tokens
                for child in large
            )
            # Where each costs something, the fewer tokens that run again decide; where the leaves cannot shrink enough,
            # running twice always fits, since nothing is held meanwhile.
            twice = sum(chunk.pieces[piece].tokens for piece in anchors[index])
            if shrinks and sum(chunks[child].tokens for child in large) < twice:
                for child in large:
                    checkpoint[child] = True
                    need[child] = cost(child)
                need[index] = own + max(need[child] for child in below[index])
            else:
                keep[index] = False
                need[index] = max(own, most)
        if chunk.parent >= 0:
            below[chunk.parent].append(index)
            piece = chunk.parent_piece
            while piece >= 0 and piece not in anchors[chunk.parent]:  # the way up to the chunk's root, once
                anchors[chunk.parent].add(piece)
                piece = chunks[chunk.parent].pieces[piece].parent
    return tuple(
        replace(chunk, anchors=tuple(sorted(anchors[k])), keep=keep[k], checkpoint=checkpoint[k])
        for k, chunk in enumerate(chunks)
    )
