"""Where a run writes. Promises the same directory on every rank."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer


def run_dir(trainer: Trainer) -> Path:
    """The run directory: `trainer.log_dir`, else (no logger) `trainer.default_root_dir`.

    A collective: call it on all ranks or on none (Lightning broadcasts rank 0's answer).
    """
    return Path(trainer.log_dir or trainer.default_root_dir)
