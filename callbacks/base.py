"""What callbacks share: where a run writes, and every optimizer step's metrics.

Promises: `run_dir` is the same directory on every rank; `on_step_metrics` runs once a step, after the module logged
that step. (A callback's own `on_train_batch_end` runs before the module's: what it can read there is the step before.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from app.strategies.shards import gathers, is_sharded, take_buffers, whole_copy, without_storage
from datamodules.inference.export import base_model, checkpoint_parts, weight_parts


def run_dir(trainer: Trainer) -> Path:
    """The run directory: `trainer.log_dir`, else (no logger) `trainer.default_root_dir`.

    A collective: call it on all ranks or on none (Lightning broadcasts rank 0's answer).
    """
    return Path(trainer.log_dir or trainer.default_root_dir)


def whole_policy(trainer: Trainer, policy: Any, adapter: bool = False) -> Any:
    """A collective: on rank 0 the policy with whole weights, which is a copy in CPU memory where ranks hold shards; the
    policy itself where nothing but its `adapter` is wanted, which every rank has."""
    return whole_copy(policy, trainer.is_global_zero) if is_sharded(policy) and not adapter else policy


def policy_in_parts(policy: Any, keep: bool) -> tuple[Any, Iterator[dict[str, Tensor]]]:
    """A collective, of a policy that ranks hold in shards: where `keep`, a model like it without storage, and its
    weights as `checkpoint_weights`, a layer at a time, gathered as one asks for the next. Elsewhere nothing, when the
    last was gathered."""
    gather = gathers(base_model(policy), keep)
    if keep:
        assert gather is not None, "rank 0 keeps"
        like = without_storage(policy)
        take_buffers(policy, like)
        return like, checkpoint_parts(policy, gather, like)
    if gather is not None:
        for names in weight_parts(policy):
            gather(names)
    return None, iter(())


class StepMetrics(Callback):
    """Calls `on_step_metrics(trainer, step)`; read the values from `trainer.callback_metrics` there."""

    _seen_step = 0

    def on_step_metrics(self, trainer: Trainer, step: int) -> None:
        """Override: `step` is the number of optimizer steps done, from 1. Called on every rank."""
        raise NotImplementedError

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        if trainer.global_step > self._seen_step:
            self._seen_step = trainer.global_step
            self.on_step_metrics(trainer, trainer.global_step)
