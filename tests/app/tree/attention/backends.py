"""Attention for tests: a naive reference in float64, and the CUDA backends made to run on CPUs.

`naive` builds its own mask, soft-caps and appends sinks by definition, and shares nothing with `app.tree`. The
CUDA backends run with everything that is ours; only the kernel below is another: plain torch for ATen's flash
attention, and FlexAttention's unfused form, whose backward on CPUs torch refuses although it is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex_module
from transformers import AttentionInterface, PreTrainedModel

from app.tree.attention import BACKENDS
from app.tree.attention.flash import FlashBackend
from app.tree.attention.flex import FlexBackend
from app.tree.attention.kernels import Math

ON_CPU = ("sdpa", "flash_on_cpu", "flex_on_cpu")


def naive(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    repeat, n = query.shape[1] // key.shape[1], query.shape[2]
    scores = query @ key.repeat_interleave(repeat, 1).mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    hidden = (distance < 0) | (distance >= (sliding_window or n))
    scores = scores.masked_fill(hidden, float("-inf"))
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.to(scores.dtype)[None, :, None, None].expand(1, -1, n, 1)], -1)
    out = scores.softmax(-1)[..., :n] @ value.repeat_interleave(repeat, 1)
    return out.transpose(1, 2), None


AttentionInterface.register("naive", naive)


def float64_clean(model: PreTrainedModel) -> PreTrainedModel:
    """The model with LayerNorm for RMSNorm (which computes in float32) and `naive` for its own attention."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if "RMSNorm" in type(child).__name__:
                norm = nn.LayerNorm(child.weight.shape[0], dtype=torch.float64)
                nn.init.normal_(norm.weight, 1.0, 0.2)
                nn.init.normal_(norm.bias, 0.0, 0.2)
                setattr(module, name, norm)
    model.double().set_attn_implementation("naive")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products have no float64
    return model


class LoopSquares:
    """What `FlashSquares` computes, one range after the other."""

    def __init__(self, bounds: list[int], window: int | None) -> None:
        self.bounds, self.window, self.math = bounds, window, Math()

    def _mask(self, n: int, like: Tensor) -> Tensor:
        distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        hidden = (distance < 0) | (distance >= (self.window or n))
        return torch.zeros(n, n, dtype=like.dtype).masked_fill(hidden, float("-inf"))

    def forward(self, q, k, v, causal, mask, scale):
        assert causal and mask is None
        ranges = [slice(a, b) for a, b in pairwise(self.bounds)]
        done = [
            self.math.forward(*(x[:, :, r] for x in (q, k, v)), False, self._mask(r.stop - r.start, q), scale)
            for r in ranges
        ]
        return torch.cat([d[0] for d in done], 2), torch.cat([d[1] for d in done], 2), None

    def backward(self, grad, q, k, v, out, lse, saved, causal, mask, scale):
        done = [
            self.math.backward(
                *(x[:, :, a:b] for x in (grad, q, k, v, out, lse)), None, False, self._mask(b - a, q), scale
            )
            for a, b in pairwise(self.bounds)
        ]
        return tuple(torch.cat([d[i] for d in done], 2) for i in range(3))


class FlashOnCpu(FlashBackend):
    name = "flash_on_cpu"

    def refusal(self, q, call):
        return "cannot soft-cap" if call.softcap is not None else None

    def squares(self, bounds, window, device):
        return LoopSquares(bounds, window)


class FlexOnCpu(FlexBackend):
    name = "flex_on_cpu"

    def refusal(self, q, call):
        return None


@contextmanager
def cuda_backends_on_cpu() -> Iterator[None]:
    """Registers both, and lets FlexAttention's unfused form differentiate on CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, "flash_on_cpu", FlashOnCpu())
        patch.setitem(BACKENDS, "flex_on_cpu", FlexOnCpu())
        patch.setattr(flex_module, "_validate_device", lambda *tensors: None)
        yield


__all__ = ["ON_CPU", "cuda_backends_on_cpu", "float64_clean", "naive"]
