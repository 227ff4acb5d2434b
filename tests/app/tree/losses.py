"""Losses that are nonlinear in a whole sequence, in a per-sequence form, and in the batched form made of it.

Each draws its coefficients per sequence from a seed, so two runs (and two orders of calls) see the same function.
Scaled so that their own conditioning does not eat the tolerance the parity tests ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Columns = list[Tensor]


def tanh_of_sums(columns: Columns, weights: Tensor) -> Tensor:
    """Every position's gradient depends on all positions, and the product couples the columns."""
    sums = torch.stack([(w * c).sum() / (4 * len(c) ** 0.5) for w, c in zip(weights, columns)])
    return torch.tanh(sums).sum() + torch.tanh(sums.prod())


def mean_times_variance(columns: Columns, weights: Tensor) -> Tensor:
    return sum(c.mean() * (w * c).var(unbiased=False) / 4 for w, c in zip(weights, columns))


def logsumexp(columns: Columns, weights: Tensor) -> Tensor:
    return torch.logsumexp(torch.cat([w * c for w, c in zip(weights, columns)]), 0)


def clipped_ratio(columns: Columns, weights: Tensor) -> Tensor:
    """PPO's clip with random advantages on the first column; the others enter as squared errors."""
    advantages = weights[0]
    ratio = torch.exp((columns[0] + 3) / 2 + 0.3 * weights[-1])
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    return loss + sum(((c - w) ** 2).mean() / 8 for w, c in zip(weights[1:], columns[1:]))


def plain_sum(columns: Columns, weights: Tensor) -> Tensor:
    """The linear one: policy gradient with fixed weights."""
    return sum((w * c).sum() for w, c in zip(weights, columns))


KINDS: dict[str, Callable[[Columns, Tensor], Tensor]] = {
    f.__name__: f for f in (tanh_of_sums, mean_times_variance, logsumexp, clipped_ratio, plain_sum)
}


class SequenceLoss:
    """`loss(out, i)` of sequence i; `loss.batched(out, indices)` sums it over flat outputs with `out.cu_seqlens`.

    `calls` records the indices of every call: each sequence must come exactly once a pass.
    """

    def __init__(self, kind: str, lengths: Sequence[int], seed: int, want: Sequence[str]) -> None:
        self.kind, self.want = KINDS[kind], tuple(want)
        self.calls: list[int] = []
        random = np.random.default_rng(seed)
        self.weights = [torch.from_numpy(random.normal(size=(len(want) + 1, n))) for n in lengths]

    def __call__(self, out: Any, i: int) -> Tensor:
        self.calls.append(int(i))
        columns = [getattr(out, name) for name in self.want]
        assert all(len(column) == self.weights[i].shape[1] for column in columns)
        return self.kind(columns, self.weights[i].to(columns[0]))

    def batched(self, out: Any, indices: Tensor) -> Tensor:
        bounds = out.cu_seqlens.tolist()
        assert len(bounds) == len(indices) + 1
        total = torch.zeros(())
        for k, i in enumerate(indices.tolist()):
            columns = {name: getattr(out, name)[bounds[k] : bounds[k + 1]] for name in self.want}
            total = total + self(SimpleNamespace(**columns), i)
        return total
