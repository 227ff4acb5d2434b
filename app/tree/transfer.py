"""Index arrays from the host to the model's device, without waiting for it.

Promise: no call synchronises: on CUDA devices arrays go through pinned memory, so that the host can prepare the next
chunk while this one runs (a plain `.to(device)` waits until all queued work is done).
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def on_device(values: npt.NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`values`, of any shape, on `device`: in their own dtype (on CPUs: the same memory), or converted to `dtype`."""
    host = torch.from_numpy(values)
    if device.type == "cuda":
        host = host.pin_memory()
    there = host.to(device, non_blocking=True)
    return there if dtype is None else there.to(dtype)  # one copy that also converts would do so on the host, and wait
