"""Peak memory of one run, in bytes of tensors.

On a GPU the caching allocator's own count. On a CPU the sum of what PyTorch's allocator handed out and took back, as
its profiler reports it: exact and the same every time, where the resident size of a process depends on what malloc
keeps for itself. NumPy arrays (the tree and the plan) are not in it; they are 3 x the token array at most.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from benchmarks.common.systems import System

_RUN = "arborist::peak_bytes"


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Most bytes one `run` holds at once above what was held before it (model and gradients). On a CPU of what the
    calling thread allocates: a profiler sees what gloo's threads allocate for themselves, and not that they free it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    profiled = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiled as recorded, torch.profiler.record_function(_RUN):
        run()
    events = recorded.profiler.kineto_results.events()
    thread = next(event.start_thread_id() for event in events if event.name() == _RUN)
    own = [event for event in events if event.name() == "[memory]" and event.start_thread_id() == thread]
    changes = np.array([(event.start_ns(), event.nbytes()) for event in own], np.int64).reshape(-1, 2)
    held = np.cumsum(changes[np.argsort(changes[:, 0], kind="stable"), 1])
    return max(0, int(held.max(initial=0)))


def fitting(systems: Sequence[System], device: torch.device) -> tuple[list[System], list[str]]:
    """Those whose predicted memory a GPU has free beside model and gradients, and what to say of the others."""
    if device.type != "cuda":
        return list(systems), []
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    kept, left_out = [], []
    for system in systems:
        if (system.predicted_bytes or 0) <= free:
            kept.append(system)
        else:
            need = f"{system.predicted_bytes or 0:,} bytes predicted, {free:,} free"
            left_out.append(f"{system.name} ({need})")
    return kept, left_out


def of_predicted(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Measured peak memory over the prediction that budgets are made of, by system."""
    known = {name: row for name, row in rows.items() if row["peak_bytes"] and row["predicted_bytes"]}
    return {name: row["peak_bytes"] / row["predicted_bytes"] for name, row in known.items()}


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
