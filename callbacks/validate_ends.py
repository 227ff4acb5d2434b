"""Validation before the first and after the last optimizer step, so that a run has a before and an after.

Promises: both go through Lightning's own validation loop (same data, hooks, metrics and loggers as every other
validation); a resumed run is not validated again at its start, nor a last step that was validated already.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer


class ValidateEnds(Callback):
    """Runs the validation loop at both ends of `fit`.

    Raises:
        ValueError: (when training starts) there is no validation data.
    """

    def __init__(self) -> None:
        self._validated_at = -1

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated_at = trainer.global_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0:
            self._validate(trainer)
            if self._validated_at != 0:
                raise ValueError(
                    "trainer.callbacks: ValidateEnds found no validation data; give the datamodule some"
                    " (data.init_args.val_prompts), leave trainer.limit_val_batches above 0, or remove ValidateEnds"
                )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validated_at != trainer.global_step:
            self._validate(trainer)

    def _validate(self, trainer: Trainer) -> None:
        # What Lightning's training loop does around a validation between two steps.
        connector = trainer._logger_connector
        first_iteration = connector._first_loop_iter
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
        connector._first_loop_iter = first_iteration
