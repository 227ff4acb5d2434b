"""The `flash` backend: CUDA flash attention of all branches of a chunk in one call of variable length.

Promises: every branch of a chunk is a causal square, and all squares are one kernel launch (packed by their bounds),
with the layer's sliding window applied by the kernel; what a branch sees of its ancestors in the chunk and of the path
are dense calls, as in the `sdpa` backend. Masks remain only where a window ends; a branch in several sections is as
many squares.

The kernels are ATen's own `_flash_attention_forward` and `_flash_attention_backward`: no package has to be installed,
and an implementation activated through `torch.nn.attention.activate_flash_attention_impl` is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.tree.attention.chunk_attention import ChunkAttention, LayerCall
from app.tree.attention.kernels import Kernel, flash_refusal
from app.tree.attention.part_attention import PartBackend
from app.tree.planning.layout import Part
from app.tree.transfer import on_device

_aten = torch.ops.aten


class FlashBackend(PartBackend):
    """Attention by parts, the squares of all branches at once: CUDA from Ampere on, bf16 or float16, heads to 256."""

    name = "flash"
    masked_block = 0

    def refusal(self, q: Tensor, call: LayerCall) -> str | None:
        refusal = flash_refusal(q.device, q.dtype, q.shape[-1])
        if refusal is not None:
            return f"{refusal}; use attention='sdpa' (or 'auto')"
        if call.softcap is not None:
            return f"cannot soft-cap scores (softcap={call.softcap}); use attention='flex' or 'sdpa'"
        return None

    def parts(self, chunk: ChunkAttention, call: LayerCall) -> list[Part]:
        key = ("flash parts", call.window, call.section)
        if key not in chunk.kept:
            parts = chunk.parts(call, cut_squares=False)
            rows = len(chunk.layout.tokens)
            chunk.kept[key] = [
                Part(0, rows, 0, rows, causal=True),
                *(part for part in parts if not part.causal),
            ]
        found: list[Part] = chunk.kept[key]
        return found

    def kernel(self, q: Tensor, mask: Tensor | None, part: Part, chunk: ChunkAttention, call: LayerCall) -> Kernel:
        if not part.causal:
            return super().kernel(q, mask, part, chunk, call)
        key = ("squares", call.window, call.section)
        if key not in chunk.kept:
            chunk.kept[key] = self.squares(square_bounds(chunk, call), call.window, q.device)
        kernel: Kernel = chunk.kept[key]
        return kernel

    def calls(self, parts: Sequence[Part]) -> int:
        return 1 + sum(not part.causal for part in parts)

    def estimated_calls(self, pieces: int, tokens: int) -> int:
        return 1 + pieces // 2  # a fork's other branches are one call over what is above them

    def squares(self, bounds: list[int], window: int | None, device: torch.device) -> Kernel:
        """The kernel of all causal squares between consecutive `bounds`, at once."""
        return FlashSquares(bounds, window, device)


def square_bounds(chunk: ChunkAttention, call: LayerCall) -> list[int]:
    """Where the causal squares of a chunk begin, and its end: they cover all rows without overlap."""
    parts = chunk.parts(call, cut_squares=False)
    squares = sorted((part.q_start, part.q_stop) for part in parts if part.causal)
    assert squares[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(squares)), "branches cover a chunk's rows"
    return [start for start, _ in squares] + [squares[-1][1]]


class FlashSquares:
    """Causal attention within each of several ranges of rows, packed: one launch forward, one backward.

    Args:
        bounds: rows where ranges begin, and the end; window: tokens a query sees, itself included, or None.
    """

    def __init__(self, bounds: list[int], window: int | None, device: torch.device) -> None:
        self.bounds = on_device(np.array(bounds, np.int32), device)
        self.longest = max(stop - start for start, stop in pairwise(bounds))
        before = None if window is None or window >= self.longest else window - 1
        self.window = {"window_size_left": before, "window_size_right": None if before is None else 0}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Any]:
        """q [1, Hq, n, d], k and v [1, Hk, n, d] -> output like q, log-sum-exp float32 [1, Hq, n], and for backward."""
        out, lse, rng_state, unused, _ = _aten._flash_attention_forward(
            *(_packed(x) for x in (q, k, v)),
            self.bounds,
            self.bounds,
            self.longest,
            self.longest,
            0.0,
            True,
            False,
            scale=scale,
            **self.window,
        )
        return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0), (rng_state, unused)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        saved: Any,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, in their shapes, for the merged `out` and `lse`."""
        grads = _aten._flash_attention_backward(
            *(_packed(x) for x in (grad, q, k, v, out)),
            lse.squeeze(0).contiguous(),
            self.bounds,
            self.bounds,
            self.longest,
            self.longest,
            0.0,
            True,
            *saved,
            scale=scale,
            **self.window,
        )
        grad_q, grad_k, grad_v = (x.transpose(0, 1).unsqueeze(0) for x in grads)
        return grad_q, grad_k, grad_v


def _packed(x: Tensor) -> Tensor:
    """[1, H, n, d] -> [n, H, d], contiguous."""
    return x.squeeze(0).transpose(0, 1).contiguous()
