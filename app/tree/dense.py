"""Dense-leaf execution: every sequence that no other extends runs alone, through the model's own attention.

Promises: the same losses, outputs and gradients as a tree pass, by nothing but the model's own forward, one sequence at
a time; what the self-check compares with, and what the engine falls back to when the check fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.tree.chunk_attention import ChunkAttention
from app.tree.executor import Executor, _Run
from app.tree.layout import layout
from app.tree.plan import Chunk, ExecutionPlan, Piece, Step
from app.tree.prefix_tree import PrefixTree
from app.tree.transfer import on_device


def dense_plan(tree: PrefixTree) -> ExecutionPlan:
    """One chunk for every leaf sequence of `tree`, of a tree with the same sequences that shares nothing else."""
    sequences = [tree.tokens[tree.sequence_tokens([i])] for i in range(tree.num_sequences)]
    # Sequences that share no token in `tree` have reasons (another temperature, say), and keep apart.
    roots = np.searchsorted(np.flatnonzero(tree.segment_parent < 0), tree.sequence_segment, side="right")
    leaves = PrefixTree.build(sequences, scored=tree.scored_masks, keys=roots, share="leaf")
    spans = zip(leaves.segment_offset.tolist(), leaves.segment_length.tolist(), strict=True)
    chunks = tuple(Chunk((Piece(start, start + length, -1),), -1, -1, 0, length) for start, length in spans)
    steps = tuple(step for k in range(len(chunks)) for step in (Step("forward", k), Step("backward", k)))
    longest = max((chunk.tokens for chunk in chunks), default=1)
    return ExecutionPlan(leaves, chunks, steps, longest, longest, packing="one sequence a chunk, dense")


class DenseExecutor(Executor):
    """An executor of `dense_plan`s that leaves attention to the model."""

    def _run(self, index: int, only: Sequence[int] | None, store: bool) -> _Run:
        chunk = self.plan.chunks[index]
        rows = layout(chunk)
        ids = self.tokens[on_device(rows.tokens, self.device)]
        hidden = self.body(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state[0]
        attention = ChunkAttention(rows, self.cache, 0, self.plan.tree.token_depth[rows.tokens], self.backend, False)
        return _Run(rows, attention, hidden, *self._scored_rows(index, rows))
