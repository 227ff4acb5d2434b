"""Tells the rules what a run does, and the user what they find.

Promises: a sentence is said when it becomes true, and again only every `repeat` steps; `coach.jsonl` in the run
directory has a line whenever what holds changes, with the evidence. Only global rank 0 speaks. Nothing is changed:
options stay as they were configured.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from app import checks
from callbacks.base import StepMetrics, run_dir
from callbacks.coach.facts import Advice, Facts
from callbacks.coach.history import History
from callbacks.coach.rules import advise


class Coach(StepMetrics):
    """Says the most important advice when it changes, and writes all of it to `coach.jsonl`.

    Args:
        window: optimizer steps that are looked at together, at least 4, and at least those of four rollout batches.
        repeat: steps after which a sentence that still holds is said again.
    """

    def __init__(self, window: int = 8, repeat: int = 100) -> None:
        checks.at_least(4, {"Coach.window": window})
        checks.at_least(1, {"Coach.repeat": repeat})
        self.window, self.repeat = window, repeat
        self._path: Path | None = None
        self._history = History(window)
        self._facts = Facts()
        self._holding: set[str] = set()
        self._said = ("", 0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._path = run_dir(trainer) / "coach.jsonl"
        self._facts = Facts.of(trainer, pl_module)
        self._history = History(self.window, self._facts.passes)
        self._holding, self._said = set(), ("", 0)

    def on_step_metrics(self, trainer: Trainer, step: int) -> None:
        if not trainer.is_global_zero:
            return
        self._history.add({name: float(value) for name, value in trainer.callback_metrics.items()})
        advice = advise(self._history, self._facts)
        holding = {one.rule for one in advice}
        if holding != self._holding:
            self._write(step, advice, sorted(self._holding - holding))
            self._holding = holding
        rule, at = self._said
        if advice and (advice[0].rule != rule or step - at >= self.repeat):
            self._said = (advice[0].rule, step)
            trainer.lightning_module.print(f"step {step}: {advice[0]}")

    def _write(self, step: int, advice: list[Advice], over: list[str]) -> None:
        assert self._path is not None
        line = {"step": step, "advice": [asdict(one) for one in advice], "over": over}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
