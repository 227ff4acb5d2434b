"""A LightningModule over `Toy` that overrides `backward` as the tree modules do, and runs of real Trainers with it."""

from __future__ import annotations

import warnings
from collections.abc import Container
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_swa_avg_fn

from app.strategies import DTAStrategy
from tests.app.strategies.toy_model import SAMPLES, Toy, adamw, sgd, values


class ToyModule(pl.LightningModule):
    """A step's data depends on `global_step`; the loss is computed in `backward`, on this rank's samples."""

    def __init__(
        self,
        optimizer: str = "adamw",
        poison: tuple[int, Container[int]] | None = None,
        spoil: tuple[int, float] | None = None,
        spare: tuple[int, ...] | None = None,
    ) -> None:
        """`poison`: rank and steps of gradients that are not finite; `spoil`: after how many steps, and with what, a
        parameter is overwritten; `spare`: shape of a buffer that nothing reads."""
        super().__init__()
        self.toy = Toy(seed=0)
        if spare is not None:
            self.register_buffer("spare", torch.zeros(spare))
        self.optimizer = {"adamw": adamw, "sgd": sgd}[optimizer]
        self.poison, self.spoil = poison, spoil
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
        if self.poison is not None and self.poison[0] == rank and self.step in self.poison[1]:
            assert self.toy.hidden.weight.grad is not None
            self.toy.hidden.weight.grad[0, 0] = float("inf")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.spoil is not None and self.spoil[0] == self.step + 1:
            self.toy.hidden.weight.data[0, 0] = self.spoil[1]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = torch.stack([self.toy.sample_loss(i, int(batch)).detach() for i in range(SAMPLES)]).mean()
        self.log("val/loss", loss, sync_dist=True, batch_size=1)


def listening() -> list[str]:
    """The addresses at which this process listens."""
    found = psutil.Process().net_connections(kind="inet")
    return [one.laddr.ip for one in found if one.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)]


class Watch(Callback):
    """What the strategy reports after each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *unused: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        report = {"global_step": trainer.global_step, "lr": rate, "listening": listening()}
        if isinstance(trainer.strategy, DTAStrategy):
            report["seconds"] = trainer.strategy.optimizer_seconds
            report["grad_norm"] = trainer.strategy.grad_norm
        self.seen.append(report)
        module.log("rising", float(trainer.global_step))
        module.log("falling", -report.get("grad_norm", 0.0))


def fit(
    directory: Path,
    devices: int,
    steps: int = 4,
    data_steps: int = 6,
    ckpt_path: Path | None = None,
    strategy: str = "dta",
    module: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    max_skipped_steps: int = 10,
    averages: bool = False,
    **trainer_arguments: Any,
) -> dict[str, Any]:
    """Fits `ToyModule` until `steps` optimizer steps; returns parameters, reports, checkpoints and rates by rank.
    `averages`: the parameters are the average over the steps when it ends, as Lightning's callback makes it."""
    watch = Watch()
    monitor = LearningRateMonitor(logging_interval="step")
    options = {"filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1, "save_last": True}
    saving = ModelCheckpoint(directory, **(options | (checkpoint or {})))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=DTAStrategy(max_skipped_steps=max_skipped_steps) if strategy == "dta" else strategy,
        max_steps=steps,
        # Given a function, torch below 2.13 takes averages in float32 of parameters in bfloat16 too.
        callbacks=[watch, monitor, saving, *([WeightAveraging(avg_fn=get_swa_avg_fn())] if averages else [])],
        logger=pl.loggers.CSVLogger(str(directory), name="", version="log"),
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_arguments,
    )
    model = ToyModule(**(module or {}))
    loader = torch.utils.data.DataLoader(range(data_steps), batch_size=None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(model, loader, ckpt_path=ckpt_path)
    return {
        "warned": [str(warning.message) for warning in warned],
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


def device_of_the_writer() -> str:
    """Of a run's checkpoints."""
    strategy = DTAStrategy()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, max_steps=0, **options)
    trainer.fit(ToyModule(), torch.utils.data.DataLoader(range(2), batch_size=None))
    assert strategy._writer is not None
    return str(strategy._writer._device)


def validate(ckpt_path: Path, devices: int) -> float:
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=DTAStrategy(), logger=False, enable_progress_bar=False
    )
    loader = torch.utils.data.DataLoader(range(2), batch_size=None)
    [metrics] = trainer.validate(ToyModule(), loader, ckpt_path=ckpt_path, verbose=False)
    return metrics["val/loss"]
