"""What ranks run in the tests of weights in 4 bit (importable, hence not in a test file)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from app.strategies import DTAStrategy
from app.tree import quantised_layers, scales
from callbacks import SavePretrained
from modules import ActorCriticModule, ModelSource, PolicyModule, Regulariser, SFTModule
from tests.helpers.tiny_policy import Batches, Metrics, make_batch, trainer
from tests.modules.ranks.training_jobs import adamw

MODULES = {"policy": PolicyModule, "critic": ActorCriticModule, "sft": SFTModule}
REFERENCE: dict[str, Any] = {"regularisers": [Regulariser("kl", 0.1)], "reference": "base"}


def origin(base: Path, **fields: Any) -> ModelSource:
    return ModelSource(path=str(base), **{"adapter": {"r": 2}, "quantization": "nf4", **fields})


def state(module: Any) -> dict[str, Tensor]:
    """Parameters and scales."""
    named = dict(module.named_parameters()) | {f"scale of {name}": one for name, one in scales(module)}
    return {name: one.detach().clone() for name, one in named.items()}


def fit(
    base: Path,
    devices: int = 1,
    batches: int = 5,
    kind: str = "policy",
    fields: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    directory: Path | None = None,
    start: Path | None = None,
    damaged: bool = False,
    optimizer: Any = adamw,
    **options: Any,
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Its state and the metrics of each step. `damaged`: ranks but 0 have read other weights, until they are given
    those of rank 0."""
    torch.manual_seed(0)
    precision = options.pop("precision", "32-true")

    class Made(MODULES[kind]):  # type: ignore[misc]
        def configure_model(self) -> None:
            super().configure_model()
            if damaged and self.trainer.global_rank:
                for layer in quantised_layers(self).values():
                    layer.weight.data.zero_()
                for _, scale in scales(self):
                    scale.zero_()

    module, metrics = Made(origin(base, **fields or {}), optimizer=optimizer, **options), Metrics()
    callbacks: list[Any] = [metrics]
    if directory is not None:
        every = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        callbacks += [every, *(SavePretrained(str(directory / name), name == "merged") for name in ("alone", "merged"))]
    run = trainer(
        *callbacks,
        devices=devices,
        strategy=DTAStrategy(calibrate=False, **strategy or {}),
        precision=precision,
        enable_checkpointing=directory is not None,
        max_epochs=-1,
        max_steps=batches,
    )
    run.fit(module, Batches([make_batch(k, version=k) for k in range(batches)]), ckpt_path=start)
    return state(module), metrics.steps
