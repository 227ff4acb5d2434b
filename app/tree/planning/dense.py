"""Dense-leaf execution as a plan: every sequence that no other extends runs alone, through the model's own attention.

Promises: the same losses, outputs and gradients as a plan over the tree, by nothing but the model's own forward. Pure
data; what the self-check compares with, and what the engine falls back to when the check fails.
"""

from __future__ import annotations

import numpy as np

from app.tree.planning.plan import Chunk, ExecutionPlan, Piece, Step
from app.tree.prefix_tree import PrefixTree


def dense_plan(tree: PrefixTree) -> ExecutionPlan:
    """One chunk for every leaf sequence of `tree`, of a tree with the same sequences that shares nothing else."""
    sequences = [tree.tokens[tree.sequence_tokens([i])] for i in range(tree.num_sequences)]
    # Sequences that share no token in `tree` have reasons (another temperature, say), and keep apart.
    roots = np.searchsorted(np.flatnonzero(tree.segment_parent < 0), tree.sequence_segment, side="right")
    leaves = tree.rebuilt(sequences, range(len(sequences)), scored=tree.scored_masks, keys=roots, share="leaf")
    spans = zip(leaves.segment_offset.tolist(), leaves.segment_length.tolist(), strict=True)
    chunks = tuple(Chunk((Piece(start, start + length, -1),), -1, -1, 0, length) for start, length in spans)
    steps = tuple(step for k in range(len(chunks)) for step in (Step("forward", k), Step("backward", k)))
    longest = max((chunk.tokens for chunk in chunks), default=1)
    return ExecutionPlan(leaves, chunks, steps, longest, longest, packing="one sequence a chunk, dense", dense=True)
