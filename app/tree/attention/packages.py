"""Other flash kernels than ATen's, by name: the package flash-attn (FlashAttention-2 and 3), and cuDNN's attention.

Promises: the packages' raw forwards and backwards are called, the backward with the *merged* output and log-sum-exp
(their autograd functions hold a call's own); grouped-query heads are not repeated; what a package cannot do (windows,
masks, small parts) is computed by the kernels of `flash`, of which these backends are kinds.

Signatures are those of flash-attn 2.8.3.post2 and of its hopper/ (FlashAttention-3, built from there; with one window
argument or, later, two: none is passed). cuDNN builds a plan for every pair of lengths, tens of milliseconds each: its
calls have lengths out of a few. FlashAttention-4 needs no backend: `torch.nn.attention.activate_flash_attention_impl`
puts it in place of the operators that `flash` calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from app.tree.attention.chunk_attention import ChunkAttention, LayerCall
from app.tree.attention.flash import FlashBackend, square_bounds
from app.tree.attention.kernels import Kernel, capability
from app.tree.planning.layout import Part
from app.tree.transfer import on_device

_aten = torch.ops.aten

HOPPER = (9, 0)
_FLASH_2, _FLASH_3 = "flash_attn.flash_attn_interface", "flash_attn_interface"
_QUERY_STEP, _KEY_STEP, _CUDNN_HEAD_DIM = 512, 1024, 128


class PackageBackend(FlashBackend):
    """`flash` with the dense calls and the squares of a flash-attn package.

    Args:
        name: of the backend; module: the package's interface; generation: 2 or 3.
    """

    def __init__(self, name: str, module: str, generation: int) -> None:
        self.name, self._module, self._generation = name, module, generation

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run there, with the remedy; None when it can."""
        if self._generation == 3 and device.type == "cuda" and capability(device)[0] != HOPPER[0]:
            return "needs a Hopper GPU (compute capability 9.0)"
        if find_spec(self._module.split(".")[0]) is None:
            wanted = "pip install -e '.[flash]'" if self._generation == 2 else "build hopper/ of flash-attention"
            return f"needs the module {self._module} ({wanted})"
        return None

    def refusal(self, q: Tensor, call: LayerCall) -> str | None:
        refusal = super().refusal(q, call)
        missing = self.missing(q.device) if refusal is None else None
        return refusal if missing is None else f"{missing}; or use attention='flash' (or 'auto')"

    def kernel(self, q: Tensor, mask: Tensor | None, part: Part, chunk: ChunkAttention, call: LayerCall) -> Kernel:
        if part.causal or mask is not None:
            return super().kernel(q, mask, part, chunk, call)
        return self.dense()

    def dense(self) -> PackageKernel:
        """The package's calls; ImportError where it is broken."""
        return PackageKernel(import_module(self._module), self._generation)

    def squares(self, bounds: list[int], window: int | None, device: torch.device) -> Kernel:
        longest = max(stop - start for start, stop in pairwise(bounds))
        if window is not None and window < longest:
            return super().squares(bounds, window, device)
        return self.dense().within(bounds, device)


class PackageKernel:
    """Calls of one flash-attn package: dense, or causal within each of several ranges of rows.

    Args:
        module: its interface; generation: 2 or 3.
    """

    def __init__(self, module: Any, generation: int) -> None:
        self._module, self._generation = module, generation
        self._bounds: Tensor | None = None
        self._longest = 0

    def within(self, bounds: list[int], device: torch.device) -> PackageKernel:
        """The same for ranges of rows between consecutive `bounds`, packed."""
        kernel = PackageKernel(self._module, self._generation)
        kernel._bounds = on_device(np.array(bounds, np.int32), device)
        kernel._longest = max(stop - start for start, stop in pairwise(bounds))
        return kernel

    def forward(self, q, k, v, causal, mask, scale):  # type: ignore[no-untyped-def]
        rows = [self._arranged(x) for x in (q, k, v)]
        if self._generation == 3:
            packed: dict[str, Any] = {}
            if self._bounds is not None:
                packed = {"cu_seqlens_q": self._bounds, "cu_seqlens_k": self._bounds}
                packed |= {"max_seqlen_q": self._longest, "max_seqlen_k": self._longest}
            out, lse, *_ = self._module._flash_attn_forward(*rows, **packed, softmax_scale=scale, causal=causal)
            saved = None
        elif self._bounds is None:
            out, lse, _, saved = self._module._flash_attn_forward(*rows, 0.0, scale, causal, -1, -1, 0.0, None, False)
        else:
            out, lse, _, saved = self._module._flash_attn_varlen_forward(*rows, *self._lengths(), 0.0, scale, causal)
        return self._back(out), lse.view(q.shape[:3]), saved

    def backward(self, grad, q, k, v, out, lse, saved, causal, mask, scale):  # type: ignore[no-untyped-def]
        rows = [self._arranged(x) for x in (grad, q, k, v, out)]
        lse = lse.contiguous() if self._bounds is None else lse.squeeze(0).contiguous()
        grads = [x.new_empty(x.shape) for x in rows[1:4]]
        if self._generation == 3:
            bounds, longest = (None, None) if self._bounds is None else (self._bounds, self._longest)
            lengths = (bounds, bounds, None, None, longest, longest)
            self._module._flash_attn_backward(*rows, lse, *lengths, *grads, scale, causal)
        elif self._bounds is None:
            more = (0.0, scale, causal, -1, -1, 0.0, None, False)
            self._module._flash_attn_backward(*rows, lse, *grads, *more, rng_state=saved)
        else:
            more = (0.0, scale, causal, -1, -1, 0.0, None, False)
            self._module._flash_attn_varlen_backward(*rows, lse, *grads, *self._lengths(), *more, rng_state=saved)
        return tuple(self._back(x) for x in grads)

    def _lengths(self) -> tuple[Any, ...]:
        return self._bounds, self._bounds, self._longest, self._longest

    def _arranged(self, x: Tensor) -> Tensor:
        """[1, H, n, d] -> [1, n, H, d], or packed [n, H, d]; only the last dimension has to be contiguous."""
        return x.transpose(1, 2) if self._bounds is None else x.squeeze(0).transpose(0, 1).contiguous()

    def _back(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) if self._bounds is None else x.transpose(0, 1).unsqueeze(0)


class CudnnBackend(FlashBackend):
    """`flash` with cuDNN's attention for long calls: over the path, in whole blocks of keys, and in a single branch."""

    name = "cudnn"

    def refusal(self, q: Tensor, call: LayerCall) -> str | None:
        refusal = super().refusal(q, call)
        if refusal is None and q.shape[-1] > _CUDNN_HEAD_DIM:
            return (
                f"takes heads of at most {_CUDNN_HEAD_DIM} here, not {q.shape[-1]}; use attention='flash' (or 'auto')"
            )
        return refusal

    def parts(self, chunk: ChunkAttention, call: LayerCall) -> list[Part]:
        key = ("cudnn parts", call.window, call.section)
        if key not in chunk.kept:
            chunk.kept[key] = [piece for part in super().parts(chunk, call) for piece in _in_blocks(part)]
        found: list[Part] = chunk.kept[key]
        return found

    def kernel(self, q: Tensor, mask: Tensor | None, part: Part, chunk: ChunkAttention, call: LayerCall) -> Kernel:
        queries, keys = part.q_stop - part.q_start, part.k_stop - part.k_start
        if mask is None and not part.causal and keys % _KEY_STEP == 0 and queries >= _QUERY_STEP:
            return CudnnKernel()
        alone = part.causal and len(square_bounds(chunk, call)) == 2
        if alone and queries >= _QUERY_STEP and (call.window is None or call.window >= queries):
            return CudnnKernel()
        return super().kernel(q, mask, part, chunk, call)

    def calls(self, parts: Sequence[Part]) -> int:
        return super().calls([piece for part in parts for piece in _in_blocks(part)])


def _in_blocks(part: Part) -> list[Part]:
    """A dense part with whole blocks of keys and what is left of them apart."""
    whole = (part.k_stop - part.k_start) // _KEY_STEP * _KEY_STEP
    small = part.q_stop - part.q_start < _QUERY_STEP
    if part.causal or part.mask is not None or small or whole in (0, part.k_stop - part.k_start):
        return [part]
    cut = part.k_start + whole
    rows: dict[str, Any] = {"q_start": part.q_start, "q_stop": part.q_stop, "causal": False, "path": part.path}
    return [Part(k_start=part.k_start, k_stop=cut, **rows), Part(k_start=cut, k_stop=part.k_stop, **rows)]


class CudnnKernel:
    """ATen's cuDNN attention, of queries filled up with zeros to a multiple of 512 (of keys too, where each sees those
    before it alone). A row of zeros has no gradient, and gives none: its output's gradient is zero."""

    def forward(self, q, k, v, causal, mask, scale):  # type: ignore[no-untyped-def]
        n = q.shape[2]
        filled = (_filled(q), *((_filled(k), _filled(v)) if causal else (k, v)))
        out, lse, cum_q, cum_k, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            *filled, None, True, 0.0, causal, False, scale=scale
        )
        return out[:, :, :n], lse.squeeze(-1)[:, :, :n], (seed, offset, None, cum_q, cum_k)

    def backward(self, grad, q, k, v, out, lse, saved, causal, mask, scale):  # type: ignore[no-untyped-def]
        n, m = q.shape[2], k.shape[2]
        rows = [_filled(x) for x in (grad, q)] + [_filled(x) if causal else x for x in (k, v)]
        lse = _filled(lse.unsqueeze(-1))
        lengths = (rows[1].shape[2], rows[2].shape[2])
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *rows, _filled(out), lse, *saved, *lengths, 0.0, causal, scale=scale
        )
        return grads[0][:, :, :n], grads[1][:, :, :m], grads[2][:, :, :m]


def _filled(x: Tensor) -> Tensor:
    """[1, H, n, d] with rows of zeros up to a multiple of 512."""
    return functional.pad(x, (0, 0, 0, -x.shape[2] % _QUERY_STEP))


FLASH_3 = PackageBackend("flash3", _FLASH_3, 3)
PACKAGES = (FLASH_3, PackageBackend("flash2", _FLASH_2, 2))
