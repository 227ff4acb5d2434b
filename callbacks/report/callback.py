"""Keeps what `report.html` shows beside the metrics, and writes the page when a run ends.

Promises: `report.jsonl` in the run directory, complete lines at any time: the prefix tree and some transcripts of the
first, second, fourth, eighth ... rollout batch and of the last, and every validation's rewards and generated tokens by
prompt, with how many episodes were asked for; of a run that goes on also from which step, since what an earlier launch
did behind it is no part of the run; `report.html` at the end of `fit`, or when it is interrupted (`arborist
look` makes it at any time), but for SIGTERM, behind which a scheduler kills: where more than `AT_ONCE_MIB` have to be
read for the page it is left to `arborist look`, which a line says. A page that cannot be made is a warning, never the
end of a run. Only global rank 0 writes; nothing is drawn before the end.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from app.batch import RolloutBatch
from app.interruption import end_of
from callbacks import base
from callbacks.base import append_lines, run_dir
from callbacks.report.moments import batch_moment, transcript
from callbacks.report.runs import is_run, report_bytes
from modules.episodes import call_rewards, earned, episode_prompts

FILE, PAGE = "report.jsonl", "report.html"
_FOLLOWED = 8  # held-out prompts whose replies are kept, the same ones in every validation


class Report(Callback):
    """Writes `report.jsonl` on the way and `report.html` at the end of `fit`."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._latest: tuple[int, int, RolloutBatch] | None = None
        self._written = 0  # number of the last batch that was written
        self._held_out: dict[str, dict[str, Any]] = {}
        self._began = 0.0  # the validation under way

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._directory = run_dir(trainer)
        self._latest, self._written, self._held_out = None, 0, {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        module: Any = pl_module
        batch = getattr(module, "batch", None)
        if not trainer.is_global_zero or batch is None or module.steps_done > 0:
            return
        number = int(module.policy_version) + 1
        if self._latest is None and trainer.global_step > 0:
            self._append({"kind": "goes_on", "step": trainer.global_step})
        self._latest = (number, trainer.global_step + 1, batch)
        if number & (number - 1) == 0:
            self._write_batch(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.is_global_zero:
            return
        found = self._held_out.setdefault(
            batch.name, {"solved_at": batch.solved_at, "asked": 0, "rewards": {}, "tokens": {}, "replies": {}}
        )
        found["asked"] += batch.prompts * batch.samples
        if batch.batch is None:  # all of them failed
            return
        rewards, _, of_sequence = earned(batch.batch, call_rewards(batch.batch))
        last = {episode: i for i, episode in enumerate(of_sequence.tolist())}
        tokenizer = getattr(trainer.datamodule, "tokenizer", None)
        of_token = of_sequence.repeat_interleave(batch.batch.lengths())
        generated = of_token[batch.batch.loss_mask].bincount(minlength=len(rewards)).tolist()
        prompts = episode_prompts(batch.batch, of_sequence)
        for episode, (prompt, reward) in enumerate(zip(prompts, rewards.tolist(), strict=True)):
            found["rewards"].setdefault(prompt, []).append(round(reward, 6))
            found["tokens"].setdefault(prompt, []).append(generated[episode])
            if prompt not in found["replies"] and len(found["replies"]) < _FOLLOWED:
                runs = transcript(batch.batch, last[episode], tokenizer)
                found["replies"][prompt] = {"reward": reward, "runs": runs}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        held_out = {name: one for name, one in self._held_out.items() if one["rewards"]}
        self._held_out = {}
        if held_out and not trainer.sanity_checking:
            seconds = round(time.perf_counter() - self._began, 3)
            self._append({"kind": "held_out", "step": trainer.global_step, "seconds": seconds, "sets": held_out})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        ended = isinstance(exception, KeyboardInterrupt) or end_of(exception) is not None
        if not ended or self._directory is None:
            return
        if self._latest is not None or is_run(self._directory):  # else it ended before there was anything to show
            self._finish(trainer, hurried=base.is_hurried(exception))

    def _finish(self, trainer: Trainer, hurried: bool = False) -> None:
        if not trainer.is_global_zero or self._directory is None or trainer.state.fn != "fit":
            return
        for logger in trainer.loggers:
            logger.save()  # metrics.csv may lag behind
        self._write_batch(trainer)
        self._latest = None
        mib = report_bytes(self._directory) / 2**20
        if hurried and mib > base.AT_ONCE_MIB:
            trainer.lightning_module.print(
                f"Report: {PAGE} is not written, as SIGTERM leaves little time and {mib:,.0f} MiB would be read for it;"
                f" 'arborist look {self._directory}' makes it"
            )
            return
        try:
            from callbacks.report.page import write_page
            from callbacks.report.runs import read_run

            write_page([read_run(self._directory)], self._directory / PAGE)
        except Exception as error:
            rank_zero_warn(
                f"Report: {self._directory / PAGE} not written ({type(error).__name__}: {error});"
                f" 'arborist look {self._directory}' tries again"
            )

    def _write_batch(self, trainer: Trainer) -> None:
        if self._latest is None or self._latest[0] == self._written:
            return
        number, step, batch = self._latest
        moment = batch_moment(batch, getattr(trainer.datamodule, "tokenizer", None))
        self._append({"kind": "batch", "step": step, "batch": number, **moment})
        self._written = number

    def _append(self, row: dict[str, Any]) -> None:
        assert self._directory is not None
        append_lines(self._directory / FILE, [json.dumps(row)])
