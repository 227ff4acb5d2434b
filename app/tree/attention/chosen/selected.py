"""Attention of a chunk's queries to the tokens an indexer chose for each, among those they see.

Promises: exact, forward and backward, for any choice, also of a path or of a chunk of which a query sees nothing; keys
and values of the path are read in place; parts are blocks of queries under a mask of at most `_MASK_BYTES` that exists
for that block alone. Its work is that of dense attention, whatever was chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.tree.attention.chosen.indexers import visible_rows
from app.tree.attention.chunk_attention import ChunkAttention, LayerCall
from app.tree.attention.kernels import Kernel, pick_kernel
from app.tree.attention.part_attention import PartBackend
from app.tree.planning.layout import Part
from app.tree.transfer import on_device

_MASK_BYTES = 64 * 2**20
_NOTHING = -1e30
"""The log-sum-exp of a query that sees nothing of a part: weight 0 beside any other, and no -inf, whose difference from
another is no number."""


class SelectedBackend(PartBackend):
    """Attention by parts to `picks`: int32 [1, n, m], positions in [path | chunk], -1 for none."""

    heads = 1
    """Of a mask."""

    def __init__(self, picks: Tensor) -> None:
        self.picks = picks

    def parts(self, chunk: ChunkAttention, call: LayerCall) -> Iterator[Part]:
        """Blocks of queries over the path, and over the chunk up to the last of them."""
        path, count = chunk.path_tokens, len(chunk.layout.tokens)
        for start, stop in mask_blocks(count, self.heads * max(path, count)):
            if path:
                yield Part(start, stop, 0, path, path=True)
            yield Part(start, stop, 0, stop)

    def mask(self, q: Tensor, part: Part, chunk: ChunkAttention) -> Tensor:
        rows, width = slice(part.q_start, part.q_stop), part.k_stop - part.k_start
        first = part.k_start if part.path else chunk.path_tokens + part.k_start
        chosen = picked(self.picks[0, rows], first, width)
        if not part.path:
            chosen &= visible_rows(chunk, rows, q.device)
        return torch.zeros_like(chosen, dtype=q.dtype).masked_fill_(~chosen, float("-inf"))

    def kernel(self, q: Tensor, mask: Tensor | None, part: Part, chunk: ChunkAttention, call: LayerCall) -> Kernel:
        return ChosenKernel(pick_kernel(q, mask))


class BlocksBackend(SelectedBackend):
    """Attention by parts to `picks`: int32 [1, H, n, k], numbers of blocks of `size` positions in each query's own
    sequence, for each of the H heads of keys; -1 for none. `heads`: of queries."""

    def __init__(self, picks: Tensor, size: int, heads: int) -> None:
        super().__init__(picks)
        self.size, self.heads = size, heads

    def mask(self, q: Tensor, part: Part, chunk: ChunkAttention) -> Tensor:
        """As of any backend, [1, heads, n, m]."""
        rows, count = slice(part.q_start, part.q_stop), int(chunk.depths.max()) // self.size + 1
        if "depths" not in chunk.kept:
            chunk.kept["depths"] = on_device(np.ascontiguousarray(chunk.depths), q.device)
        depths = torch.arange(part.k_stop, device=q.device) if part.path else chunk.kept["depths"]
        chosen = among(self.picks[0, :, rows], depths[part.k_start : part.k_stop] // self.size, count)
        if not part.path:
            chosen &= visible_rows(chunk, rows, q.device)
        whole = chosen.repeat_interleave(self.heads // len(chosen), 0).unsqueeze(0)
        return torch.zeros_like(whole, dtype=q.dtype).masked_fill_(~whole, float("-inf"))


def picked(picks: Tensor, first: int, width: int) -> Tensor:
    """bool [n, width]: which of the keys from `first` on are among `picks` int32 [n, k]."""
    at = picks.long() - first
    at = torch.where((at < 0) | (at >= width), width, at)  # a column of its own for the others
    return torch.zeros(len(at), width + 1, dtype=torch.bool, device=at.device).scatter_(1, at, True)[:, :width]


def mask_blocks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of blocks of so many rows, each of which has a mask of `width`."""
    size = max(1, _MASK_BYTES // (8 * max(1, width)))  # at most 8 bytes an element
    for start in range(0, rows, size):
        yield start, min(start + size, rows)


def among(picks: Tensor, blocks: Tensor, count: int) -> Tensor:
    """Whether each of `blocks` int64 [m], all below `count`, is among `picks` int32 [..., k], -1 for none: bool
    [..., m]."""
    at = torch.where(picks < 0, count, picks).long()  # a column of its own for none
    kept = torch.zeros(*picks.shape[:-1], count + 1, dtype=torch.bool, device=picks.device)
    return kept.scatter_(-1, at, True).index_select(-1, blocks)


class ChosenKernel:
    """`kernel` for queries some of which see none of the keys. Its backward needs nothing of the kind: by the merged
    log-sum-exp their probabilities are 0."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.backward = kernel, kernel.backward

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Any]:
        out, lse, saved = self.kernel.forward(q, k, v, causal, mask, scale)
        assert mask is not None
        none = mask.isneginf().all(-1)
        return out.masked_fill(none.unsqueeze(-1), 0.0), lse.masked_fill(none, _NOTHING), saved
