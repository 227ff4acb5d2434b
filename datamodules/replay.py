"""`ReplayDataModule`: trains from rollouts that `RolloutDataModule(record=...)` wrote, and rolls out nothing.

Promises: the policy of version v gets the batch that the recorded run trained version v on, bit for bit and in the same
order, so that the same model, options and seeds end with the same parameters; no engine, no reward and no tokenizer is
needed. For debugging what happens after the rollouts, and for comparing objectives on the same data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import lightning as L

from app.batch import StepHandle
from datamodules.files.data_files import resolve
from datamodules.files.recording import RecordingError, read_batch, versions
from datamodules.groups import to_batch

_log = logging.getLogger(__name__)


class ReplayDataModule(L.LightningDataModule):
    """Recorded rollouts as training batches; training ends with the last one.

    It has no state of its own: which step comes next follows from the policy's version and its steps done, so a run
    that goes on from a checkpoint (of a replay, or of the recorded run) goes on with the right one. Remove WeightSync
    from the callbacks: there is no engine to keep up to date.

    Args:
        path: the directory the batches were recorded in. Environment variables are expanded.
        replay_experts: whether tokens go to the experts on record (docs/algorithms.md), where there are any. False: to
            those of the router, as for another model than the one that sampled.

    Raises (in `setup` and while training):
        DataFileError: no such directory; RecordingError: no batches in it, a broken one, or none for a policy version.
    """

    def __init__(self, path: str, replay_experts: bool = True) -> None:
        super().__init__()
        self.path, self.replay_experts = path, replay_experts
        self._versions: list[int] = []

    def setup(self, stage: str | None = None) -> None:
        if stage not in (None, "fit"):
            verb = getattr(stage, "value", stage)  # Lightning passes an enumeration
            raise ValueError(f"data: recorded rollouts can only be trained on; there is nothing to {verb} with")
        self.directory = resolve(self.path, "data.path", "directory")
        self._versions = versions(self.directory)
        if not self._versions:
            raise RecordingError(
                f"path: {self.directory} holds no recorded batches (batch_*.safetensors); name the directory that"
                " RolloutDataModule's record wrote to"
            )

    def train_dataloader(self) -> _ReplayLoader:
        return _ReplayLoader(self)


class _ReplayLoader:
    """Handles on the recorded batches, from the policy's version, and the first step of it that is not done, on."""

    def __init__(self, data: ReplayDataModule) -> None:
        self._data = data

    def __len__(self) -> int:
        # All versions up to the last recorded one: a fit that goes on in the middle of an epoch counts from its start.
        return (self._data._versions[-1] + 1) * self._module().steps_per_batch

    def __iter__(self) -> Iterator[StepHandle]:
        trainer, module = self._trainer(), self._module()
        last, count = self._data._versions[-1], module.steps_per_batch
        if module.policy_version > last:
            raise RecordingError(
                f"path: {self._data.directory} ends with the batch of version {last}, and the policy is at"
                f" {module.policy_version} already; there is nothing left to train on"
            )
        for version in range(module.policy_version, last + 1):
            batch = to_batch(read_batch(self._data.directory, version)) if trainer.is_global_zero else None
            if batch is not None and not self._data.replay_experts:
                batch.routes = None
            for index in range(module.steps_done, count):
                if version == last and index == count - 1:
                    _log.info("the recording ends with this batch, of version %d", last)
                    trainer.should_stop = True  # after this step; not after max_epochs empty epochs
                yield StepHandle(batch, index, count)

    def _trainer(self) -> L.Trainer:
        trainer = self._data.trainer
        assert trainer is not None, "a loader is asked for by a trainer"
        return trainer

    def _module(self) -> Any:
        return self._trainer().lightning_module
