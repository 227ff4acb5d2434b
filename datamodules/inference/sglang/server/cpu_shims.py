"""Lets released sglang and torchvision wheels run beside a CPU build of torch; imported before either of them.

Two things stand in the way and nothing else: torchvision registers shape functions for two operators that live in its
CUDA library, and sglang imports helpers of speculative decoding, of recurrent layers and of what sees from
`sgl_kernel`, which has no CPU wheel. The operators get their schemas; the module gets a stand-in whose helpers raise
when called, so that using one is an error and never a wrong result. A torchvision that loads and an `sgl_kernel` that
is installed are left alone.
Triton's kernels, which short convolutions ask for on every device, are interpreted.

sglang's own processes are forks here: spawned, each imports everything again, which is two thirds of a start. Memory
that its adapters, and its record of chosen experts, want pinned for copies to a GPU is ordinary memory.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_set_start_method = multiprocessing.set_start_method


class _StandIn(types.ModuleType):
    """Answers to names ending in _cpu, sglang's mark of a CPU helper; unknown names are unknown."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.endswith("_cpu"):
            raise AttributeError(f"sgl_kernel has no {name} on this machine")

        def refuse(*args: Any, **options: Any) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name} needs the real sgl_kernel, which is not installed")

        return refuse


def install() -> None:
    """Puts all in force in this process. Idempotent."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
    multiprocessing.set_start_method = _fork
    for name in ("tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = _itself  # type: ignore[assignment, method-assign]
    torch.cuda.cudart = _Registers
    _complete_torchvision()
    _mend_interpreter()
    if "sgl_kernel" not in sys.modules and importlib.util.find_spec("sgl_kernel") is None:
        for name in ("sgl_kernel", "sgl_kernel.mamba"):
            module = _StandIn(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module
        # Its operators, which layers and models look up when they are imported, whoever runs them.
        setattr(torch.ops, "sgl_kernel", sys.modules["sgl_kernel"])  # noqa: B010, mypy knows it as no attribute


def _fork(method: str | None, force: bool = False) -> None:
    """In place of "spawn", which sglang asks for and CUDA needs."""
    _set_start_method("fork", force=force)


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*args, **options)

    return made


def _itself(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    return tensor


class _Registers:
    """In place of CUDA's runtime, which pins memory that is there already: its functions succeed, and do nothing."""

    @staticmethod
    def cudaHostRegister(*args: Any) -> int:
        return 0

    cudaHostUnregister = cudaHostRegister


def _mend_interpreter() -> None:
    """Masks of one value for all lanes are integers in Triton's interpreter, whose loads and stores take no such."""
    if importlib.util.find_spec("triton") is None:
        return
    builder: Any = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return mask

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, boolean(mask), *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, boolean(mask), *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


def _complete_torchvision() -> None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # an operator does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", schema)
        importlib.import_module("torchvision")
