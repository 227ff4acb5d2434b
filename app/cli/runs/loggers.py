"""Runs of loggers that go on where the run does.

Promises: a run that goes on in its directory goes on in W&B; one that goes on in MLflow by `run_id` is not refused for
parameters that changed, since the ones that it has are left as they are, and told.
"""

from __future__ import annotations

import os
import secrets
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

_LONGEST = 250  # characters of a parameter that Lightning hands to MLflow


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
