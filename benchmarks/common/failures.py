"""Work that goes on after an error.

Promises: what failed is told at once, with its traceback, and noted by name; what it had allocated on a GPU is free for
what follows.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def described(error: BaseException) -> str:
    """Kind and message on one line, of at most 400 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


@contextmanager
def noted(failed: dict[str, str], part: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """An error of this kind inside becomes `failed[part]`; others are raised."""
    try:
        yield
    except kind as error:
        failed[part] = described(error)
        print(f"FAILED: {part}: {failed[part]}", flush=True)
        traceback.print_exception(error, file=sys.stderr)
        traceback.clear_frames(error.__traceback__)
    if part in failed and torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
