"""Fields of training data as callers give them: one tensor or number each, or a `BatchError` in one line.

Promises: lists and arrays become tensors of the dtype that is asked for, whatever torch's default dtype is at the time;
what a conversion would change in silence is refused, naming the field. Imports nothing of the project.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor


class BatchError(ValueError):
    """Data that cannot be trained on; the message names the field, the sequence and the remedy."""


def as_tensor(value: Any, dtype: torch.dtype, where: str) -> Tensor:
    """1-D `value` (tensor, array or list of numbers) as `dtype`: int64, bool or float32. `where`: what errors call it.

    Lists go through numpy: torch would make them its default dtype, which is another one inside some contexts.
    """
    if not isinstance(value, Tensor):
        try:
            value = np.asarray(value)
        except ValueError as error:  # lists of several lengths
            raise BatchError(f"{where}: expected one number a token, got {type(value).__name__} ({error})") from error
        if value.dtype.kind not in "biuf":
            raise BatchError(f"{where}: expected numbers, got {value.dtype} ({str(value)[:40]})")
        value = torch.from_numpy(value) if value.size else torch.zeros(value.shape, dtype=dtype)
    if value.dim() != 1:
        raise BatchError(f"{where}: expected a 1-D tensor, got shape {tuple(value.shape)}")
    if dtype == torch.int64 and (value.is_floating_point() or value.dtype == torch.bool):
        raise BatchError(f"{where}: expected integers, got {value.dtype}")
    if dtype == torch.bool and value.dtype != torch.bool and not bool(((value == 0) | (value == 1)).all()):
        raise BatchError(f"{where}: expected True or False for each token, got numbers other than 0 and 1")
    if dtype == torch.float32 and value.is_complex():
        raise BatchError(f"{where}: expected real numbers, got {value.dtype}")
    if dtype == torch.float32 and value.is_floating_point() and value.itemsize < 4:
        raise BatchError(
            f"{where}: {value.dtype} has lost digits that importance ratios need; make it float32 where it is created"
            " (dtype=torch.float32, whatever torch's default dtype is at the time)"
        )
    return value.to(dtype)


def as_number(value: Any, where: str, kind: type = numbers.Real) -> Any:
    """The scalar `value` (a number, or one in a tensor or array): a float, or of kind `numbers.Integral` an int."""
    try:
        plain: Any = value.item() if hasattr(value, "item") else value  # of tensors, and of numpy's scalars
        fits, convert = isinstance(plain, kind), int if kind is numbers.Integral else float
        if fits:
            return convert(plain)
    except (RuntimeError, ValueError, OverflowError):  # several numbers, or a whole one beyond all floats
        pass
    expected = "an integer" if kind is numbers.Integral else "a number"
    raise BatchError(f"{where}: expected {expected}, got {str(value)[:40]!r}")
