"""What the engine returns, what it hands to loss functions, and how these are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.tree.transfer import on_device

OUTPUT_NAMES = ("logprobs", "entropy", "values", "soft")


@dataclass(frozen=True, eq=False)
class SequenceOutputs:
    """Outputs of one sequence, each [L_i] in the accumulation dtype, or None when not wanted.

    Entry t belongs to token t and comes from the hidden state of token t - 1: its log-probability (nats), the entropy
    of the distribution it was drawn from, the value of the state it was drawn in, and what `SoftTargets` make of that
    distribution. Entry 0 and unscored entries are 0.0.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    soft: Tensor | None = None


@dataclass(frozen=True, eq=False)
class FlatOutputs:
    """Outputs of several sequences concatenated: each [sum of L_i], as in `SequenceOutputs`.

    `cu_seqlens` int64 [n + 1]: sequence k is entries `cu_seqlens[k]` to `cu_seqlens[k + 1]`.
    """

    cu_seqlens: Tensor
    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    soft: Tensor | None = None

    def sequence(self, k: int) -> SequenceOutputs:
        """Views of the k-th sequence."""
        start, stop = int(self.cu_seqlens[k]), int(self.cu_seqlens[k + 1])
        flat = {name: getattr(self, name) for name in OUTPUT_NAMES}
        return SequenceOutputs(**{name: x if x is None else x[start:stop] for name, x in flat.items()})

    def select(self, chosen: Tensor) -> FlatOutputs:
        """The sequences `chosen`, int64 [m] of 0 to n - 1, in that order."""
        lengths = self.cu_seqlens.diff()[chosen]
        ends = lengths.cumsum(0)
        starts = self.cu_seqlens[chosen] - (ends - lengths)
        at = torch.arange(int(lengths.sum())) + starts.repeat_interleave(lengths)
        flat = {name: getattr(self, name) for name in OUTPUT_NAMES}
        picked = {name: x if x is None else x[on_device(at.numpy(), x.device)] for name, x in flat.items()}
        return FlatOutputs(torch.cat([lengths.new_zeros(1), ends]), **picked)


class TreeOutputs:
    """Outputs of all sequences of a tree: `logprobs`, `entropy`, `values`, `soft` are lists of [L_i], or None."""

    def __init__(self, flat: FlatOutputs) -> None:
        self._flat = flat
        self.cu_seqlens = flat.cu_seqlens
        lengths = flat.cu_seqlens.diff().tolist()
        self.logprobs, self.entropy, self.values, self.soft = (
            None if x is None else list(x.split(lengths)) for x in (getattr(flat, name) for name in OUTPUT_NAMES)
        )

    def flat(self, name: str) -> Tensor:
        """One output of all sequences concatenated, [sum of L_i]. Raises KeyError when it was not wanted."""
        values = getattr(self._flat, name, None) if name in OUTPUT_NAMES else None
        if values is None:
            raise KeyError(f"'{name}' was not computed; add it to want=(...), which takes {OUTPUT_NAMES}")
        return torch.as_tensor(values)

    def with_gradient(self) -> FlatOutputs:
        """The outputs as leaves that take gradients, for a loss of the whole batch (`TreeEngine.backward_from`)."""
        flat = {name: getattr(self._flat, name) for name in OUTPUT_NAMES}
        leaves = {name: None if x is None else x.detach().clone().requires_grad_() for name, x in flat.items()}
        return FlatOutputs(self.cu_seqlens, **leaves)


LossFn = Callable[[Any, Any], Tensor]
BatchedLoss = Callable[[FlatOutputs, Tensor], Tensor]


def check_scalar(loss: Tensor, where: str) -> None:
    """Raises ValueError when a loss function returned anything but one number."""
    if loss.dim():
        raise ValueError(f"loss_fn: expected a scalar{where}, got shape {tuple(loss.shape)}; sum it")


def one_by_one(loss_fn: LossFn) -> LossFn:
    """A batched loss from one for single sequences."""

    def batched(out: FlatOutputs, indices: Tensor) -> Tensor:
        like = next(one for one in (out.logprobs, out.entropy, out.values, out.soft) if one is not None)
        found = [loss_fn(out.sequence(k), i) for k, i in enumerate(indices.tolist())]
        losses = [one if isinstance(one, Tensor) else like.new_tensor(one) for one in found]  # 0.0 of a sequence, say
        for i, loss in zip(indices.tolist(), losses):
            check_scalar(loss, f" for sequence {i}")
        return torch.stack(losses).sum()

    return batched
