"""Attention of a chunk's queries to the tokens an indexer chose for each, among those they see.

Promises: exact, forward and backward, for any choice; one dense call for a block of queries over [path | chunk], under
a mask of at most `_MASK_BYTES` that exists for that block alone. Its work is that of dense attention, whatever was
chosen, and on GPUs, where no kernel takes such a mask, that of plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from app.tree.attention.chunk_attention import ChunkAttention, LayerCall
from app.tree.attention.indexers import visible
from app.tree.attention.kernels import pick_kernel
from app.tree.attention.path_cache import KeyValue
from app.tree.attention.sinks import grad_of_sinks, with_sinks

_MASK_BYTES = 64 * 2**20


def attend_selected(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, picks: Tensor, chunk: ChunkAttention, call: LayerCall
) -> Tensor:
    """As `Backend.attend`; `picks`: int32 [1, n, m], positions in [path | chunk], -1 for none."""
    found: Tensor = _Selected.apply(q, k, v, sinks, picks, chunk, call)
    return found


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        picks: Tensor,
        chunk: ChunkAttention,
        call: LayerCall,
    ) -> Tensor:
        keys, values = _all(chunk, call.layer, k, v)
        outs, sums, saved = [], [], []
        for rows, mask in _blocks(chunk, picks, q):
            seen = slice(0, mask.shape[1])
            kernel = pick_kernel(q, mask)
            out, lse, extra = kernel.forward(
                q[:, :, rows], keys[:, :, seen], values[:, :, seen], False, mask, call.scale
            )
            outs.append(out)
            sums.append(lse.to(torch.promote_types(torch.float32, q.dtype)))
            saved.append(extra)
        out, lse = with_sinks(torch.cat(outs, 2), torch.cat(sums, 2), sinks)
        ctx.save_for_backward(q, k, v, sinks, picks, out, lse)
        ctx.chunk, ctx.call, ctx.saved = chunk, call, saved
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, sinks, picks, out, lse = ctx.saved_tensors
        chunk, call, path = ctx.chunk, ctx.call, ctx.chunk.path_tokens
        grad = grads[0].contiguous()
        with torch.autocast(grad.device.type, enabled=False):
            keys, values = _all(chunk, call.layer, k, v)
            dtype = torch.promote_types(torch.float32, q.dtype)
            grad_q = torch.empty_like(q)
            grad_k, grad_v = torch.zeros_like(keys, dtype=dtype), torch.zeros_like(values, dtype=dtype)
            for (rows, mask), extra in zip(_blocks(chunk, picks, q), ctx.saved, strict=True):
                seen = slice(0, mask.shape[1])
                block_q, block_k, block_v = pick_kernel(q, mask).backward(
                    grad[:, :, rows],
                    q[:, :, rows],
                    keys[:, :, seen],
                    values[:, :, seen],
                    out[:, :, rows],
                    lse[:, :, rows].contiguous(),
                    extra,
                    False,
                    mask,
                    call.scale,
                )
                grad_q[:, :, rows] = block_q
                grad_k[:, :, seen] += block_k
                grad_v[:, :, seen] += block_v
            if path:
                chunk.cache.add_grads(call.layer, grad_k[:, :, :path], grad_v[:, :, :path])
            own_k, own_v = grad_k[:, :, path:], grad_v[:, :, path:]
            chunk.add_returned(call.layer, own_k, own_v)
            grad_sinks = None if sinks is None else grad_of_sinks(sinks, lse, grad, out)
        return grad_q, own_k.to(k.dtype), own_v.to(v.dtype), grad_sinks, None, None, None


def _all(chunk: ChunkAttention, layer: int, k: Tensor, v: Tensor) -> KeyValue:
    """Keys and values [1, Hk, path + n, d]."""
    if not chunk.path_tokens:
        return k, v
    keys, values = chunk.cache.read(layer, chunk.path_tokens)
    return torch.cat([keys, k], 2), torch.cat([values, v], 2)


def _blocks(chunk: ChunkAttention, picks: Tensor, q: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of queries, with the additive mask [rows, path + rows.stop] of each, in q's dtype: every query sees
    something, since the best of what it may see is chosen."""
    total, count = chunk.path_tokens + q.shape[2], q.shape[2]
    size = max(1, _MASK_BYTES // (total * q.element_size()))
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        seen = visible(chunk, rows, q.device)
        width = seen.shape[1]
        chosen = picks[0, rows].long()
        chosen = torch.where((chosen < 0) | (chosen >= width), width, chosen)  # a column of its own for none
        hidden = seen.new_ones(len(seen), width + 1).scatter_(1, chosen, False)[:, :width]
        hidden |= ~seen
        yield rows, torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
