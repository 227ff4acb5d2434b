"""Launches of Triton's kernels: on the device of what they compute, which need not be the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from app.tree.attention import interval
from app.tree.heads import heads

pytestmark = pytest.mark.usefixtures("interpreted")
BLOCKS = interval.Blocks(*[interval.Shape(16, 16, 4, 2)] * 3, columns=True)


class Kernel:
    """Launched in place of a kernel; notes the first argument, and whose device was the current one."""

    def __init__(self, current: list[Tensor], seen: list[tuple[Any, Tensor | None]]) -> None:
        self.current, self.seen = current, seen

    def __getitem__(self, grid: Any) -> Kernel:
        return self

    def __call__(self, first: Tensor, *arguments: Any, **constants: Any) -> None:
        self.seen.append((first, self.current[-1] if self.current else None))


def test_on_the_device_of_what_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel: torch's own operators see to it, Triton does not."""
    current, seen = list[Tensor](), list[tuple[Any, Tensor | None]]()

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    kernels, fused = interval._operators(), heads._fused_operators()
    for module, names in (
        (kernels, ("_forward_kernel", "_query_gradient_kernel", "_key_gradient_kernel")),
        (fused, ("_outputs_kernel", "_gradient_kernel")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Kernel(current, seen))
    q, k, v, path_k, path_v = (torch.zeros(1, 2, 5, 16) for _ in range(5))
    listed = [torch.zeros(3, dtype=torch.int32) for _ in range(8)]
    how = (listed, BLOCKS.flat(), 1.0, 0, 0.0)
    out, lse = kernels.interval_attention(q, k, v, path_k, path_v, None, *how)
    grads = torch.zeros_like(k), torch.zeros_like(v)
    kernels.interval_attention_backward(out, q, k, v, path_k, path_v, *grads, out, lse, *how)
    logits, targets, temperatures = torch.zeros(3, 7), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    fused.softmax_outputs(logits, targets, temperatures, True)
    fused.softmax_gradient_(logits, targets, temperatures, temperatures, None)
    assert len(seen) == 6 and not current
    assert all(there is not None and first.data_ptr() == there.data_ptr() for first, there in seen)
