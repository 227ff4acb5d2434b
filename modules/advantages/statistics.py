"""Moments over the episodes of groups or of the batch, in float64."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from app import checks

Over = Literal["group", "batch", "none"]
OVER = ("group", "batch", "none")


def mean_over(values: Tensor, groups: Tensor, over: Over) -> Tensor:
    """[E], for each episode the mean of `values` [E] over its group (`groups` int64 [E], from 0) or over the batch;
    zeros for "none"."""
    if over == "none":
        return torch.zeros_like(values)
    labels = groups if over == "group" else torch.zeros_like(groups)
    sizes = torch.bincount(labels)
    return (torch.zeros(len(sizes), dtype=values.dtype).index_add(0, labels, values) / sizes.clamp(min=1))[labels]


def std_over(values: Tensor, groups: Tensor, over: Over) -> Tensor:
    """[E], as `mean_over`, the standard deviation with n - 1 in its denominator; 0 where n is 1, ones for "none"."""
    if over == "none":
        return torch.ones_like(values)
    labels = groups if over == "group" else torch.zeros_like(groups)
    sizes = torch.bincount(labels)
    squares = (values - mean_over(values, groups, over)) ** 2
    variance = torch.zeros(len(sizes), dtype=values.dtype).index_add(0, labels, squares) / (sizes - 1).clamp(min=1)
    return variance.sqrt()[labels]


def whiten(values: Tensor, eps: float) -> Tensor:
    """[M] -> (values - mean) / (std + eps), n - 1 in the denominator; fewer than two values are only centred."""
    centred = values - values.mean() if len(values) else values
    return centred / (centred.square().sum() / max(len(values) - 1, 1)).sqrt().add(eps) if len(values) > 1 else centred


def check_over(name: str, value: str) -> None:
    """Raises ValueError for a name that is none of OVER."""
    checks.one_of(f"advantage_options.{name}", value, OVER)
