"""The `flex` backend: FlexAttention with the tree's intervals as its mask.

Promises: key j of a chunk is visible to query i exactly when j <= i < end[j] (and within the layer's window or section,
by depth); the block mask is computed from the intervals, n / 128 squared entries, never [queries x keys]; the path is
read in place, by a call of its own that is merged by log-sum-exp. Only torch's public interface is used, so gradients
are autograd's. Every device but the CPU runs the compiled kernel, or fails: there is no silent fall-back to the unfused
one, which would hold all scores. CPUs have no backward of it and serve to check the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from app.tree.attention.chunk_attention import ChunkAttention, LayerCall
from app.tree.planning.layout import Part
from app.tree.prefix_tree import Bools, Ints
from app.tree.transfer import on_device

BLOCK = 128
"""Queries and keys of one block of the mask."""

FLEX_HEAD_DIM, FLEX_MOST_HEAD_DIM = 16, 256
"""Smallest heads that the compiled kernel takes, and largest that fit its blocks."""

_GRAPHS = 64
"""Most graphs FlexAttention may be compiled to: own and path calls, windows or none, with and without gradient, one
block or more of queries and of keys. The compiler's own limit of 8 is reached within one pass."""


class FlexBackend:
    """FlexAttention: CUDA devices; any window, sections, soft-capping and sinks; the forward on CPUs."""

    name = "flex"
    masked_block: int | None = 0  # no parts are computed; as squares they count the visible pairs

    def refusal(self, q: Tensor, call: LayerCall) -> str | None:
        if q.device.type == "cpu" and torch.is_grad_enabled():
            return "has no backward on CPUs; use attention='sdpa' (or 'auto') to train there"
        if q.device.type != "cpu" and q.dtype == torch.float64:
            return "does not compute float64 on this device; use attention='sdpa'"
        if q.device.type != "cpu" and q.shape[-1] < FLEX_HEAD_DIM:
            return (
                f"takes head sizes of at least {FLEX_HEAD_DIM} on this device, not {q.shape[-1]}; use attention='sdpa'"
            )
        return None

    def calls(self, parts: Sequence[Part]) -> int:
        return 1

    def estimated_calls(self, pieces: int, tokens: int) -> int:
        return 1

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, chunk: ChunkAttention, call: LayerCall
    ) -> Tensor:
        k, v = _Returned.apply(k, v, chunk, call.layer)
        score_mod = _softcapped(call.softcap) if call.softcap is not None else None
        out, lse = _flex(q, k, v, score_mod, _own_mask(chunk, call, q.device), call.scale)
        if chunk.path_tokens:
            mask = _path_mask(chunk, call, q.device)
            path_k, path_v = _Path.apply(q, k, v, chunk, call.layer)
            out, lse = _Merge.apply(out, lse, *_flex(q, path_k, path_v, score_mod, mask, call.scale))
        if sinks is not None:
            wide = torch.promote_types(torch.float32, lse.dtype)
            share = torch.sigmoid(lse - sinks.to(wide)[:, None])  # what the sink leaves of the softmax
            out = (out.to(wide) * share.unsqueeze(-1)).to(out.dtype)
        return out


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    mask: BlockMask | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [1, Hq, n, d] and log-sum-exp [1, Hq, n]."""
    out, aux = _runner(q.device.type)(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        # The kernel for short queries, which would be chosen below 128 rows, has no block for 65 to 127 / (Hq / Hk).
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


@cache
def _runner(device: str) -> Callable[..., Any]:
    """FlexAttention, compiled for all lengths (but for this scale and soft-capping: symbolic numbers in a score do not
    compile); `fullgraph` makes a fall-back to the unfused kernel an error."""
    run: Any = flex_attention
    if device == "cpu":
        return run
    compiled: Any = torch.compile(run, dynamic=True, fullgraph=True)

    def limited(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_GRAPHS, specialize_float=True):
            return compiled(*args, **kwargs)

    return limited


@cache
def _softcapped(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def _own_mask(chunk: ChunkAttention, call: LayerCall, device: torch.device) -> BlockMask:
    """The chunk over itself."""
    (depths, window), ends = chunk.sight(call), chunk.layout.ends
    if window is not None and int(depths.max()) - int(depths.min()) < window:
        window = None
    key = ("own mask", window, None if window is None else call.section)
    if key not in chunk.kept:
        some, only = interval_blocks(ends, depths, window)
        mask_mod = _interval_mod(on_device(ends, device), _depths_seen(depths, window, device))
        chunk.kept[key] = _block_mask(some, only, mask_mod, (len(ends), len(ends)), device)
    mask: BlockMask = chunk.kept[key]
    return mask


def _path_mask(chunk: ChunkAttention, call: LayerCall, device: torch.device) -> BlockMask | None:
    """The chunk over what is in sight of its path, all of which every row sees unless a window ends before."""
    depths, window = chunk.sight(call)
    if window is None:
        return None
    key = ("path mask", window, call.section)
    if key not in chunk.kept:
        first = chunk.cache.begins(call.layer)
        depths, keys = depths - first, chunk.path_tokens - first
        lowest = on_device(depths - (window - 1), device)

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return key >= lowest[query]

        some, only = window_blocks(depths, keys, window)
        chunk.kept[key] = _block_mask(some, only, visible, (len(depths), keys), device)
    mask: BlockMask = chunk.kept[key]
    return mask


def _depths_seen(depths: Ints, window: int | None, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The lowest depth each row sees within a window, and the depth of each row; None without a window. Tensors,
    because a number in a mask's closure would be compiled anew for every window, or not at all."""
    if window is None:
        return None
    return on_device(depths - (window - 1), device), on_device(depths, device)


def _interval_mod(end: Tensor, seen: tuple[Tensor, Tensor] | None) -> Callable[..., Tensor]:
    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    if seen is None:
        return visible
    lowest, depth = seen

    def visible_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key]) & (depth[key] >= lowest[query])

    return visible_in_window


def interval_blocks(ends: Ints, depths: Ints, window: int | None, block: int = BLOCK) -> tuple[Bools, Bools]:
    """Which blocks [query blocks, key blocks] hold any visible pair of a chunk with itself, and which hold only such.

    "Any" may err on the side of True (the mask decides pair by pair there); "only" is exact or False.
    """
    low, high = _extremes(ends, block)
    starts = np.arange(len(low)) * block
    below = starts[:, None] > starts[None, :]
    some = (below & (high[None, :] > starts[:, None])) | np.eye(len(low), dtype=bool)
    only = below & (low[None, :] >= starts[:, None] + block)
    if len(ends) % block:
        only[-1] = False  # a block that is partly beyond the end
    if window is not None:
        near, far = _distances(*_extremes(depths, block), *_extremes(depths, block))
        some, only = some & (near < window), only & (far < window)
    return some, only


def window_blocks(depths: Ints, keys: int, window: int, block: int = BLOCK) -> tuple[Bools, Bools]:
    """The same for rows of these depths over the first `keys` depths, all ancestors of all rows."""
    near, far = _distances(*_extremes(depths, block), *_extremes(np.arange(keys), block))
    some, only = near < window, far < window
    if len(depths) % block:
        only[-1] = False
    if keys % block:
        only[:, -1] = False
    return some, only


def _extremes(values: Ints, block: int) -> tuple[Ints, Ints]:
    """Smallest and largest value of each block."""
    starts = np.arange(0, len(values), block)
    return np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def _distances(low_q: Ints, high_q: Ints, low_k: Ints, high_k: Ints) -> tuple[Ints, Ints]:
    """Smallest and largest difference of depths between query and key blocks."""
    return low_q[:, None] - high_k[None, :], high_q[:, None] - low_k[None, :]


def _block_mask(
    some: Bools, only: Bools, mask_mod: Callable[..., Tensor], lengths: tuple[int, int], device: torch.device
) -> BlockMask:
    partial_count, partial = _ordered(some & ~only, device)
    full_count, full = _ordered(only, device)
    return BlockMask.from_kv_blocks(
        partial_count, partial, full_count, full, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths
    )


def _ordered(blocks: Bools, device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, Q] and indices [1, 1, Q, K] of the True entries of each row, these first."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    counts = blocks.sum(1).astype(np.int32)
    return on_device(counts, device)[None, None], on_device(order, device)[None, None]


class _Path(torch.autograd.Function):
    """Keys and values of the path, in place; their gradients go into the path cache. The chunk's own q, k and v are
    arguments only so that there is a gradient whenever one of them has one."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chunk: ChunkAttention, layer: int) -> tuple[Tensor, Tensor]:
        ctx.chunk, ctx.layer = chunk, layer
        ctx.first = chunk.cache.begins(layer)
        keys, values = chunk.cache.read(layer, ctx.first, chunk.path_tokens)
        # `.data` leaves the buffer's version counter behind: rows of this path stay as they are until this chunk's
        # backward, but rows below it are written meanwhile, and the counter knows only the buffer as a whole.
        return keys.data, values.data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.chunk.cache.add_grads(ctx.layer, *grads, ctx.first)
        return None, None, None, None, None


class _Returned(torch.autograd.Function):
    """The chunk's own keys and values; adds the gradients that chunks below sent back."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, chunk: ChunkAttention, layer: int) -> tuple[Tensor, Tensor]:
        ctx.chunk, ctx.layer = chunk, layer
        return k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dtype = torch.promote_types(torch.float32, grads[0].dtype)
        grad_k, grad_v = (grad.to(dtype, copy=True) for grad in grads)
        ctx.chunk.add_returned(ctx.layer, grad_k, grad_v)
        return grad_k.to(grads[0].dtype), grad_v.to(grads[1].dtype), None, None


class _Merge(torch.autograd.Function):
    """Two softmaxes over disjoint keys as one: (out, lse) twice -> (out, lse), out in the dtype it came in."""

    @staticmethod
    def forward(ctx: Any, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        lse = torch.logaddexp(lse_a, lse_b)
        wide = torch.promote_types(torch.float32, out_a.dtype)
        weights = (torch.exp(lse_a - lse).unsqueeze(-1), torch.exp(lse_b - lse).unsqueeze(-1))
        out = (out_a.to(wide) * weights[0] + out_b.to(wide) * weights[1]).to(out_a.dtype)
        ctx.save_for_backward(out_a, out_b, out, *weights)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        out_a, out_b, out, *weights = ctx.saved_tensors
        grad, grad_lse = grads
        wide = torch.promote_types(torch.float32, grad.dtype)
        found: list[Tensor] = []
        for part, weight in zip((out_a, out_b), weights, strict=True):
            share = grad.to(wide) * weight
            moved = (share * (part.to(wide) - out.to(wide))).sum(-1)
            found += [share.to(part.dtype), moved + grad_lse * weight.squeeze(-1)]
        return tuple(found)
