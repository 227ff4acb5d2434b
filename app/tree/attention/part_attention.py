"""Attention as a few dense calls whose softmaxes are merged by log-sum-exp; and the `sdpa` backend made of it.

Promises: no [queries x path] mask exists; keys and values of the path are read in place, grouped heads are not repeated
(by the flash kernels); each part's backward runs with the *merged* output and log-sum-exp, which makes gradients of the
parts add up to the exact ones; sums over parts are in the accumulation dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from app.tree.attention.chunk_attention import ChunkAttention, LayerCall
from app.tree.attention.kernels import Kernel, pick_kernel
from app.tree.attention.path_cache import KeyValue
from app.tree.attention.sinks import grad_of_sinks, with_sinks
from app.tree.planning.layout import MASKED_BLOCK, Part


class PartBackend:
    """Attention by parts with ATen's kernels: any device, any floating dtype, everything a layer can ask for."""

    name = "sdpa"
    masked_block: int | None = None

    def refusal(self, q: Tensor, call: LayerCall) -> str | None:
        return None

    def calls(self, parts: Sequence[Part]) -> int:
        return len(parts)

    def estimated_calls(self, pieces: int, tokens: int) -> int:
        return min(2 * pieces, 1 + tokens // MASKED_BLOCK)

    def parts(self, chunk: ChunkAttention, call: LayerCall) -> Iterable[Part]:
        """The dense calls of this layer, in order."""
        return [*chunk.parts(call), *chunk.parts_ahead(call.layer)]

    def mask(self, q: Tensor, part: Part, chunk: ChunkAttention) -> Tensor | None:
        """That of `part`, additive in q's dtype."""
        return chunk.additive(part.mask, q)

    def kernel(self, q: Tensor, mask: Tensor | None, part: Part, chunk: ChunkAttention, call: LayerCall) -> Kernel:
        """What computes `part`."""
        return pick_kernel(q, mask, call.softcap)

    def place_of(self, part: Part, call: LayerCall) -> int:
        """Where a part's keys are in the path cache."""
        return call.layer

    def add_returned(self, chunk: ChunkAttention, call: LayerCall, grad_k: Tensor, grad_v: Tensor) -> None:
        """Adds to gradients of the chunk's keys and values what chunks below sent back."""
        chunk.add_returned(call.layer, grad_k, grad_v)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, chunk: ChunkAttention, call: LayerCall
    ) -> Tensor:
        return _PartAttention.apply(q, k, v, sinks, chunk, call, self)


class _PartAttention(torch.autograd.Function):
    """Merged attention over the parts of a chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        chunk: ChunkAttention,
        call: LayerCall,
        backend: PartBackend,
    ) -> Tensor:
        dtype = torch.promote_types(torch.float32, q.dtype)
        saved = []
        out: Tensor | None = None
        lse = torch.empty(0)
        for part in backend.parts(chunk, call):
            keys, values = _keys_values(chunk, part, backend.place_of(part, call), k, v)
            queries = _rows(q, part.q_start, part.q_stop)
            mask = backend.mask(q, part, chunk)
            kernel = backend.kernel(q, mask, part, chunk, call)
            part_out, part_lse, extra = kernel.forward(queries, keys, values, part.causal, mask, call.scale)
            saved.append(extra)
            if out is None and queries.shape[2] == q.shape[2]:
                out, lse = part_out, part_lse.to(dtype)
                continue
            if out is None:
                out = torch.zeros(q.shape[:3] + v.shape[3:], dtype=dtype, device=q.device)
                lse = torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
            out = out.to(dtype)
            _merge(out, lse, part, part_out, part_lse)
        assert out is not None, "a chunk has at least one token"
        out, lse = with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.chunk, ctx.call, ctx.backend, ctx.saved = chunk, call, backend, saved
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.autocast(grads[0].device.type, enabled=False):
            return _PartAttention._backward(ctx, grads[0].contiguous())

    @staticmethod
    def _backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        chunk, call, backend = ctx.chunk, ctx.call, ctx.backend
        sums: list[Tensor | None] = [None, None, None]  # of q, k, v
        for part, extra in zip(backend.parts(chunk, call), ctx.saved, strict=True):
            rows = (part.q_start, part.q_stop)
            keys, values = _keys_values(chunk, part, backend.place_of(part, call), k, v)
            mask = backend.mask(q, part, chunk)
            part_q, part_k, part_v = backend.kernel(q, mask, part, chunk, call).backward(
                _rows(grad, *rows).contiguous(),
                _rows(q, *rows),
                keys,
                values,
                _rows(out, *rows),
                _rows(lse, *rows).contiguous(),
                extra,
                part.causal,
                mask,
                call.scale,
            )
            sums[0] = _add(sums[0], part_q, q, *rows)
            if part.path:
                chunk.cache.add_grads(backend.place_of(part, call), part_k, part_v, part.k_start)
            else:
                sums[1] = _add(sums[1], part_k, k, part.k_start, part.k_stop)
                sums[2] = _add(sums[2], part_v, v, part.k_start, part.k_stop)
        grad_q, grad_k, grad_v = sums
        assert grad_q is not None and grad_k is not None and grad_v is not None, "every row sees itself"
        backend.add_returned(chunk, call, grad_k, grad_v)
        grad_sinks = None if sinks is None else grad_of_sinks(sinks, lse, grad, out)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None, None, None


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    """Rows of [1, H, n, ...], the tensor itself when they are all."""
    return x if stop - start == x.shape[2] else x[:, :, start:stop]


def _keys_values(chunk: ChunkAttention, part: Part, place: int, k: Tensor, v: Tensor) -> KeyValue:
    if not part.path:
        return _rows(k, part.k_start, part.k_stop), _rows(v, part.k_start, part.k_stop)
    keys, values = chunk.cache.read(place, part.k_start, part.k_stop)
    return keys, values


def _merge(out: Tensor, lse: Tensor, part: Part, part_out: Tensor, part_lse: Tensor) -> None:
    """Adds a part to the running softmax, in place."""
    before, running = _rows(lse, part.q_start, part.q_stop), _rows(out, part.q_start, part.q_stop)
    merged = torch.logaddexp(before, part_lse.to(lse.dtype))
    running.mul_(torch.exp(before - merged).unsqueeze(-1))
    running.add_(part_out * torch.exp(part_lse - merged).unsqueeze(-1))
    before.copy_(merged)


def _add(total: Tensor | None, term: Tensor, like: Tensor, start: int, stop: int) -> Tensor:
    """`total` plus a gradient of rows [start, stop) of `like`, in the accumulation dtype."""
    dtype = torch.promote_types(torch.float32, like.dtype)
    whole = stop - start == like.shape[2]
    if total is None and whole:
        return term.to(dtype)
    if total is None:
        total = torch.zeros_like(like, dtype=dtype)
    _rows(total, start, stop).add_(term)
    return total
