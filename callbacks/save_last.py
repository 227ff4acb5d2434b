"""`last.ckpt`, by time: what a run loses when it is killed is bounded without anybody asking for it.

The command line adds it to every `fit`, unless a configured callback `saves_last`, or `trainer.enable_checkpointing` is
false. That a disk has no room for the first one is told after the first step, not in ten minutes.
"""

from __future__ import annotations

import math
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor


class SaveLast(ModelCheckpoint):
    """Replaces `checkpoints/last.ckpt` every `minutes`, after an optimizer step, and at the end of training.

    Args:
        minutes: between two checkpoints, above 0. The first comes that long after training began.

    Raises:
        ValueError: `minutes` is not above 0, or not finite.
    """

    def __init__(self, minutes: float = 10.0) -> None:
        if not (minutes > 0 and math.isfinite(minutes)):
            raise ValueError(f"SaveLast.minutes: {minutes}, must be above 0 and finite")
        super().__init__(
            save_last=True,
            save_top_k=0,
            train_time_interval=timedelta(minutes=minutes),
            enable_version_counter=False,  # one name, whoever wrote it
        )
        self.minutes = minutes
        self._last_time = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._last_time = time.monotonic()
        self._last_step = trainer.global_step
        self._room_is_known = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and not self._room_is_known:
            self._room_is_known = True
            self._look_for_room(trainer, pl_module)
        # Rank 0's clock decides for all; Lightning's own way is an exchange of pickled objects every step.
        due = trainer.is_global_zero and time.monotonic() - self._last_time >= 60 * self.minutes
        if trainer.strategy.reduce_boolean_decision(due, all=False):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fit_loop.done:  # before whatever comes at the end: a last validation may be long
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    def _look_for_room(self, trainer: Trainer, module: LightningModule) -> None:
        assert self.dirpath is not None, "set-up chooses one"
        weights = sum(one.nbytes for one in module.parameters() if one.requires_grad)
        states = (value for one in trainer.optimizers for state in one.state.values() for value in state.values())
        shared = sum(value.nbytes for value in states if isinstance(value, Tensor))  # a share of all ranks'
        needs = weights + shared * trainer.world_size
        place = next(one for one in (Path(self.dirpath), *Path(self.dirpath).absolute().parents) if one.exists())
        free = shutil.disk_usage(place).free
        if free < needs:
            rank_zero_warn(
                f"{self.dirpath}: a checkpoint takes at least {needs / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free:"
                " free space there, or choose another run_dir; nothing of this run could be saved"
            )

    def _save(self, trainer: Trainer) -> None:
        if self._last_step != trainer.global_step and not self._should_skip_saving_checkpoint(trainer):
            self._last_step = trainer.global_step
            self._last_time = time.monotonic()
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))


def saves_last(callback: Callback) -> bool:
    """Whether `callback` saves what a run goes on from: a ModelCheckpoint with `save_last`, or a class of one's own."""
    if not isinstance(callback, ModelCheckpoint):
        return isinstance(callback, Checkpoint)
    return bool(callback.save_last)  # one by time alone leaves no last*.ckpt, which `--ckpt_path last` looks for
