"""Launches of Triton's kernels: on the device of what they compute, which need not be the current one; and what is
done where they cannot be compiled."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.tree import triton_lacks
from app.tree.attention import function, interval
from app.tree.heads import heads

BLOCKS = interval.Blocks(*[interval.Shape(16, 16, 4, 2)] * 3, columns=True)


class Kernel:
    """Launched in place of a kernel; notes the first argument, and whose device was the current one."""

    def __init__(self, current: list[Tensor], seen: list[tuple[Any, Tensor | None]]) -> None:
        self.current, self.seen = current, seen

    def __getitem__(self, grid: Any) -> Kernel:
        return self

    def __call__(self, first: Tensor, *arguments: Any, **constants: Any) -> None:
        self.seen.append((first, self.current[-1] if self.current else None))


@pytest.mark.usefixtures("interpreted")
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


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is found is kept; not from test to test."""
    for found in (triton_lacks, function._triton_compiles):
        found.cache_clear()
    yield
    monkeypatch.undo()
    for found in (triton_lacks, function._triton_compiles):
        found.cache_clear()


@pytest.mark.usefixtures("anew")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize(
    ("missing", "words"), [("compiler", r"a C compiler \(install gcc"), ("headers", "Python's headers")]
)
def test_what_does_without_is_chosen_where_triton_cannot_compile(
    missing: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in images made for running: the first launch of a kernel would be the end of a run."""
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(sysconfig, "get_paths", lambda *scheme: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(heads, "_properties", lambda device: None)
    assert triton_lacks() is None and heads._has_kernels(torch.device("cuda"))
    triton_lacks.cache_clear()
    if missing == "compiler":
        monkeypatch.delenv("CC")
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        (tmp_path / "Python.h").unlink()
    with pytest.warns(UserWarning, match=f"Triton lacks {words}.*slower"):
        assert not function._triton_compiles()
    assert not heads._has_kernels(torch.device("cuda"))
