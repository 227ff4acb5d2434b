"""What `RolloutDataModule` hands to Lightning besides training steps (`steps.py`): loaders of rolled-out batches.

Promises: global rank 0 alone collects, other ranks get handles without a batch, as many of them; every loader has a
length (Lightning reads one without length a batch ahead, which would deadlock at `max_staleness: 0`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from app.batch import EvalHandle, StepHandle
from datamodules.groups import Group, to_batch
from datamodules.pipeline.val_sets import ValSet

if TYPE_CHECKING:
    from datamodules.rollout import RolloutDataModule


class PredictLoader:
    """Handles on the stream's next batches, for a run that rolls out and does not train."""

    def __init__(self, data: RolloutDataModule) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.batches_per_epoch

    def __iter__(self) -> Iterator[StepHandle]:
        data = self._data
        for _ in range(data.batches_per_epoch):
            groups = data.collect() if data.its_trainer().is_global_zero else []
            yield StepHandle(to_batch(groups) if groups else None, 0, 1)
            if groups:
                data.let_go()


class EvalLoader:
    """Handles on rolled-out prompts of one validation set, `val_batch_size` prompts each."""

    def __init__(self, data: RolloutDataModule, prompts: ValSet) -> None:
        self._data = data
        self._set = prompts

    def __len__(self) -> int:
        return -(-self._set.size // self._data.val_batch_size)

    def __iter__(self) -> Iterator[EvalHandle]:
        one, step = self._set, self._data.val_batch_size
        for first in range(0, one.size, step):
            groups: list[Group] = []
            if self._data.its_trainer().is_global_zero:
                groups = self._data.evaluate(one, first, min(first + step, one.size))
            batch = to_batch(groups) if groups else None
            yield EvalHandle(batch, one.name, one.prefix, one.samples, one.ks, one.solved_at)
