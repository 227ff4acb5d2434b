"""Whether Triton's interpreter runs here: that of 3.6, which torch 2.11 comes with, does not beside NumPy 2.4.

Promises: this one lack is told by running a kernel; whatever else fails in it is raised.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _count(total, bound):  # type: ignore[no-untyped-def]
    found = 0
    for _ in range(0, bound):  # what the interpreter makes an integer of is an array of one element
        found += 1
    tl.store(total, found)


@cache
def lack() -> str:
    """Why it cannot run kernels with loops; "" where it can."""
    total = torch.zeros(1, dtype=torch.int32)
    try:
        _count[(1,)](total, 3)
    except InterpreterError as error:
        if "0-dimensional" not in str(error):
            raise
        return f"the interpreter of Triton {triton.__version__} runs no loop beside NumPy {np.__version__}"
    assert total.item() == 3
    return ""
