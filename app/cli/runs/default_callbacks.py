"""The callbacks that a run gets without being asked: those that every configuration would have to repeat.

    WeightSync              where the datamodule rolls out: it starts the engine and keeps it in step
    Opening                 `fit`: what is trained and how, in a few lines at the start; before a first validation
    Throughput, Summary     `fit`: where the time went; summary.json
    Coach                   `fit`: what holds the run back, in one sentence; coach.jsonl
    Report                  `fit`: report.html, and report.jsonl that it is made from; `validate`: the latter
    RewardLogger            where the datamodule rolls out: samples.jsonl
    ValidateEnds            `fit` with held-out prompts: validation before the first and after the last step
    Progress, HangDump      the progress bar; an answer to `arborist doctor`
    Interruption, SaveLast  `fit`: an end by signals that loses nothing; a checkpoint by time
    KeepOptions, KeepBest   `fit`: options of callbacks, and what checkpoints are the best, in a run that goes on

Promises: one that `trainer.callbacks` names is the only one of its kind and has the options it has there;
`without_callbacks: [Summary, ...]` leaves out those of `OPTIONAL` (the progress bar and the checkpoint have switches of
Lightning's: `trainer.enable_progress_bar`, `trainer.enable_checkpointing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning, ProgressBar

from app.cli.runs.continued import KeepBest, KeepOptions
from callbacks import (
    Coach,
    HangDump,
    Interruption,
    Opening,
    Progress,
    Report,
    RewardLogger,
    SaveLast,
    Summary,
    Throughput,
    ValidateEnds,
    WeightSync,
)
from callbacks.save_last import saves_last
from datamodules.inference.protocol import RolloutData
from modules import TreeModule

OPTIONAL: dict[str, type[Callback]] = {
    kind.__name__: kind
    for kind in (WeightSync, Opening, Throughput, RewardLogger, ValidateEnds, Summary, Coach, Report, HangDump)
}

_UNFIT: dict[type[Callback], str] = {  # of Lightning's
    BatchSizeFinder: "looks for what fits in memory, where batches of any size do: set data.batch_size, and the budgets of"
    " model.live_tokens where memory is short",
    ModelPruning: "puts others in the place of the model's parameters, which neither the engine nor the optimizer follows",
}


def check_without(names: Iterable[str]) -> None:
    """Raises ValueError for a name in `without_callbacks` that is none of `OPTIONAL`."""
    for name in names:
        if name not in OPTIONAL:
            raise ValueError(
                f"without_callbacks: {name!r} is none of {', '.join(OPTIONAL)}; the progress bar and checkpoints have"
                " trainer.enable_progress_bar and trainer.enable_checkpointing"
            )


def with_defaults(
    given: list[Callback],
    without: Iterable[str],
    subcommand: str,
    trainer: Mapping[str, Any],
    model: Any,
    data: Any,
) -> list[Callback]:
    """The run's callbacks: `given`, those of `trainer.callbacks`, and the defaults.

    Args:
        without: names of defaults to leave out.
        trainer: the Trainer's options.

    Raises:
        ValueError: one to leave out is in `given`; one of `given` cannot work here.
    """
    fits, trains, rolls_out = subcommand == "fit", isinstance(model, TreeModule), isinstance(data, RolloutData)
    unfit = next((kind for kind in _UNFIT if fits and trains and _has(given, kind)), None)
    if unfit is not None:
        raise ValueError(f"trainer.callbacks: {unfit.__name__} {_UNFIT[unfit]}; remove it")
    wanted: dict[type[Callback], bool] = {
        WeightSync: rolls_out,
        Opening: fits and trains,
        Throughput: fits and trains,
        RewardLogger: rolls_out and trains,
        ValidateEnds: fits and trains and _can_validate_ends(trainer, model, data),
        Summary: fits and trains,
        Coach: fits and trains,
        Report: trains and (fits or (rolls_out and subcommand == "validate")),
        HangDump: True,
    }
    for name in without:
        if _has(given, OPTIONAL[name]):
            raise ValueError(f"without_callbacks: {name} has no effect, trainer.callbacks names it: remove it there")
        wanted[OPTIONAL[name]] = False
    made = [kind() for kind, is_wanted in wanted.items() if is_wanted and not _has(given, kind)]
    # First what others measure: Throughput reports the time of WeightSync.
    callbacks = [one for one in made if isinstance(one, WeightSync)]
    callbacks += [*given, *(one for one in made if not isinstance(one, WeightSync))]
    if trainer.get("enable_progress_bar") is not False and not _has(given, ProgressBar):
        callbacks.append(Progress())
    if fits:
        callbacks += [Interruption(), KeepOptions()]
        if trainer.get("enable_checkpointing") is not False:
            callbacks += [KeepBest()] if any(map(saves_last, given)) else [KeepBest(), SaveLast()]
    return callbacks


def _can_validate_ends(trainer: Mapping[str, Any], model: TreeModule, data: Any) -> bool:
    """Whether there is something to validate on, and training ends where an engine serves its weights."""
    held_out = isinstance(data, RolloutData) and data.val_sets and trainer.get("limit_val_batches") != 0
    max_steps = trainer.get("max_steps") or -1
    return bool(held_out) and (max_steps < 0 or max_steps % model.steps_per_batch == 0)


def _has(callbacks: Iterable[Callback], kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)
