"""The `triton` backend: one kernel over [path | chunk] with the tree's intervals as its mask.

Promises: key j of a chunk is visible to query i exactly when j <= i < end[j] (and within the layer's window, by depth);
no mask of [queries x keys] exists, and blocks of keys that no query of a block sees are not visited; output and
log-sum-exp of path and chunk are merged in registers; gradients of the path's keys and values go into the path cache in
place. One launch forward, three backward, whatever the tree: where a chunk has many small branches, calls by parts are
dozens.

The kernels (`interval_kernels`) are compiled by Triton for CUDA devices from Ampere on, at the first call of each head
size, window and scale. They compute what FlashAttention-2 does, without what it has for Hopper, so `auto` prefers
packages and ATen's until a GPU has shown otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.tree.attention.chunk_attention import ChunkAttention, LayerCall
from app.tree.attention.flex import interval_blocks, window_blocks
from app.tree.attention.kernels import AMPERE, capability
from app.tree.planning.layout import Part
from app.tree.prefix_tree import Bools, Ints
from app.tree.transfer import on_device

SHARED = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024, (10, 3): 227 * 1024}
"""Most bytes of shared memory of a block, by compute capability; of others, `_LEAST_SHARED`."""

_LEAST_SHARED = 99 * 1024
_HEAD_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class IntervalBackend:
    """Attention over path and chunk by one Triton kernel: CUDA from Ampere on, windows, soft-capping and sinks."""

    name = "triton"
    masked_block: int | None = 0  # no parts are computed; as squares they count the visible pairs

    def refusal(self, q: Tensor, call: LayerCall) -> str | None:
        if find_spec("triton") is None:
            return "needs the package triton (pip install triton); use attention='sdpa' (or 'auto')"
        if q.device.type != "cuda":
            if not _operators().INTERPRETED:
                return (
                    f"needs a CUDA device, and the model is on '{q.device.type}'; use attention='sdpa' (or 'auto');"
                    " TRITON_INTERPRET=1 interprets the kernels, for tests"
                )
        elif capability(q.device) < AMPERE:
            have = ".".join(map(str, capability(q.device)))
            return f"needs a GPU of compute capability 8.0 (Ampere) or newer, and this one has {have}; use 'sdpa'"
        elif q.dtype not in _DTYPES:
            return f"computes bfloat16, float16 and float32 on this device, not {q.dtype}; use attention='sdpa'"
        if q.shape[-1] > _HEAD_DIM:
            return f"takes heads of at most {_HEAD_DIM}, not {q.shape[-1]}; use attention='sdpa' (or 'auto')"
        return None

    def calls(self, parts: Sequence[Part]) -> int:
        return 1

    def estimated_calls(self, pieces: int, tokens: int) -> int:
        return 1

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, chunk: ChunkAttention, call: LayerCall
    ) -> Tensor:
        out: Tensor = _IntervalAttention.apply(*(_rows_of_heads(x) for x in (q, k, v)), sinks, chunk, call)
        return out


class _IntervalAttention(torch.autograd.Function):
    """Attention of a chunk's rows over its path and itself."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, chunk: ChunkAttention, call: LayerCall
    ) -> Tensor:
        path = chunk.cache.read(call.layer, chunk.path_tokens) if chunk.path_tokens else (None, None)
        out, lse = _operators().interval_attention(q, k, v, *path, sinks, *_how(q, chunk, call))
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.chunk, ctx.call = chunk, call
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        chunk, call, grad = ctx.chunk, ctx.call, _rows_of_heads(grads[0])
        path: tuple[Any, ...] = (None, None, None, None)
        if chunk.path_tokens:
            path = (
                *chunk.cache.read(call.layer, chunk.path_tokens),
                *chunk.cache.grads(call.layer, chunk.path_tokens),
            )
        grad_q, grad_k, grad_v = _operators().interval_attention_backward(
            grad, q, k, v, *path, out, lse, *_how(q, chunk, call)
        )
        chunk.add_returned(call.layer, grad_k, grad_v)
        grad_sinks = None
        if sinks is not None:
            share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)  # of the sink in every row's softmax
            grad_sinks = -(share * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None, None


def _how(q: Tensor, chunk: ChunkAttention, call: LayerCall) -> tuple[Any, ...]:
    """Intervals of the chunk, rows of a block, scale, window and soft-capping."""
    window, block = call.window, block_rows(q)
    if window is not None and int(chunk.depths.max()) < window:
        window = None  # all of the path is in sight of all
    key = ("intervals", window, block)
    if key not in chunk.kept:
        found = intervals(chunk.layout.ends, chunk.depths, chunk.path_tokens, window, block)
        chunk.kept[key] = [on_device(x, q.device) for x in found]
    return chunk.kept[key], block, call.scale, window or 0, call.softcap or 0.0


def block_rows(q: Tensor) -> int:
    """Queries, and keys, of one block: fewer where their numbers would not fit the GPU's shared memory."""
    limit = SHARED.get(capability(q.device), _LEAST_SHARED) if q.device.type == "cuda" else None
    return fitting_rows(q.shape[-1], q.element_size(), limit)


def fitting_rows(head: int, element: int, limit: int | None) -> int:
    """Rows of a block of heads this wide, of numbers of `element` bytes, on a GPU whose blocks may have `limit` bytes
    of shared memory. What the gradients of keys take, the most of the three kernels, is known from compiling them
    (Triton 3.7): four blocks of rows, and scores and probabilities on their way to a product."""
    rows, width = 64 if head * element <= 256 else 32, max(16, 1 << (head - 1).bit_length())
    while (
        limit is not None and rows > 16 and 4 * rows * width * element + 2 * rows * rows * element + 32 * rows > limit
    ):
        rows //= 2
    return rows


def intervals(ends: Ints, depths: Ints, path: int, window: int | None, block: int) -> list[Ints]:
    """What the kernels read of a chunk, int32: depths and ends of its rows; blocks of keys that each block of queries
    sees, then blocks of queries that see each block of keys, each as bounds and indices; and, where a window ends
    inside the path, blocks of queries that see each block of the path's keys."""
    some, _ = interval_blocks(ends, depths, window, block)
    found = [depths, ends, *_listed(some), *_listed(some.T)]
    if window is not None and path:
        found += _listed(window_blocks(depths, path, window, block)[0].T)
    return [np.ascontiguousarray(x, np.int32) for x in found]


def _listed(some: Bools) -> tuple[Ints, Ints]:
    """The True columns of each row of [m, n]: bounds [m + 1] and, one row after the other, columns."""
    return np.concatenate([[0], np.cumsum(some.sum(1))]), np.nonzero(some)[1]


def _rows_of_heads(x: Tensor) -> Tensor:
    """The tensor itself where a head's row is contiguous, else a copy in which it is."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _operators() -> Any:
    from app.tree.attention import interval_kernels  # needs Triton, which CPUs do without

    return interval_kernels
