"""Where a step's time goes: waiting for rollouts, preparing, the tree pass, the optimizer, weight sync.

Promises: `time/wait`, `time/prepare`, `time/tree`, `time/optimizer`, `time/sync` and `time/step` in seconds, of
global rank 0, every optimizer step; validation is in none of them. `time/step` runs from the end of the step before, so
the parts add up to it but for what Lightning and other callbacks take. Where the datamodule counts its rollouts, the
counts at the batch's arrival are logged too, as `rollouts/accepted`, `rollouts/dropped_stale` and so on (at its end
the producer would race with the reading, and synchronous runs would not repeat), and what the groups were worth that
finished since the batch before, filtered ones included: `rollouts/reward`, `rollouts/solved` and so on (`Tally.take`;
with the first step of the batch). That is the learning curve: `reward` is the mean of what is trained on, which a
filter decides. Where the strategy measures what several ranks cost, that too (`DTAStrategy.step_metrics`).
"""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from app.strategies import DTAStrategy
from callbacks.weight_sync import WeightSync
from datamodules.inference.protocol import RolloutData
from modules.metrics import forget

PARTS = ("wait", "prepare", "tree", "optimizer", "sync")


class Throughput(Callback):
    """Logs the split. `wait` is the time from this callback's end of a step to the arrival of the next batch; a
    checkpoint written in between is in it.

    Raises:
        ValueError: (at set-up) WeightSync comes after it in trainer.callbacks: its time would be missed.
    """

    def __init__(self) -> None:
        self._step_end = self._validation_start = self._optimizer_start = 0.0
        self._wait = 0.0
        self._rollouts: dict[str, float] = {}
        self._logged: set[str] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Any] = trainer.callbacks
        if any(isinstance(later, WeightSync) for later in callbacks[callbacks.index(self) :]):
            raise ValueError("trainer.callbacks: list Throughput after WeightSync, whose time it reports")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_end = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._wait = time.perf_counter() - self._step_end
        data: object = trainer.datamodule
        if trainer.is_global_zero and isinstance(data, RolloutData):
            self._rollouts = {f"rollouts/{name}": float(count) for name, count in data.counters().items()}
            if batch.index == 0:
                self._rollouts |= {f"rollouts/{name}": value for name, value in data.tally().items()}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._optimizer_start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        module: Any = pl_module
        strategy = trainer.strategy
        parts = module.step_seconds
        parts["wait"] = self._wait
        if isinstance(strategy, DTAStrategy):
            parts["optimizer"] = strategy.optimizer_seconds
        else:
            parts["optimizer"] = now - self._optimizer_start - parts.get("sync", 0.0)
        values = {f"time/{name}": parts.get(name, 0.0) for name in PARTS}
        values["time/step"] = now - self._step_end
        forget(trainer, "on_train_batch_end", self._logged - self._rollouts.keys())
        self._logged = set(self._rollouts)
        values.update(self._rollouts)
        if isinstance(strategy, DTAStrategy):
            values.update(strategy.step_metrics())
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=True)
        self._step_end = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_end += time.perf_counter() - self._validation_start
