"""What `DTAStrategy` does not support, refused by name before anything is built, with what to do instead."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn import Module

_PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")


def check_arguments(
    timeout: timedelta,
    death_timeout: timedelta,
    bucket_cap_mb: int,
    max_tokens_per_rank: int | None,
    max_skipped_steps: int,
    group_size: int,
    shard_parameters: bool,
) -> None:
    """Raises MisconfigurationException for an argument out of range."""
    for name, value in (("timeout", timeout), ("death_timeout", death_timeout)):
        if not isinstance(value, timedelta) or value <= timedelta(0):
            raise MisconfigurationException(f"DTAStrategy({name}={value!r}): a positive, finite timedelta is needed")
    if max_tokens_per_rank is not None and max_tokens_per_rank < 1:
        raise MisconfigurationException(f"DTAStrategy(max_tokens_per_rank={max_tokens_per_rank}): at least 1 is needed")
    if bucket_cap_mb < 1:
        raise MisconfigurationException(f"DTAStrategy(bucket_cap_mb={bucket_cap_mb}): at least 1 MiB is needed")
    if max_skipped_steps < 1:
        raise MisconfigurationException(f"DTAStrategy(max_skipped_steps={max_skipped_steps}): at least 1 is needed")
    if group_size < 1:
        raise MisconfigurationException(f"DTAStrategy(group_size={group_size}): at least 1 rank is needed")
    if shard_parameters and group_size == 1:
        raise MisconfigurationException(
            "DTAStrategy(shard_parameters=True) has no effect in groups of one rank: set group_size to the ranks that"
            " are to hold a model together (the GPUs of a node), or leave shard_parameters out"
        )


def is_notebook(ranks: int) -> bool:
    """Whether somebody types at this Python. Raises MisconfigurationException for several ranks, which none starts."""
    if not hasattr(sys, "ps1"):
        return False
    if ranks > 1:
        raise MisconfigurationException(
            f"trainer.devices and num_nodes make {ranks} ranks, and a notebook has one process: set both to 1, or start"
            " them by '!python -m app fit ...' or a script"
        )
    return True


def check_group(group_size: int, ranks: int) -> None:
    """Raises MisconfigurationException when `ranks` are not a number of groups."""
    if ranks % group_size:
        raise MisconfigurationException(
            f"DTAStrategy(group_size={group_size}) does not divide the {ranks} ranks of this run: choose"
            " trainer.devices and trainer.num_nodes so that it does, or another group_size"
        )


def check_trainer(trainer: pl.Trainer, module: pl.LightningModule, precision: str) -> None:
    """Raises MisconfigurationException for a precision, or (when fitting) an option, that would train wrongly."""
    if precision not in _PRECISIONS:
        raise MisconfigurationException(
            f"trainer.precision={precision} is not supported by DTAStrategy (float16 would need loss scaling"
            f" inside the tree pass): use one of {', '.join(_PRECISIONS)}"
        )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(accumulation(trainer.accumulate_grad_batches))
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{type(module).__name__}.automatic_optimization=False is not supported by DTAStrategy, which reduces"
            " gradients once per automatic optimizer step: override LightningModule.backward instead"
        )


def check_sharded(module: Module, offload: bool) -> None:
    """Raises MisconfigurationException for what does not go with parameters in shards."""
    if offload:
        raise MisconfigurationException(
            "DTAStrategy(offload_optimizer=True) is not supported with shard_parameters=True, where a parameter is its"
            " own master: leave one of them out"
        )


def check_steps(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Before fitting goes on from `checkpoint`. Raises MisconfigurationException when it is beyond the last step."""
    done, last = checkpoint.get("global_step", 0), trainer.max_steps
    if trainer.state.fn != TrainerFn.FITTING or last == -1 or done < last:
        return
    told = (
        f"trainer.max_steps={last}: the checkpoint {trainer.ckpt_path} is of step {done}, so nothing is left to train"
    )
    if done > last:
        raise MisconfigurationException(f"{told}: steps count from the beginning of the first run, raise max_steps")
    rank_zero_warn(
        f"{told}; raise max_steps to go on, or take its model (arborist export --ckpt {trainer.ckpt_path} --out DIR),"
        f" or score it (arborist validate --config CONFIG --ckpt_path {trainer.ckpt_path})"
    )


def check_offload(device: torch.device) -> None:
    """Raises MisconfigurationException where offloading would change nothing."""
    if device.type == "cpu":
        raise MisconfigurationException(
            "DTAStrategy(offload_optimizer=True) has no effect on CPU devices, where everything is in CPU memory:"
            " leave it out"
        )


def accumulation(value: object) -> str:
    """The message about `trainer.accumulate_grad_batches`."""
    return (
        f"trainer.accumulate_grad_batches={value} is not supported by DTAStrategy: losses are already divided by"
        " the count of a whole optimizer step, so accumulating batches would change their weight. A tree of any"
        " size fits in memory by its token budgets: raise the data's batch_size instead"
    )
