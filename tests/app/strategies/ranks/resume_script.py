"""Run by tests under torchrun: `resume_script.py DIRECTORY STEPS`. Trains until STEPS, from the last checkpoint if
there is one; writes every step's gradient norm, each rank's process id, and the parameters at the end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from app.strategies import DTAStrategy
from tests.app.strategies.toy_model import values
from tests.app.strategies.toy_module import ToyModule


class Record(Callback):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        (self.directory / f"rank{trainer.global_rank}.pid").write_text(str(os.getpid()))

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *unused: Any) -> None:
        strategy: Any = trainer.strategy
        if trainer.is_global_zero:
            with (self.directory / "norms.jsonl").open("a") as file:
                file.write(json.dumps([trainer.global_step, strategy.grad_norm]) + "\n")


def main(directory: Path, steps: int) -> None:
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=local,
        num_nodes=world // local,
        strategy=DTAStrategy(),
        max_steps=steps,
        callbacks=[
            Record(directory),
            ModelCheckpoint(directory / "checkpoints", every_n_train_steps=1, save_top_k=1, save_last=True),
        ],
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = ToyModule()
    loader = torch.utils.data.DataLoader(range(steps), batch_size=None)
    trainer.fit(module, loader, ckpt_path="last")
    if trainer.is_global_zero:
        torch.save(values(module.toy), directory / "parameters.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
