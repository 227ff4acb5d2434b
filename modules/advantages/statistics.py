"""Moments over the episodes of groups or of the batch, in float64."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from app import checks
from app.statistics import ROUNDING

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


def centred_over(values: Tensor, groups: Tensor, over: Over) -> Tensor:
    """[E], `values` less `mean_over`; exactly 0 where all of a group, or of the batch, are equal but for rounding, of
    which a division by their deviation would make something of the size of all else."""
    if over == "none" or not len(values):
        return values
    labels = groups if over == "group" else torch.zeros_like(groups)
    bounds = [
        torch.zeros(int(labels.max()) + 1, dtype=values.dtype).scatter_reduce(
            0, labels, values, how, include_self=False
        )
        for how in ("amin", "amax")
    ]
    flat = _equal(*bounds)[labels]
    return (values - mean_over(values, groups, over)).masked_fill(flat, 0.0)


def _equal(least: Tensor, most: Tensor) -> Tensor:
    """As `app.statistics.equal`, of each pair."""
    return most - least <= ROUNDING * torch.maximum(least.abs(), most.abs()).clamp(min=1)


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
    """[M] -> (values - mean) / (std + eps), n - 1 in the denominator; fewer than two values are only centred. Zeros
    where they are equal but for rounding."""
    if len(values) and bool(_equal(values.min(), values.max())):
        return torch.zeros_like(values)
    centred = values - values.mean() if len(values) else values
    return centred / (centred.square().sum() / max(len(values) - 1, 1)).sqrt().add(eps) if len(values) > 1 else centred


def check_over(name: str, value: str) -> None:
    """Raises ValueError for a name that is none of OVER."""
    checks.one_of(f"advantage_options.{name}", value, OVER)
