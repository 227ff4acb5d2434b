"""Jobs for the rank pools: a `fit` of two ranks that one of them is asked to end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app import interruption
from app.batch import StepHandle
from app.cli import main
from tests.app.cli.signals import until
from tests.helpers.tiny_run import TinyData, make_batch

CONFIG = """
model: {class_path: tests.helpers.tiny_run.TinyModule}
data: {class_path: tests.app.strategies.ranks.interruption_jobs.OneIsAsked, init_args: {waits: WAITS}}
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  strategy: {class_path: app.strategies.DTAStrategy, init_args: {death_timeout: "0:00:30"}}
  callbacks: [{class_path: callbacks.WeightSync}]
"""


def asked(directory: Path, waits: bool) -> int:
    """The exit code of this rank."""
    os.chdir(directory)
    sys.argv = ["arborist"]
    Path("toy.yaml").write_text(CONFIG.replace("WAITS", str(waits).lower()))
    try:
        main(["fit", "--config", "toy.yaml", "--run_dir", "here"])
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code
    return 0


class OneIsAsked(TinyData):
    """Rank 1 gets SIGTERM after two steps: in its third, or, with `waits`, while rank 0 waits for rollouts and rank 1
    for rank 0."""

    def __init__(self, waits: bool) -> None:
        super().__init__(batches=50, validate=False)
        self.waits = waits

    def steps(self) -> Iterator[StepHandle]:
        trainer: Any = self.trainer
        for _ in range(self.batches):
            batch = make_batch([0.0, 1.0])
            if trainer.global_step == 2 and trainer.global_rank == 1:
                timer = threading.Timer(0.5 if self.waits else 0.0, os.kill, (os.getpid(), signal.SIGTERM))
                timer.start()
                if not self.waits:
                    until(lambda: interruption.pending() is not None)
            if trainer.global_step == 2 and trainer.global_rank == 0 and self.waits:
                until(lambda: interruption.pending() is not None)
                batch = None
            yield StepHandle(batch, 0, 1)
