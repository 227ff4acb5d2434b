"""The `triton` backend's kernels beside plain attention, for `benchmarks.gpu_suite`: blocks with a mask and without.

Promises: one chunk of two long branches and a short one over a path, so that whole blocks of the path and of the chunk
are computed without a mask, others with one, and the last of each is partly beyond the end; truth is the `sdpa` backend
in float64 on the CPU. On CPUs the kernels are interpreted, where Triton was imported so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.tree import PrefixTree
from app.tree.attention import BACKENDS
from app.tree.attention.chunk_attention import ChunkAttention, LayerCall
from app.tree.attention.path_cache import PathCache
from app.tree.planning.layout import layout
from app.tree.planning.planner import plan
from benchmarks.common.failures import described

HEADS, KEY_HEADS = 4, 2
LIMIT = 3.0
"""Error against the float64 truth, over that of the `sdpa` backend in the same dtype on the same device: 2.05 beside
that of CPUs, which rounds no probabilities."""


def check_interval(device: torch.device, sizes: tuple[int, ...] = (64, 128, 256)) -> list[dict[str, Any]]:
    """Output and gradients in bf16, by size of head, with and without a window that ends in the path."""
    rows = []
    for head in sizes:
        for window in (None, 200):
            row = {"check": f"triton: heads of {head}, window {window or 'none'}", "limit": LIMIT}
            try:
                rows.append(row | _compared(head, window, device))
            except Exception as error:  # a compiler's or a driver's
                rows.append(row | {"ok": False, "error": described(error)})
    return rows


def _compared(head: int, window: int | None, device: torch.device) -> dict[str, Any]:
    stem = np.arange(405)
    tree = PrefixTree.build([np.append(stem, [1000 + k] * n) for k, n in enumerate((610, 330, 40))])
    chunk = plan(tree, 1000, 2000).chunks[-1]
    rows, generator = len(layout(chunk, None, 0).tokens), torch.Generator().manual_seed(head)
    shapes = [(1, rows, HEADS, head)] * 2 + [(1, chunk.path_tokens + rows, KEY_HEADS, head)] * 2
    drawn = [torch.randn(shape, generator=generator).bfloat16().transpose(1, 2) for shape in shapes]
    refusal = BACKENDS["triton"].refusal(drawn[0].to(device), LayerCall(0, 1.0))
    if refusal is not None:
        return {"left_out": refusal, "ok": True}

    def run(backend: str, dtype: torch.dtype, where: torch.device) -> list[Tensor]:
        q, grad, k, v = (x.to(where, dtype) for x in drawn)
        path = chunk.path_tokens
        cache = PathCache(path, with_grads=True)
        if path:
            cache.push({0: (k, v)}, slice(0, path))
        used = BACKENDS[backend]
        placed = layout(chunk, None, used.masked_block or 0)
        attention = ChunkAttention(placed, cache, path, tree.token_depth[placed.tokens], used, False)
        own = [x.clone().requires_grad_() for x in (q, k[:, :, path:], v[:, :, path:])]
        out = used.attend(own[0], own[1], own[2], None, attention, LayerCall(0, head**-0.5, window))
        out.backward(grad)
        of_path = list(cache.grads(0, 0, path)) if path else []
        return [x.detach().double().cpu() for x in (out, *(x.grad for x in own), *of_path) if x is not None]

    truth = run("sdpa", torch.float64, torch.device("cpu"))
    mine, other = run("triton", torch.bfloat16, device), run("sdpa", torch.bfloat16, device)
    over = [float((a - right).norm() / (b - right).norm().clamp(min=1e-12)) for a, b, right in zip(mine, other, truth)]
    return {"over_sdpa": over, "path_tokens": chunk.path_tokens, "rows": rows, "ok": all(x <= LIMIT for x in over)}
