"""One live line about training: steps, reward, speed.

Promises: a single updating line on a terminal, one plain line every `seconds` elsewhere (CI, log files), one
line per validation and per batch of `predict`; nothing on other ranks than 0. The command line adds it to every run by
itself.
"""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from callbacks.base import StepMetrics

_SHORT = {"val/accuracy": "held-out", "tokens/s": "tok/s"}


class Progress(StepMetrics, ProgressBar):
    """Replaces Lightning's bar.

    Args:
        metrics: logged names to show, in this order; those that a run does not log are left out.
        seconds: least time between two lines where there is no terminal, in seconds.
    """

    def __init__(
        self,
        metrics: tuple[str, ...] = ("reward", "loss", "entropy", "val/accuracy", "tokens/s"),
        seconds: float = 10.0,
    ) -> None:
        super().__init__()
        self.metrics = metrics
        self.seconds = seconds
        self._enabled = True
        self._bar: Any = None
        self._last_line = 0.0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    @property
    def is_enabled(self) -> bool:
        """Asked by `LightningModule.print`, which Lightning's own base class does not answer."""
        return self._enabled

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        total = trainer.estimated_stepping_batches
        self._total = int(total) if math.isfinite(total) else None
        self._started, self._first_step = time.monotonic(), trainer.global_step
        self._last_line = self._started
        if self._shows(trainer) and _is_terminal():
            self._bar = tqdm(
                total=self._total,
                initial=trainer.global_step,
                desc="training",
                unit=" steps",
                dynamic_ncols=True,
                bar_format="{desc} {n_fmt}/{total_fmt} |{bar:24}| {elapsed}<{remaining}{postfix}"
                if self._total
                else "{desc} {n_fmt} steps, {elapsed}{postfix}",
            )

    def on_step_metrics(self, trainer: Trainer, step: int) -> None:
        if not self._shows(trainer):
            return
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(self._values(trainer), refresh=False)
            self._bar.update(step - self._bar.n)
        elif now - self._last_line >= self.seconds or step == self._total:
            self._last_line = now
            pace = (now - self._started) / max(1, step - self._first_step)
            of = f"/{self._total}" if self._total else ""
            self.print(f"step {step}{of}  {self._values(trainer)}  {pace:.2f} s/step")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit" or not self._shows(trainer):
            return
        values = [f"{key} {float(v):.3f}" for key, v in trainer.callback_metrics.items() if key.startswith("val/")]
        self.print(f"step {trainer.global_step}: " + (", ".join(sorted(values)) or "validated"))

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._shows(trainer) and isinstance(outputs, dict):
            values = "  ".join(f"{name} {_number(value)}" for name, value in outputs.items())
            self.print(f"batch {batch_idx + 1}/{trainer.num_predict_batches[dataloader_idx]}  {values}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints above the live line; `LightningModule.print` comes here."""
        tqdm.write(" ".join(str(arg) for arg in args), file=kwargs.get("file", sys.stderr))

    def _shows(self, trainer: Trainer) -> bool:
        return self._enabled and trainer.is_global_zero

    def _values(self, trainer: Trainer) -> str:
        logged = trainer.callback_metrics
        shown = [f"{_SHORT.get(key, key)} {_number(float(logged[key]))}" for key in self.metrics if key in logged]
        return "  ".join(shown)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _is_terminal() -> bool:
    """False for files and pipes, and for terminals that say they have no columns (tqdm shows nothing on those)."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        return False


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value < 10_000:
        return str(value)
    if abs(value) >= 1000:
        return f"{value / 1000:.1f}k"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
