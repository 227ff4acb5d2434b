"""Metrics that are right across ranks: means by their weights, sums and maxima, reduced together.

Promises: a mean over nothing (weight 0 on every rank) is left out, never reported as 0; whatever the number of metrics
there are two reductions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from app.batch import RolloutBatch
from modules.episodes import call_rewards, earned


class NamedMetrics(Metric):
    """A fixed set of named numbers.

    Args:
        means: reported as sum of totals / sum of weights.
        sums: reported as they add up.
        maxima: reported as the largest.
    """

    full_state_update = False
    sums_state: Tensor
    maxima_state: Tensor

    def __init__(self, means: Sequence[str] = (), sums: Sequence[str] = (), maxima: Sequence[str] = ()) -> None:
        super().__init__()
        self.means, self.sums, self.maxima = tuple(means), tuple(sums), tuple(maxima)
        zeros = torch.zeros(2 * len(self.means) + len(self.sums), dtype=torch.float64)
        lowest = torch.full((len(self.maxima),), -torch.inf, dtype=torch.float64)
        self.add_state("sums_state", zeros, dist_reduce_fx="sum")
        self.add_state("maxima_state", lowest, dist_reduce_fx="max")

    def update(
        self,
        means: Mapping[str, tuple[Tensor | float, Tensor | float]] | None = None,
        sums: Mapping[str, Tensor | float] | None = None,
        maxima: Mapping[str, Tensor | float] | None = None,
    ) -> None:
        """Adds to some of the numbers. `means`: name -> (total, weight), scalars."""
        for name, (total, weight) in (means or {}).items():
            at = 2 * self.means.index(name)
            self.sums_state[at] += total
            self.sums_state[at + 1] += weight
        for name, value in (sums or {}).items():
            self.sums_state[2 * len(self.means) + self.sums.index(name)] += value
        for name, value in (maxima or {}).items():
            at = self.maxima.index(name)
            self.maxima_state[at] = torch.maximum(self.maxima_state[at], torch.as_tensor(value).to(self.maxima_state))

    def _apply(self, fn: Callable, exclude_state: Sequence[str] = "") -> NamedMetrics:
        """Moves with its module but stays float64: precision bf16-true casts whole modules, and 1,937 tokens would
        become 1,936."""
        super()._apply(fn, exclude_state)
        for name in self._defaults:
            self._defaults[name] = cast(Tensor, self._defaults[name]).double()
            setattr(self, name, getattr(self, name).double())
        return self

    def compute(self) -> dict[str, Tensor]:
        """name -> scalar float64, over all ranks; names without data are left out."""
        pairs = self.sums_state[: 2 * len(self.means)].view(-1, 2)
        values = {name: pair[0] / pair[1] for name, pair in zip(self.means, pairs, strict=True) if pair[1] > 0}
        values.update(zip(self.sums, self.sums_state[2 * len(self.means) :], strict=True))
        values.update({n: v for n, v in zip(self.maxima, self.maxima_state, strict=True) if v > -torch.inf})
        return values


class TokenSums:
    """Sums over masked tokens of several quantities, kept on the device, which is not waited for.

    Args:
        names: the quantities; `add` may leave some out.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """Adds [T] tensors over the tokens of `mask` [T]."""
        zeros = torch.zeros_like(mask, dtype=torch.float64)
        rows = [values[name].double() if name in values else zeros for name in self.names]
        if rows:
            # Products with a mask would make nan of what tokens that are not trained hold.
            self._sums += torch.where(mask, torch.stack(rows), 0.0).sum(1)

    def means(self, weight: Tensor | float) -> dict[str, tuple[Tensor, Tensor | float]]:
        """name -> (sum, weight), as `NamedMetrics.update` takes them."""
        return {name: (total, weight) for name, total in zip(self.names, self._sums)}


def remembered(module: nn.Module) -> Callable[[], None]:
    """What `module` has counted so far; calling it undoes what is counted later, by a pass that has to be repeated."""
    held = [*vars(module).items(), *module.named_children()]
    kept = {name: _copied(x) for name, x in held if isinstance(x, (NamedMetrics, TokenSums))}

    def restore() -> None:
        for name, value in kept.items():
            setattr(module, name, _copied(value))

    return restore


def _copied(counts: NamedMetrics | TokenSums) -> NamedMetrics | TokenSums:
    """The counts alone: what they reach other ranks by, process groups and locks, stays one."""
    shared = getattr(counts, "dist_sync_fn", None)
    return copy.deepcopy(counts, {} if shared is None else {id(shared): shared})


def forget(trainer: Any, hook: str, names: Iterable[str]) -> None:
    """Removes metrics that were logged in `hook` and are not measured any more. Lightning would log their last values
    again, and show them to early stopping, checkpoints and sweeps, as if they were of this step."""
    for name in names:
        trainer._results.pop(f"{hook}.{name}", None)
        for shown in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics):
            shown.pop(name, None)


def log_alone(
    module: L.LightningModule,
    hook: str,
    values: Mapping[str, Tensor],
    before: set[str],
    shown: Container[str],
    **options: Any,
) -> set[str]:
    """Logs `values` in `hook` of `module`, and forgets what was logged there `before` and is not among them.

    Args:
        shown: names for the progress bar. options: of `LightningModule.log`.

    Returns:
        The names.
    """
    forget(module.trainer, hook, before - values.keys())
    for name, value in values.items():
        module.log(name, value, prog_bar=name in shown, **options)
    return set(values)


def episode_reward(batch: RolloutBatch | None) -> tuple[float, int]:
    """Sum of what a batch's episodes earned, with rewards of single calls, and their number; zeros without a batch."""
    if batch is None:
        return 0.0, 0
    rewards = earned(batch, call_rewards(batch))[0]
    return float(rewards.sum()), len(rewards)
