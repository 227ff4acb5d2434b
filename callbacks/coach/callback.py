"""Tells the rules what a run does, and the user what they find.

Promises: a sentence is said when it becomes true, and again only every `repeat` steps; what was found holds until it
was not found for a window, so that two sentences do not take turns where numbers are noisy; what a single step shows is
said once a launch. `coach.jsonl` in the run directory has a line for that, and whenever what holds changes, with the
evidence that was found last. Only global rank 0 speaks. Nothing is changed: options stay as they were configured.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import fsum
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from app import checks
from callbacks.base import StepMetrics, append_lines, run_dir
from callbacks.coach.facts import Advice, Facts, best_checkpoint
from callbacks.coach.history import History
from callbacks.coach.rules import advise, at_once, in_order
from modules.episodes import call_rewards, earned, episode_prompts


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
        self._holding: dict[str, tuple[int, Advice]] = {}  # rule -> when it was found last, and what
        self._said = ("", 0)
        self._is_told = False  # what a single step shows
        self._validation: dict[tuple[str, str], list[float]] = {}  # the one under way

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not when training starts: ValidateEnds may have validated by then.
        self._path = run_dir(trainer) / "coach.jsonl"
        self._facts = Facts.of(trainer, pl_module)
        self._history = History(self.window, self._facts.passes)
        self._holding, self._said, self._is_told = {}, ("", 0), False

    def on_step_metrics(self, trainer: Trainer, step: int) -> None:
        if not trainer.is_global_zero:
            return
        self._history.add({name: float(value) for name, value in trainer.callback_metrics.items()})
        self._judge(trainer, step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation = {}

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.is_global_zero or batch.batch is None:
            return
        rewards, _, of_sequence = earned(batch.batch, call_rewards(batch.batch))
        for prompt, reward in zip(episode_prompts(batch.batch, of_sequence), rewards.tolist(), strict=True):
            self._validation.setdefault((batch.name, prompt), []).append(reward)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        played, self._validation = self._validation, {}
        if not played or trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        means = {prompt: fsum(rewards) / len(rewards) for prompt, rewards in played.items()}
        self._history.held_out.add(trainer.global_step, means)
        self._facts = replace(self._facts, best_checkpoint=best_checkpoint(trainer))
        self._judge(trainer, trainer.global_step)  # the last one comes after the last step

    def _judge(self, trainer: Trainer, step: int) -> None:
        found = advise(self._history, self._facts)
        self._is_told |= any(one.rule == "no_signal" for one in found)  # which says more
        if not self._is_told and (shown := at_once(self._history, self._facts)) is not None:
            self._is_told = True
            self._write(step, [shown], [])
            trainer.lightning_module.print(f"step {step}: {shown}")
        before = set(self._holding)
        self._holding |= {one.rule: (step, one) for one in found}
        over = sorted(rule for rule, (last, _) in self._holding.items() if step - last >= self._history.window)
        for rule in over:
            del self._holding[rule]
        advice = in_order(one for _, one in self._holding.values())
        if before != self._holding.keys():
            self._write(step, advice, over)
        rule, at = self._said
        if advice and (advice[0].rule != rule or step - at >= self.repeat):
            self._said = (advice[0].rule, step)
            trainer.lightning_module.print(f"step {step}: {advice[0]}")

    def _write(self, step: int, advice: list[Advice], over: list[str]) -> None:
        assert self._path is not None
        line = {"step": step, "advice": [asdict(one) for one in advice], "over": over}
        append_lines(self._path, [json.dumps(line)])
