"""Pictures of a run, drawn when it ends (or is interrupted): reward, where the time went, the prefix tree of a batch.

Promises: `reward_curve.png`, `step_time.png` and `tree.png` in the run directory, drawn from `metrics.csv` and the last
batch's tree; a picture that has no data is named in a warning, except where the run was interrupted; behind SIGTERM
they are left to the end of the run that goes on, where much would have to be read (`callbacks.base.AT_ONCE_MIB`), which
a line says. `fast_dev_run`, for which Lightning logs nothing, draws nothing. Only global rank 0 draws.
"""

from __future__ import annotations

import csv
import re
from bisect import bisect_left
from collections import defaultdict
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_warn

from app.interruption import end_of
from app.text import reason
from callbacks import base, figures
from callbacks.base import run_dir

TIME_PARTS = {  # label -> metrics that add up to it, bottom of the stack first
    "waiting for rollouts": ("time/wait",),
    "prepare": ("time/prepare",),
    "tree pass": ("time/tree",),
    "optimizer": ("time/optimizer",),
    "weight sync": ("time/sync",),
}

Series = dict[str, tuple[list[float], list[float]]]
"""Metric -> (optimizer steps done, values)."""


class Pictures(Callback):
    """Draws the run's pictures at the end of `fit`.

    Args:
        reward: logged name of the training reward; None for `rollouts/reward` where it was logged, of all that was
            played, else `reward`, of what was trained on. accuracy: of the held-out one.

    Raises:
        ValueError: (at set-up) no CSVLogger among the trainer's loggers.
    """

    def __init__(self, reward: str | None = None, accuracy: str = "val/accuracy") -> None:
        self.reward = reward
        self.accuracy = accuracy
        self._directory: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._directory = None
        if trainer.fast_dev_run:  # which logs nothing
            return
        if not any(isinstance(logger, CSVLogger) for logger in trainer.loggers):
            raise ValueError(
                "trainer.callbacks: Pictures draws from metrics.csv; add lightning.pytorch.loggers.CSVLogger to"
                " trainer.logger, or remove Pictures"
            )
        self._directory = run_dir(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for file, needs in self._draw(trainer, pl_module).items():
            rank_zero_warn(f"Pictures: {file} not drawn: {needs}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, KeyboardInterrupt) and end_of(exception) is None:
            return
        files = [] if self._directory is None else self._directory.glob("metrics*.csv")
        mib = sum(file.stat().st_size for file in files) / 2**20
        if base.is_hurried(exception) and mib > base.AT_ONCE_MIB:
            pl_module.print(
                f"Pictures: not drawn, as SIGTERM leaves little time and {mib:,.0f} MiB would be read for them; they"
                " are drawn when the run goes on and ends"
            )
            return
        self._draw(trainer, pl_module)

    def _draw(self, trainer: Trainer, module: Any) -> dict[str, str]:
        """Draws what can be drawn; what cannot, and what it lacks, by file."""
        if not trainer.is_global_zero or self._directory is None:
            return {}
        logger = next(logger for logger in trainer.loggers if isinstance(logger, CSVLogger))
        logger.save()
        series = read_launches(Path(logger.log_dir))
        name = f"{self._directory.parent.name}, {self._directory.name}"
        drawn: dict[str, Any] = {}
        held_out = list(zip(*series.get(self.accuracy, ((), ())), strict=True))
        reward = self.reward or ("rollouts/reward" if "rollouts/reward" in series else "reward")
        if reward in series:
            steps, rewards = series[reward]
            drawn["reward_curve.png"] = figures.reward_curve(steps, rewards, held_out, f"Reward ({name})")
        if "time/step" in series:
            steps, whole = series["time/step"]
            parts = {label: total(series, keys, len(steps)) for label, keys in TIME_PARTS.items()}
            known = [sum(values) for values in zip(*parts.values(), strict=True)]
            parts["other"] = [max(0.0, all_ - some) for all_, some in zip(whole, known, strict=True)]
            drawn["step_time.png"] = figures.step_times(steps, parts, f"Time of a step ({name})")
        tree = getattr(module, "last_tree", None)
        if tree is not None and tree.num_sequences:
            drawn["tree.png"] = figures.prefix_tree(tree, f"Prefix tree of the last batch ({name})")
        self._directory.mkdir(parents=True, exist_ok=True)
        for file, picture in drawn.items():
            picture.savefig(self._directory / file)
        needs = {
            "reward_curve.png": f"no '{reward}' was logged",
            "step_time.png": "no 'time/step' was logged (add the Throughput callback)",
            "tree.png": "the model keeps no last_tree",
        }
        return {file: need for file, need in needs.items() if file not in drawn}


def read_launches(path: Path) -> Series:
    """`read_metrics` of all launches in a run directory, metrics_1.csv, metrics_2.csv, ..., metrics.csv; of steps that
    were made again the later ones."""
    parts = sorted(path.glob("metrics_*.csv"), key=lambda file: int(re.sub(r"\D", "", file.stem) or 0))
    merged: Series = {}
    for part in (*parts, path / "metrics.csv"):
        series = read_metrics(part)
        begin = min((steps[0] for steps, _ in series.values() if steps), default=None)
        if begin is None:  # a launch that has logged nothing has made no step again
            continue
        for steps, values in merged.values():
            keep = bisect_left(steps, begin)  # they rise
            del steps[keep:], values[keep:]
        for name, (steps, values) in series.items():
            into = merged.setdefault(name, ([], []))
            into[0].extend(steps)
            into[1].extend(values)
    return merged


def read_metrics(path: Path) -> Series:
    """Reads a CSVLogger's file: metric -> (optimizer steps done, values), in the order they were logged.

    Lightning numbers a training row by the steps before it and a validation row by that or one more, depending on
    the hook it ran in; here both become the number of optimizer steps done when the value was measured. A last row
    without its line feed is being written, or was cut: it is left out.

    Raises:
        ValueError: another row holds what is no number; the message names file and line.
    """
    series: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    done = 0
    if not path.exists():
        return {}
    written = path.read_bytes().rpartition(b"\n")[0].decode("utf-8", errors="replace")
    rows = csv.DictReader(written.split("\n") if written else [])
    for row in rows:
        try:
            values = {key: float(value) for key, value in row.items() if value and key not in ("step", "epoch")}
            step = int(row["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}, line {rows.line_num}: no row of metrics ({reason(error)}); correct or remove the line"
            ) from None
        done = max(done, step) if _is_validation(values) else step + 1
        for key, value in values.items():
            series[key][0].append(done)
            series[key][1].append(value)
    return dict(series)


def _is_validation(values: dict[str, float]) -> bool:
    return bool(values) and all(key.startswith(("val/", "val_", "test")) for key in values)


def total(series: dict[str, tuple[list[float], list[float]]], keys: tuple[str, ...], count: int) -> list[float]:
    """Sums the metrics `keys` entry by entry; ones that were not logged count 0."""
    columns = [series[key][1] if key in series else [0.0] * count for key in keys]
    return [sum(values) for values in zip(*columns, strict=True)]
