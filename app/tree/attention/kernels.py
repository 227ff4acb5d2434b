"""Dense attention kernels that also return the log-sum-exp, and their backward given the *merged* result.

Promises: `backward` called part by part with the output and log-sum-exp merged over all parts gives gradients that add
up to the exact ones, because softmax probabilities are exp(score - log-sum-exp) of the whole row.
Shapes: q [1, Hq, n, d], k and v [1, Hk, m, d] with Hq a multiple of Hk (grouped-query heads are never repeated in
memory by the flash kernels), lse [1, Hq, n] in float32 (float64 for float64).
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

_aten = torch.ops.aten


class Kernel(Protocol):
    """One dense attention call; `mask`: additive [n, m] or [1, Hq, n, m] in q's dtype or None; `saved` goes from
    forward to backward."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Any]: ...

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
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class CpuFlash:
    """ATen's CPU flash attention: float64, float32, bfloat16, float16; any mask."""

    def forward(self, q, k, v, causal, mask, scale):  # type: ignore[no-untyped-def]
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal, attn_mask=mask, scale=scale
        )
        return out, lse, None

    def backward(self, grad, q, k, v, out, lse, saved, causal, mask, scale):  # type: ignore[no-untyped-def]
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )


class CudaFlash:
    """ATen's CUDA flash attention: bfloat16 and float16, no mask."""

    def forward(self, q, k, v, causal, mask, scale):  # type: ignore[no-untyped-def]
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return out, lse, (cum_q, cum_k, max_q, max_k, seed, offset)

    def backward(self, grad, q, k, v, out, lse, saved, causal, mask, scale):  # type: ignore[no-untyped-def]
        cum_q, cum_k, max_q, max_k, seed, offset = saved
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
        )


class CudaEfficient:
    """ATen's memory-efficient CUDA attention: float32 on any GPU, float16 on those before Ampere, and on all what has a
    mask or heads too wide for flash kernels.

    It knows no grouped heads: the query heads of a key-value head become heads of a batch entry, over which keys and
    values are expanded without a copy, and their gradients come back a query head each and are summed. Its log-sum-exp
    has rows up to a multiple of 32; those it adds, it reads as +inf (a probability of 0). Rows of a mask begin at
    multiples of 16 bytes, and nothing in it is -inf, from which a row that sees none of its first keys would have no
    number: a query that sees no key at all gets some mean of the values, and a log-sum-exp that says nothing.
    """

    def forward(self, q, k, v, causal, mask, scale):  # type: ignore[no-untyped-def]
        out, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(
            *_by_key_head(q, k, v), _bias(q, k, mask), True, 0.0, causal, scale=scale
        )
        return out.reshape(q.shape), lse[:, :, : q.shape[2]].reshape(q.shape[:3]), (seed, offset)

    def backward(self, grad, q, k, v, out, lse, saved, causal, mask, scale):  # type: ignore[no-untyped-def]
        queries, keys, values = _by_key_head(q, k, v)
        grad, out, lse = (x.reshape(queries.shape[: x.dim()]) for x in (grad, out, lse))
        rows = _EFFICIENT_ROWS * -(-lse.shape[2] // _EFFICIENT_ROWS)
        lse = torch.nn.functional.pad(lse, (0, rows - lse.shape[2]), value=float("inf"))
        bias, wanted = _bias(q, k, mask), (True, True, True, False)
        grad_q, grad_k, grad_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad, queries, keys, values, bias, out, lse, *saved, 0.0, wanted, causal, scale=scale
        )
        return grad_q.reshape(q.shape), grad_k.sum(1).unsqueeze(0), grad_v.sum(1).unsqueeze(0)


def _by_key_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, Hq, n, d], k and v [1, Hk, m, d] -> [Hk, Hq / Hk, n or m, d], views where q allows it."""
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    queries = q.reshape(heads, groups, *q.shape[2:])
    keys, values = (x[0].unsqueeze(1).expand(heads, groups, *x.shape[2:]) for x in (k, v))
    return queries, keys, values


def _bias(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """A mask as this kernel takes it: [Hk, Hq / Hk, n, m], expanded over heads without a copy."""
    if mask is None:
        return None
    heads, groups, (n, m) = k.shape[1], q.shape[1] // k.shape[1], mask.shape[-2:]
    lowest = max(-1e30, torch.finfo(mask.dtype).min / 2)  # of float16 the half: it is scaled before it is an exponent
    finite = torch.nn.functional.pad(mask.clamp_min(lowest), (0, -m % 16))[..., :m]
    return finite.expand(heads, groups, n, m) if mask.dim() == 2 else finite.reshape(heads, groups, n, m)


class Math:
    """Plain torch on any device and dtype; serves small blocks, soft-capped scores, and what no kernel takes on GPUs.

    Scores exist for a block of queries at a time, [Hq, block, m] of at most `_SCORE_BYTES` (one query at least).

    Args:
        softcap: scores become softcap * tanh(scores / softcap) before the mask (Gemma 2); None: as they are.
    """

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap

    def forward(self, q, k, v, causal, mask, scale):  # type: ignore[no-untyped-def]
        dtype = torch.promote_types(torch.float32, q.dtype)
        out = torch.empty(q.shape[:3] + v.shape[3:], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
        for rows in self._blocks(q, k):
            scores = self._scores(q, k, rows, causal, mask, scale)[0]
            block = scores.logsumexp(-1)
            lse[:, :, rows] = block.flatten(1, 2)
            probs = scores.sub_(block.unsqueeze(-1)).exp_()
            out[:, :, rows] = (probs @ v[:, :, : scores.shape[-1]].to(dtype).unsqueeze(2)).flatten(1, 2).to(q.dtype)
        return out, lse, None

    def backward(self, grad, q, k, v, out, lse, saved, causal, mask, scale):  # type: ignore[no-untyped-def]
        dtype = torch.promote_types(torch.float32, q.dtype)
        groups = (k.shape[1], q.shape[1] // k.shape[1])
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        for rows in self._blocks(q, k):
            scores, slope = self._scores(q, k, rows, causal, mask, scale)
            keys = slice(0, scores.shape[-1])
            block_grad, block_out = (x[:, :, rows].to(dtype).unflatten(1, groups) for x in (grad, out))
            probs = scores.sub_(lse[:, :, rows].unflatten(1, groups).unsqueeze(-1)).exp_()
            grad_v[:, :, keys] += (probs.transpose(-1, -2) @ block_grad).sum(2)
            grad_scores = block_grad @ v[:, :, keys].to(dtype).unsqueeze(2).transpose(-1, -2)
            grad_scores.sub_((block_grad * block_out).sum(-1, keepdim=True)).mul_(probs).mul_(scale)
            if slope is not None:
                grad_scores.mul_(slope)
            grad_q[:, :, rows] = (grad_scores @ k[:, :, keys].to(dtype).unsqueeze(2)).flatten(1, 2).to(q.dtype)
            queries = q[:, :, rows].to(dtype).unflatten(1, groups)
            grad_k[:, :, keys] += (grad_scores.transpose(-1, -2) @ queries).sum(2)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)

    @staticmethod
    def _blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
        bytes_per_query = q.shape[1] * k.shape[2] * torch.promote_types(torch.float32, q.dtype).itemsize
        size = max(1, _SCORE_BYTES // bytes_per_query)
        for start in range(0, q.shape[2], size):
            yield slice(start, min(start + size, q.shape[2]))

    def _scores(
        self, q: Tensor, k: Tensor, rows: slice, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """[1, Hk, Hq / Hk, block, keys] in the accumulation dtype, keys up to the last that a causal block sees; and
        the slope of the soft-capping, where there is one."""
        dtype = torch.promote_types(torch.float32, q.dtype)
        groups = (k.shape[1], q.shape[1] // k.shape[1])
        keys = k[:, :, : rows.stop] if causal else k
        queries = q[:, :, rows].to(dtype).unflatten(1, groups)
        scores = (queries @ keys.to(dtype).unsqueeze(2).transpose(-1, -2)).mul_(scale)
        slope = None
        if self.softcap is not None:
            capped = scores.div_(self.softcap).tanh_()
            slope = 1 - capped.square()
            scores = capped.mul_(self.softcap)
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + rows.start)
            scores.masked_fill_(hidden, float("-inf"))
        if mask is not None:
            own = mask[..., rows, :].to(dtype)
            scores.add_(own if own.dim() == 2 else own.unflatten(1, groups))
        return scores, slope


def pick_kernel(q: Tensor, mask: Tensor | None, softcap: float | None = None) -> Kernel:
    """The fastest kernel that can do the call on q's device and dtype."""
    if softcap is not None:
        return Math(softcap)
    if q.device.type == "cpu":
        return _CPU_FLASH
    if q.device.type == "cuda" and mask is None and flash_refusal(q.device, q.dtype, q.shape[-1]) is None:
        return _CUDA_FLASH
    fits = q.device.type == "cuda" and _fits_efficient(q)
    if fits and (mask is None or takes_masks(q.device, q.dtype, q.shape[-1])):
        return _CUDA_EFFICIENT
    return _MATH


@cache
def takes_masks(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the memory-efficient kernel computes attention under a mask as plain torch does, forward and backward:
    tried once, for releases of torch gave such rows no number, silently. Warns where it does not."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 77, head_dim), (1, 2, 203, head_dim), (1, 2, 203, head_dim), (1, 4, 77, head_dim)]
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        q, k, v, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        hidden = torch.rand(77, 203, generator=generator) < 0.5
        hidden[:40, :140] = True  # rows that see none of their first keys
        hidden[:, -1] = False
        mask = torch.zeros(77, 203).masked_fill_(hidden, float("-inf")).to(device, dtype)
        try:
            found, expected = (_whole(kernel, q, k, v, grad, mask) for kernel in (_CUDA_EFFICIENT, _MATH))
        except torch.OutOfMemoryError:
            raise  # of the pass around it, which is repeated
        except RuntimeError as error:
            why = f"it fails: {error}"
        else:
            off = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
            if all(one < (0.02 if dtype in FLASH_DTYPES else 0.005) for one in off):
                return True
            why = f"outputs and gradients are off by {', '.join(f'{one:.2g}' for one in off)} of the largest"
    warnings.warn(
        f"torch's memory-efficient attention under a mask, in {dtype} with heads of {head_dim}, is not used: {why};"
        " plain torch computes it, which is slower",
        stacklevel=2,
    )
    return False


def _whole(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor) -> list[Tensor]:
    """Output, log-sum-exp and gradients of one call, in float32."""
    out, lse, saved = kernel.forward(q, k, v, False, mask, 0.3)
    grads = kernel.backward(grad, q, k, v, out, lse, saved, False, mask, 0.3)
    return [x.float() for x in (out, lse, *grads)]


def flash_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why CUDA flash kernels cannot compute heads of `head_dim` in `dtype` on this device; None when they can."""
    if device.type != "cuda":
        return f"needs a CUDA device, and the model is on '{device.type}'"
    if capability(device) < AMPERE:
        have = ".".join(map(str, capability(device)))
        return f"needs a GPU of compute capability 8.0 (Ampere) or newer, and this one has {have}"
    if dtype not in FLASH_DTYPES:
        return f"computes bfloat16 and float16, not {dtype}"
    if head_dim > FLASH_HEAD_DIM or head_dim % 8:
        return f"takes head sizes that are multiples of 8 and at most {FLASH_HEAD_DIM}, not {head_dim}"
    return None


def _fits_efficient(q: Tensor) -> bool:
    """Whether the memory-efficient kernel takes the dtype and head size of q on its device."""
    if q.dtype == torch.bfloat16 and capability(q.device) < AMPERE:
        return False
    multiple = {torch.float32: 4, torch.bfloat16: 8, torch.float16: 8}.get(q.dtype)
    return multiple is not None and q.shape[-1] % multiple == 0


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; Ampere's for one of AMD, whose own numbers (9.0 for an MI250) are others."""
    return AMPERE if torch.version.hip else torch.cuda.get_device_capability(device)


@cache
def triton_lacks() -> str | None:
    """What Triton lacks here to compile a kernel, with the remedy; None when nothing is known of. Its first launch of
    each kernel calls a C compiler, with Python's headers, which many images for running do not have."""
    if find_spec("triton") is None:
        return "the package triton (pip install triton)"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler (install gcc, or set CC)"
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # as Triton asks
    if not (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h").exists():
        return "Python's headers (install python3-dev, or the like for this Python)"
    return None


AMPERE = (8, 0)
FLASH_DTYPES, FLASH_HEAD_DIM = (torch.bfloat16, torch.float16), 256
_EFFICIENT_ROWS = 32
_CPU_FLASH, _CUDA_FLASH, _CUDA_EFFICIENT, _MATH = CpuFlash(), CudaFlash(), CudaEfficient(), Math()
_SCORE_BYTES = 64 * 2**20
