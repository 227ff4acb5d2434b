"""Ctrl-C and SIGTERM during training: the step is finished, a checkpoint saved, and the run ends on all ranks. So it
does where rollouts fail for good, with their error.

Promises: ranks agree after every step and in every wait for rollouts, so that all of them stop at the same step,
whichever got the signal, or had the error; what is saved is the state at the end of the last finished step (a
validation that was due or running is not repeated); a run that has trained nothing yet saves nothing. An error is
raised as it is on rank 0, with a note of where the run is saved, or why it is not, and on the others as one with its
words. Errors inside a step are none of these: they end the run where they happen, and nothing is written. No collective
is entered from a signal handler. The command line adds it to every run by itself; elsewhere signals must be listened to
(`app.interruption`).

This is the only mechanism: Lightning's handler of SIGTERM, which broadcasts from inside the handler and ends the run
with code 0, is not installed, nor is its requeueing under SLURM, whose checkpoint a launch with a run directory of its
own would not look for. A requeued job goes on with `--run_dir X --ckpt_path last`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from app import interruption
from app.batch import StepHandle
from app.interruption import End, Interrupted, ends_run
from app.strategies import DTAStrategy, RankZeroError
from app.strategies.manifest import CheckpointError
from app.text import reason
from callbacks.base import run_dir

_SAY = "finishing this step, then saving a checkpoint; Ctrl-C again ends at once, without"
_SAY_BEFORE = "ending; until a step is done there is nothing new to save; Ctrl-C again ends at once"
_NO_CHECKPOINTS = "trainer.enable_checkpointing is false"
_LONGEST = 500  # characters of why a checkpoint could not be written
_SAY_UNSAVED = f"ending after this step; nothing is saved, because {_NO_CHECKPOINTS}"


class Interruption(Callback):
    """Saves `last.ckpt`, then raises `app.interruption.Interrupted` when this process, or another rank, is asked to
    end, or what `app.interruption.failure` is on rank 0."""

    def __init__(self) -> None:
        self._first_step = 0
        self._saved_step = -1
        self._ending = self._finished = False
        self._checkpoint: Path | None = None
        self._directory: Path | None = None
        self._unsaved = ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._ending, self._finished, self._saved_step, self._checkpoint = False, False, -1, None
        self._unsaved = ""
        directory = run_dir(trainer)
        given = next((one.dirpath for one in _checkpoints(trainer)), None)
        self._directory = Path(given) if given is not None else directory / "checkpoints"
        connector: Any = trainer._signal_connector
        connector.register_signal_handlers = interruption.take_over  # called once, when training is about to begin

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step
        if interruption.ignored():
            instead = f"`kill -TERM {os.getpid()}` ends this run"
            pl_module.print(f"SIGINT is ignored, as shells have it of jobs in the background: {instead}")
        self._allow_saving(trainer, _SAY_BEFORE)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._ending:
            self._end(trainer)
        if trainer.global_step == self._first_step:  # whose rollouts are there: it will be done
            self._allow_saving(trainer, _SAY)
        # Rank 0, which alone waits for rollouts, comes without a batch when the wait was cut short.
        without = trainer.is_global_zero and isinstance(batch, StepHandle) and batch.batch is None
        if self._agree(trainer, without and interruption.pending() is not None):
            _as_after_the_last_step(trainer)
            self._save(trainer)
            self._end(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._agree(trainer):
            self._save(trainer)
            self._ending = True  # at the next hook: this step's metrics are logged after this one

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._ending:
            self._end(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.state.fn == "fit" and self._agree(trainer):
            if self._saved_step != trainer.global_step and not self._finished:
                _as_before_validation(trainer)
            self._save(trainer)
            self._end(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._ending:
            self._end(trainer)
        self._finished = trainer.fit_loop.done

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        interruption.forbid_saving()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        interruption.forbid_saving()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved_step = trainer.global_step

    def _allow_saving(self, trainer: Trainer, say: str) -> None:
        say = say if _checkpoints(trainer) else _SAY_UNSAVED
        interruption.allow_saving(say if trainer.is_global_zero else "")

    def _agree(self, trainer: Trainer, asked: bool | None = None) -> bool:
        """Collective: whether any rank was asked to end (or passes True), or rank 0 has failed."""
        mine = interruption.pending() is not None if asked is None else asked
        if not trainer.strategy.reduce_boolean_decision(mine or interruption.failure() is not None, all=False):
            return False
        failure = interruption.failure()
        told = trainer.strategy.broadcast(None if failure is None else f"{type(failure).__name__}: {failure}")
        if told is None:
            interruption.request(signal.SIGTERM)  # where another rank has received it
        else:
            interruption.put_off(RankZeroError(f"rank 0 failed: {told}"))  # where there is none yet
        return True

    def _save(self, trainer: Trainer) -> None:
        failure = interruption.failure()
        if failure is None:
            return self._write(trainer)  # should it fail, that is what the run ends with
        together = True
        try:
            self._write(trainer)
            _finish(trainer)  # before anything is said of it
        except Exception as error:
            self._checkpoint, self._unsaved = None, reason(error, _LONGEST)
            together = trainer.world_size == 1 or isinstance(error, CheckpointError)
        if not together:  # others may have no error, and wait for this rank
            failure.add_note(f"and the run could not be saved: {self._unsaved}")
            raise failure

    def _write(self, trainer: Trainer) -> None:
        callbacks = _checkpoints(trainer)
        if not callbacks or trainer.fast_dev_run or trainer.global_step == self._first_step:
            return
        if self._saved_step == trainer.global_step and not _holds_back(trainer):
            # Of several callbacks only some saved at this step; going on looks for a "last" alone.
            now = [one for one in callbacks if one._last_global_step_saved == trainer.global_step]
            last = next((one.last_model_path for one in now if one.last_model_path), None)
            if last is not None:
                self._checkpoint = Path(last)
                return
        assert self._directory is not None
        name = callbacks[0].CHECKPOINT_NAME_LAST + callbacks[0].FILE_EXTENSION
        trainer.save_checkpoint(self._directory / name, weights_only=False)
        if not _holds_back(trainer):
            self._checkpoint = self._directory / name

    def _end(self, trainer: Trainer) -> None:
        steps, failure = trainer.global_step, interruption.failure()
        finished = 0 < trainer.max_steps <= steps
        if failure is None:
            end = End(steps, self._checkpoint, finished)
            raise Interrupted(interruption.pending() or signal.SIGTERM, end)
        unsaved = self._unsaved or ("" if _checkpoints(trainer) else _NO_CHECKPOINTS)
        try:
            _finish(trainer)
        except CheckpointError as error:  # that of a callback which came after this one
            unsaved = unsaved or reason(error, _LONGEST)
        end = End(steps, self._checkpoint, finished, unsaved)
        ends_run(failure, end)
        if steps > 0:  # else there was nothing to save
            failure.add_note(str(end))
        raise failure


def _finish(trainer: Trainer) -> None:
    """Returns when all checkpoints are on the disk. Raises CheckpointError where one could not be written."""
    if isinstance(trainer.strategy, DTAStrategy):
        trainer.strategy.finish_checkpoints()


def _holds_back(trainer: Trainer) -> bool:
    """Whether the strategy left out the last checkpoint, because training seems to have diverged."""
    return isinstance(trainer.strategy, DTAStrategy) and trainer.strategy.holds_back


def _checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    """Those that save, first the one that keeps the last."""
    found = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    return sorted(found, key=lambda one: not one.save_last)


def _as_after_the_last_step(trainer: Trainer) -> None:
    """The loop has counted a batch that will not be trained on. Going on starts from the counts at the end of the
    batch before it, which is where Lightning's own checkpoints are written."""
    loop: Any = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    for counts in (progress.total, progress.current):
        counts.ready -= 1
    progress.is_last_batch = False
    if progress.current.completed > 0:
        _as_before_validation(trainer)
        loop._batches_that_stepped -= 1


def _as_before_validation(trainer: Trainer) -> None:
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.total, progress.current):
        if progress.current.completed > 0:
            counts.completed -= 1
