"""The `flash` backend: CUDA flash attention of all branches of a chunk in one call of variable length.

Promises: every branch of a chunk is a causal square, and all squares are one kernel launch (packed by their bounds),
with the layer's sliding window applied by the kernel; what a branch sees of its ancestors in the chunk and of the path
are dense calls, as in the `sdpa` backend. Masks remain only where a window ends.

The kernels are ATen's own `_flash_attention_forward` and `_flash_attention_backward`: no package has to be installed,
and an implementation activated through `torch.nn.attention.activate_flash_attention_impl` is used.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.tree.chunk_attention import ChunkAttention, LayerCall
from app.tree.kernels import FLASH_DTYPES, FLASH_HEAD_DIM, Kernel, fits_flash
from app.tree.layout import Part
from app.tree.part_attention import PartBackend
from app.tree.transfer import on_device

_aten = torch.ops.aten


class FlashBackend(PartBackend):
    """Attention by parts, the squares of all branches at once: CUDA, bf16 or float16, heads of at most 256."""

    name = "flash"
    masked_block = 0

    def refusal(self, q: Tensor, call: LayerCall) -> str | None:
        if q.device.type != "cuda":
            return f"needs a CUDA device, and the model is on '{q.device.type}'; use attention='sdpa'"
        if q.dtype not in FLASH_DTYPES:
            return f"computes bfloat16 and float16, not {q.dtype}; use attention='flex' or 'sdpa', or bf16 precision"
        if not fits_flash(q):
            return (
                f"takes head sizes that are multiples of 8 and at most {FLASH_HEAD_DIM}, not {q.shape[-1]};"
                " use attention='flex' or 'sdpa'"
            )
        if call.softcap is not None:
            return f"cannot soft-cap scores (softcap={call.softcap}); use attention='flex' or 'sdpa'"
        return None

    def parts(self, chunk: ChunkAttention, call: LayerCall) -> list[Part]:
        key = ("flash parts", call.window)
        if key not in chunk.kept:
            parts = chunk.parts(call.window, cut_squares=False)
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
        key = ("squares", call.window)
        if key not in chunk.kept:
            chunk.kept[key] = self.squares(square_bounds(chunk), call.window, q.device)
        kernel: Kernel = chunk.kept[key]
        return kernel

    def squares(self, bounds: list[int], window: int | None, device: torch.device) -> Kernel:
        """The kernel of all causal squares between consecutive `bounds`, at once."""
        return FlashSquares(bounds, window, device)


def square_bounds(chunk: ChunkAttention) -> list[int]:
    """Where the causal squares of a chunk begin, and its end: they cover all rows without overlap."""
    squares = sorted((part.q_start, part.q_stop) for part in chunk.layout.parts if part.causal)
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
