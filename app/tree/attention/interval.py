"""The `triton` backend: one kernel over [path | chunk] with the tree's intervals as its mask.

Promises: key j of a chunk is visible to query i exactly when j <= i < end[j] (and within the layer's window or
section, by depth); no mask of [queries x keys] exists, and blocks of keys that no query of a block sees are not
visited; output and log-sum-exp of path and chunk are merged in registers; gradients of the path's keys and values go
into the path cache in place. One launch forward, three backward, whatever the tree: where a chunk has many small
branches, calls by parts are dozens.

The kernels (`interval_kernels`) are compiled by Triton for CUDA devices from Ampere on, at the first call of each head
size, window and scale. On an H100 a whole pass takes 0.9 times what it takes with ATen's FlashAttention-2
(docs/results.md), so that `auto` chooses them on Hopper; FlashAttention-3, where it is installed, is preferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.tree.attention.chunk_attention import ChunkAttention, LayerCall
from app.tree.attention.flex import interval_blocks, window_blocks
from app.tree.attention.kernels import AMPERE, capability
from app.tree.attention.sinks import grad_of_sinks
from app.tree.planning.layout import Part
from app.tree.prefix_tree import Bools, Ints
from app.tree.transfer import on_device

_HEAD_DIM = 256
_HOPPER = 9
_DTYPES = (torch.bfloat16, torch.float16)


class IntervalBackend:
    """Attention over path and chunk by one Triton kernel: CUDA from Ampere on; windows, sections, soft-capping, sinks.

    Not float32 on GPUs: products that keep it have no matrix units, and take Triton minutes to compile."""

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
            return f"computes bfloat16 and float16 on this device, not {q.dtype}; use attention='sdpa' (or 'auto')"
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
        path = chunk.cache.read(call.layer, *seen) if (seen := _path(chunk, call)) else (None, None)
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
        if seen := _path(chunk, call):
            path = (*chunk.cache.read(call.layer, *seen), *chunk.cache.grads(call.layer, *seen))
        grad_q, grad_k, grad_v = _operators().interval_attention_backward(
            grad, q, k, v, *path, out, lse, *_how(q, chunk, call)
        )
        chunk.add_returned(call.layer, grad_k, grad_v)
        grad_sinks = None if sinks is None else grad_of_sinks(sinks, lse, grad, out)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None, None


def _path(chunk: ChunkAttention, call: LayerCall) -> tuple[int, int] | None:
    """The depths of the path that are in a layer's sight; None where there is no path."""
    return (chunk.cache.begins(call.layer), chunk.path_tokens) if chunk.path_tokens else None


def _how(q: Tensor, chunk: ChunkAttention, call: LayerCall) -> tuple[Any, ...]:
    """Intervals of the chunk, the kernels' blocks, scale, window and soft-capping."""
    depths, window = chunk.sight(call)
    blocks = blocks_of(q, window)
    key = ("intervals", window, call.section, blocks)
    if key not in chunk.kept:
        first, stop = _path(chunk, call) or (0, 0)  # depths are counted from the first one in sight
        found = intervals(chunk.layout.ends, depths - first, stop - first, window, blocks)
        chunk.kept[key] = [on_device(x, q.device) for x in found]
    return chunk.kept[key], blocks.flat(), call.scale, window or 0, call.softcap or 0.0


class Shape(NamedTuple):
    """A block of one kernel: its queries and keys, the warps that compute it, and how many blocks are on their way."""

    rows: int
    keys: int
    warps: int
    stages: int


class Blocks(NamedTuple):
    """Those of the forward, of the gradients of queries and of keys; whether the latter are columns."""

    forward: Shape
    queries: Shape
    keys: Shape
    columns: bool

    def flat(self) -> list[int]:
        """As the operators take them."""
        return [*self.forward, *self.queries, *self.keys, self.columns]


def blocks_of(q: Tensor, window: int | None) -> Blocks:
    """Those of these queries, on their device."""
    return fitting(q.shape[-1], capability(q.device) if q.device.type == "cuda" else (_HOPPER, 0), window)


def fitting(head: int, capability: tuple[int, int], window: int | None = None) -> Blocks:
    """Blocks of heads this wide on a GPU of this compute capability.

    Of heads of 128 on Hopper, without a window, the fastest of those that `benchmarks.gpu.blocks` timed on an H100, of
    those whose results were compared there too: 64 x 64 by four warps, a quarter faster over the path's keys, were not.
    Others are chosen by what Triton makes of them (`benchmarks.gpu.compiled`): the most that registers and shared
    memory hold. Hopper's matrix units work on 64 queries for four warps: with more warps than that two compute the same
    scores.
    """
    if capability[0] == _HOPPER and 64 < head <= 128:
        forward = Shape(128, 128, 8, 2) if window is None else Shape(128, 64, 8, 2)  # whose mask takes shared memory
        return Blocks(forward, Shape(128, 64, 8, 3), Shape(128, 64, 8, 2), True)
    if capability[0] == _HOPPER:
        same = Shape(128, 64, 8, 2) if head <= 64 else Shape(64, 32, 4, 2)
        return Blocks(same, same, same, True)
    same = Shape(64, 64, 4, 2) if head <= 128 else Shape(32, 32, 4, 2)
    return Blocks(same, same, same, False)


def intervals(ends: Ints, depths: Ints, path: int, window: int | None, blocks: Blocks) -> list[Ints]:
    """What the kernels read of a chunk, int32: depths and ends of its rows; blocks of keys that each block of queries
    sees, in the forward and for the gradients of queries; blocks of queries that see each block of keys, each as bounds
    and indices; and, where a window ends inside the path, blocks of queries that see each block of the path's keys."""

    sizes = {min(shape.rows, shape.keys) for shape in blocks[:3]}
    squares = {size: interval_blocks(ends, depths, window, size) for size in sizes}

    def within(shape: Shape) -> list[Bools]:
        return _grouped(squares[min(shape.rows, shape.keys)], shape)

    found = [depths, ends, *_listed(*within(blocks.forward)), *_listed(*within(blocks.queries))]
    found += _listed(*(x.T for x in within(blocks.keys)))
    if window is not None and path:
        square = min(blocks.keys.rows, blocks.keys.keys)
        found += _listed(*(x.T for x in _grouped(window_blocks(depths, path, window, square), blocks.keys)))
    return [np.ascontiguousarray(x, np.int32) for x in found]


def _grouped(masks: tuple[Bools, Bools], shape: Shape) -> list[Bools]:
    """Which blocks hold any visible pair, and which only such, of the smaller square ones. One that is partly beyond
    the end is not whole."""
    square = min(shape.rows, shape.keys)
    down, across = shape.rows // square, shape.keys // square
    padded = (np.pad(x, ((0, -x.shape[0] % down), (0, -x.shape[1] % across))) for x in masks)
    some, only = (x.reshape(x.shape[0] // down, down, -1, across) for x in padded)
    return [np.any(some, axis=(1, 3)), np.all(only, axis=(1, 3))]


def _listed(some: Bools, only: Bools) -> tuple[Ints, Ints]:
    """The columns of each row of [m, n] in which `some` holds, first those in which `only` does: bounds [2 m + 1] and,
    one row after the other, columns."""
    both = np.stack([only, some & ~only], 1).reshape(-1, some.shape[1])
    return np.concatenate([[0], np.cumsum(both.sum(1))]), np.nonzero(both)[1]


def _rows_of_heads(x: Tensor) -> Tensor:
    """The tensor itself where a head's row is contiguous, else a copy in which it is."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _operators() -> Any:
    from app.tree.attention import interval_kernels  # needs Triton, which CPUs do without

    return interval_kernels
