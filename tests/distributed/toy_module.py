"""A LightningModule over `Toy` that overrides `backward` as the tree modules do, and runs of real Trainers with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from torch import Tensor

from app.strategies import DTAStrategy
from tests.distributed.toy import SAMPLES, Toy, adamw, sgd, values


class ToyModule(pl.LightningModule):
    """A step's data depends on `global_step`; the loss is computed in `backward`, on this rank's samples."""

    def __init__(self, optimizer: str = "adamw", poison: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.toy = Toy(seed=0)
        self.optimizer = {"adamw": adamw, "sgd": sgd}[optimizer]
        self.poison = poison
        self.step = 0

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.toy)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.step = self.trainer.global_step  # a plain loader starts anew on resume
        return torch.zeros((), requires_grad=True)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        rank, size = self.trainer.global_rank, self.trainer.world_size
        with self.trainer.precision_plugin.forward_context():
            self.toy.backward(range(rank, SAMPLES, size), self.step)
        if self.poison == (rank, self.step):
            assert self.toy.hidden.weight.grad is not None
            self.toy.hidden.weight.grad[0, 0] = float("inf")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = torch.stack([self.toy.sample_loss(i, int(batch)).detach() for i in range(SAMPLES)]).mean()
        self.log("val/loss", loss, sync_dist=True, batch_size=1)


class Watch(Callback):
    """What the strategy reports after each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *unused: Any) -> None:
        report = {"global_step": trainer.global_step, "lr": trainer.optimizers[0].param_groups[0]["lr"]}
        if isinstance(trainer.strategy, DTAStrategy):
            report["seconds"] = trainer.strategy.optimizer_seconds
            report["grad_norm"] = trainer.strategy.grad_norm
        self.seen.append(report)
        module.log("rising", float(trainer.global_step))


def fit(
    directory: Path,
    devices: int,
    steps: int = 4,
    data_steps: int = 6,
    ckpt_path: Path | None = None,
    strategy: str = "dta",
    module: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    **trainer_arguments: Any,
) -> dict[str, Any]:
    """Fits `ToyModule` until `steps` optimizer steps; returns parameters, reports, checkpoints and rates by rank."""
    watch = Watch()
    monitor = LearningRateMonitor(logging_interval="step")
    options = {"filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1, "save_last": True}
    saving = ModelCheckpoint(directory, **(options | (checkpoint or {})))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=DTAStrategy() if strategy == "dta" else strategy,
        max_steps=steps,
        callbacks=[watch, monitor, saving],
        logger=pl.loggers.CSVLogger(str(directory), name="", version="log"),
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_arguments,
    )
    model = ToyModule(**(module or {}))
    loader = torch.utils.data.DataLoader(range(data_steps), batch_size=None)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return {
        "parameters": values(model.toy),
        "seen": watch.seen,
        "skipped": getattr(trainer.strategy, "skipped_steps", 0),
        "rates": {name: list(rates) for name, rates in monitor.lrs.items()},
        "wrapped": type(trainer.strategy.model).__name__,
        "after_fit": _save_after_fit(trainer, directory),
    }


def _save_after_fit(trainer: pl.Trainer, directory: Path) -> Path:
    trainer.save_checkpoint(directory / "after.ckpt")
    return directory / "after.ckpt"


def validate(ckpt_path: Path, devices: int) -> float:
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=DTAStrategy(), logger=False, enable_progress_bar=False
    )
    loader = torch.utils.data.DataLoader(range(2), batch_size=None)
    [metrics] = trainer.validate(ToyModule(), loader, ckpt_path=ckpt_path, verbose=False)
    return metrics["val/loss"]
