"""Runs of loggers that go on where the run does.

Promises: a run that goes on in its directory goes on in W&B; one that goes on in MLflow by `run_id` is not refused for
parameters that changed, since the ones that it has are left as they are, and told; the metrics of earlier launches stay
in the run directory, and a launch that logs nothing, one that is refused say, leaves them as they are; `metrics.csv`
is whole whenever a run is killed, but for its last row.
"""

from __future__ import annotations

import csv
import itertools
import os
import secrets
import shutil
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_warn

from app.cli.runs.run_directory import naming

_LONGEST = 250  # characters of a parameter that Lightning hands to MLflow


class _Writer(ExperimentWriter):
    """Changes nothing before there are metrics. Lightning's deletes a `metrics.csv` when it is made, and writes options
    as it hears of them: both long before training begins."""

    _has_begun = False

    def _check_log_dir_exists(self) -> None:
        pass

    def log_hparams(self, params: dict[str, Any]) -> None:
        self.hparams.update(params)
        if self._has_begun:
            super().log_hparams({})

    def save(self) -> None:
        if self.metrics and not self._has_begun:
            self._has_begun = True
            keep_metrics(Path(self.log_dir))
            super().log_hparams({})
        super().save()

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        """Row by row into a file beside it, which then takes its place: Lightning's holds all of them in memory, and
        has emptied the file before it writes, so that a run that is killed then loses its metrics."""
        logged = Path(self.metrics_file_path).resolve()  # what a link stands for, as when it is opened
        aside = logged.with_name(f"{logged.name}.part")
        try:
            with logged.open(newline="") as rows, aside.open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=fieldnames)
                writer.writeheader()
                writer.writerows(csv.DictReader(rows))
            shutil.copymode(logged, aside)
            os.replace(aside, logged)
        finally:
            with suppress(OSError):  # what kept it from its place is told
                aside.unlink(missing_ok=True)


class Metrics(CSVLogger):
    """`metrics.csv` and `hparams.yaml`, from the first metrics on. A disk that refuses them is an error that names the
    file."""

    _experiment: Any  # Lightning's, made when it is asked for

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = _Writer(log_dir=self.log_dir)
        return self._experiment

    def save(self) -> None:
        with naming(Path(self.log_dir) / "metrics.csv"):
            super().save()


def keep_metrics(run_dir: Path) -> None:
    """Renames `metrics.csv` of a run that goes on: CSVLogger would delete what it logged before."""
    logged = run_dir / "metrics.csv"
    if logged.is_file():
        names = (run_dir / f"metrics_{number}.csv" for number in itertools.count(1))
        logged.rename(next(name for name in names if not name.exists()))


def go_on_in_wandb(logger: WandbLogger, run_dir: Path) -> None:
    """By the id of the run, which is kept in its directory."""
    kept = run_dir / "wandb_id"
    of_agent = os.environ.get("WANDB_RUN_ID")  # W&B's own variable: a sweep's agent has chosen
    known = kept.read_text("ascii").strip() if kept.exists() else ""
    chosen = of_agent or known or secrets.token_hex(4)
    run_dir.mkdir(parents=True, exist_ok=True)
    kept.write_text(f"{chosen}\n", "ascii")
    # What the constructor's `id` sets, which comes too early; W&B reads its environment once a process.
    logger._id = logger._wandb_init["id"] = chosen


def go_on_in_mlflow(logger: MLFlowLogger) -> None:
    """MLflow refuses another value of a parameter, and `run_id` is one: the run is told those alone that it lacks."""
    log = logger.log_hyperparams

    def log_new(params: dict[str, Any] | Namespace) -> None:
        known = logger.experiment.get_run(logger.run_id).data.params
        given = _flatten_dict(_convert_params(params))
        log({name: value for name, value in given.items() if name not in known})
        changed = [name for name, value in given.items() if known.get(name, str(value)) != str(value)[:_LONGEST]]
        if changed := [name for name in changed if not name.endswith("/run_id")]:
            rank_zero_warn(
                f"trainer.logger: MLflow changes no parameters of a run, so {logger.run_id} keeps its earlier"
                f" {', '.join(changed[:5])}{' and others' if len(changed) > 5 else ''}; config.yaml of the run"
                " directory has those of now"
            )

    logger.log_hyperparams = log_new
