"""Training with parameters in shards, and its checkpoints (importable, hence not in a test file)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from app.strategies import DTAStrategy
from app.strategies.pieces import load_whole
from modules import PolicyModule
from tests.helpers.tiny_policy import Batches, Metrics, make_batch, parameters, source, trainer

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
Layout = tuple[int, int, bool]
"""Ranks, ranks of a group, whether parameters are sharded."""


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def fit(
    layout: Layout, steps: int, directory: Path | None = None, start: Path | None = None, precision: str = "32-true"
) -> dict[str, Any]:
    """`steps` optimizer steps of GRPO with clipping and a schedule, from the beginning or from the checkpoint `start`;
    the last one's is written to `directory`."""
    torch.manual_seed(0)
    ranks, size, sharded = layout
    module = PolicyModule(
        source(**HEADS),
        optimizer=adamw,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    )
    metrics = Metrics()
    saved = [ModelCheckpoint(directory, filename="{step}", every_n_train_steps=steps)] if directory is not None else []
    strategy = DTAStrategy(group_size=size, shard_parameters=sharded, calibrate=False)
    run = trainer(
        metrics,
        *saved,
        devices=ranks,
        strategy=strategy,
        max_epochs=-1,
        max_steps=steps,
        precision=precision,
        gradient_clip_val=0.5,
        enable_checkpointing=bool(saved),
    )
    run.fit(module, Batches([make_batch(k, version=k) for k in range(5)]), ckpt_path=start)
    return {
        "parameters": parameters(module),
        "grad_norm": [step["grad_norm"] for step in metrics.steps if "grad_norm" in step],
        "held": sum(local(p).numel() for p in module.parameters()),
        "state": sum(v.numel() for s in run.optimizers[0].state.values() for v in s.values() if v.dim()),
    }


def local(parameter: Any) -> Tensor:
    found: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return found


def contents(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    return load_whole(path, lambda name: True)


def again(layout: Layout, start: Path, directory: Path) -> None:
    """Loads a checkpoint and writes it as it is."""
    torch.manual_seed(0)
    ranks, size, sharded = layout
    module = PolicyModule(source(**HEADS), optimizer=adamw)
    strategy = DTAStrategy(group_size=size, shard_parameters=sharded, calibrate=False)

    class AtOnce(ModelCheckpoint):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(directory / "again.ckpt")
            trainer.should_stop = True

    run = trainer(
        AtOnce(directory, save_top_k=0), devices=ranks, strategy=strategy, max_steps=100, enable_checkpointing=True
    )
    run.fit(module, Batches([make_batch(k, version=k) for k in range(5)]), ckpt_path=start)
