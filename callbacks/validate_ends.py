"""Validation before the first and after the last optimizer step, so that a run has a before and an after.

Promises: both go through Lightning's own validation loop (same data, hooks, metrics and loggers as every other
validation); a resumed run is not validated again at its start, nor a last step that was validated already. A run that
ends in the middle of a batch of several steps is not validated there: the engine does not serve those weights.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn


class ValidateEnds(Callback):
    """Runs the validation loop at both ends of `fit`.

    Raises:
        ValueError: (when training starts) there is no validation data; `max_steps` ends in the middle of a batch.
    """

    def __init__(self) -> None:
        self._validated_at = -1

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated_at = trainer.global_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = getattr(pl_module, "steps_per_batch", 1)
        if trainer.max_steps > 0 and trainer.max_steps % steps and not trainer.fast_dev_run:
            raise ValueError(
                f"trainer.max_steps: {trainer.max_steps} ends in the middle of a batch of {steps} steps"
                " (model.minibatches x model.epochs), where ValidateEnds cannot validate: set it to"
                f" {nearest_multiples(trainer.max_steps, steps)}, or remove ValidateEnds"
            )
        if trainer.global_step == 0:
            self._validate(trainer)
            if self._validated_at != 0:
                raise ValueError(
                    "trainer.callbacks: ValidateEnds found no validation data; give the datamodule some"
                    " (data.validation.prompts), leave trainer.limit_val_batches above 0, or remove ValidateEnds"
                )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if getattr(pl_module, "steps_done", 0):
            rank_zero_warn("ValidateEnds: the run ends in the middle of a batch, whose weights are not validated")
        elif self._validated_at != trainer.global_step:
            loop = trainer.fit_loop.epoch_loop
            loop._batches_that_stepped -= 1  # loggers number it by the step before it, as one between two steps
            try:
                self._validate(trainer)
            finally:  # a failed one may be saved and gone on with
                loop._batches_that_stepped += 1

    def _validate(self, trainer: Trainer) -> None:
        # What Lightning's training loop does around a validation between two steps.
        connector = trainer._logger_connector
        first_iteration = connector._first_loop_iter
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
        connector._first_loop_iter = first_iteration


def nearest_multiples(number: int, of: int) -> str:
    """Those above 0, in words."""
    lower = number // of * of
    return f"{lower} or {lower + of}" if lower else str(of)
