"""Signals at chosen moments of a run, and a stream that nothing comes from."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from app import interruption
from app.batch import EvalHandle, StepHandle
from modules.models import ModelSource, build_model
from tests.helpers.tiny_model import TINY_MODEL
from tests.helpers.tiny_run import TinyData, TinyModule, make_batch

_PATIENCE = 60.0


class Sends(Callback):
    """Sends this process `signum` in `hook`, when `step` optimizer steps are done."""

    def __init__(self, signum: int, hook: str, step: int = 0, times: int = 1) -> None:
        def send(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step == step and trainer.state.fn == "fit":
                for number in range(times):
                    if number:
                        time.sleep(interruption._ONE + 0.2)
                    os.kill(os.getpid(), signum)
                    until(lambda: interruption.received() is not None)

        setattr(self, hook, send)


class Diverges(Callback):
    """Spoils the gradient of a step, when `step` optimizer steps are done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == self.step:
            for param in pl_module.parameters():
                if param.grad is not None:
                    param.grad.fill_(torch.nan)


class Waits(TinyData):
    """Batches for `after` steps, then a wait that only a signal ends, which it sends itself."""

    def __init__(self, signum: int = signal.SIGTERM, after: int = 2) -> None:
        super().__init__(batches=5)
        self.signum = int(signum)
        self.after = after

    def steps(self) -> Iterator[StepHandle]:
        trainer = self.trainer
        assert trainer is not None
        for _ in range(self.batches):
            if trainer.global_step == self.after:
                os.kill(os.getpid(), self.signum)
                until(lambda: interruption.pending() is not None)
                yield StepHandle(None, 0, 1)
            else:
                yield StepHandle(make_batch([0.0, 1.0]), 0, 1)


class Interruptible(TinyModule):
    """Takes `handle.batch` for granted: a step without one would fail."""

    def training_step(self, handle: StepHandle, batch_idx: int) -> Any:
        assert handle.batch is not None
        return super().training_step(handle, batch_idx)


class Speaks(Interruptible):
    """Its policy is a language model, whose head falls by 1 a step."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = build_model(ModelSource(config=TINY_MODEL))

    def training_step(self, handle: StepHandle, batch_idx: int) -> Any:
        return self.policy.lm_head.weight.sum()

    def validation_step(self, handle: EvalHandle, batch_idx: int) -> None:
        self.log("val/accuracy", 1.0, batch_size=1)


def until(condition: Callable[[], bool]) -> None:
    """Returns when `condition` is true. Raises TimeoutError after a minute."""
    end = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the signal did not arrive")
        time.sleep(0.005)
