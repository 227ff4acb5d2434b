"""Peak memory of one run, in bytes of tensors.

On a GPU the caching allocator's own count. On a CPU the sum of what PyTorch's allocator handed out and took back, as
its profiler reports it: exact and the same every time, where the resident size of a process depends on what malloc
keeps for itself. NumPy arrays (the tree and the plan) are not in it; they are 3 x the token array at most.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Most bytes one `run` holds at once above what was held before it (model and gradients)."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = recorded.profiler.kineto_results.events()
    changes = np.array([(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"], np.int64).reshape(-1, 2)
    held = np.cumsum(changes[np.argsort(changes[:, 0], kind="stable"), 1])
    return max(0, int(held.max(initial=0)))


class Resident:
    """Most resident memory of this process while a block runs, above what it had before: rough, but it costs the block
    no time. Linux only; elsewhere, and on GPUs, `bytes` stays None."""

    def __init__(self, device: torch.device) -> None:
        self.bytes: int | None = None
        self._before: int | None = None
        self._wanted = device.type == "cpu"

    def __enter__(self) -> Resident:
        if self._wanted:
            try:
                ctypes.CDLL("libc.so.6").malloc_trim(0)
                Path("/proc/self/clear_refs").write_text("5")  # resets the peak
                self._before = _status("VmRSS")
            except (OSError, AttributeError):
                self._before = None
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            self.bytes = max(0, _status("VmHWM") - self._before)


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return 1024 * int(found[1])
