"""`summary.json`: what a run achieved and what it cost, in one small file.

Promises: token counts are sums over all optimizer steps of this launch, over all ranks; accuracies are those of
a validation before the first step (ValidateEnds runs one) and of the last one. A launch that trained nothing, because
the run was finished, leaves the file as it is. Only global rank 0 writes.
"""

from __future__ import annotations

import json
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from callbacks.base import StepMetrics, run_dir

_COUNTERS = {"dense_tokens": "tokens/dense", "leaf_tokens": "tokens/leaf", "tree_tokens": "tokens/tree"}


class Summary(StepMetrics):
    """Writes `summary.json` into the run directory at the end of a `fit` that trained:

    `accuracy_before`, `accuracy_after` (null without such a validation), `steps` (optimizer steps of this launch),
    `seconds` (wall time of `fit`, validation included), `dense_tokens` (every sequence counted alone),
    `leaf_tokens` (sequences that are prefixes of others dropped), `tree_tokens` (each shared prefix once).

    Args:
        accuracy: logged name of the validation metric to report.
    """

    def __init__(self, accuracy: str = "val/accuracy") -> None:
        self.accuracy = accuracy
        self._before: float | None = None
        self._after: float | None = None
        self._tokens = dict.fromkeys(_COUNTERS, 0)
        self._first_step = 0
        self._trained = False
        self._began = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()
        self._before = self._after = None
        self._trained = False
        self._tokens = dict.fromkeys(_COUNTERS, 0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._first_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._trained = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(self.accuracy)
        if trainer.state.fn != "fit" or trainer.sanity_checking or value is None:
            return
        self._after = float(value)
        if not self._trained:
            self._before = self._after

    def on_step_metrics(self, trainer: Trainer, step: int) -> None:
        metrics = trainer.callback_metrics
        for name, key in _COUNTERS.items():
            if key in metrics:
                self._tokens[name] += round(float(metrics[key]))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = run_dir(trainer) / "summary.json"
        if not trainer.is_global_zero or not self._trained:
            return
        summary = {
            "accuracy_before": self._before,
            "accuracy_after": self._after,
            "steps": trainer.global_step - self._first_step,
            "seconds": round(time.monotonic() - self._began, 3),
            **self._tokens,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(summary, indent=2) + "\n")
