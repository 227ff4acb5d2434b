"""What a run is told that goes on with a checkpoint, and what is refused there: another kind of training, a schedule
that ends before the run does.

Promises: every error is a ValueError that names the key and the remedy; what was changed since the checkpoint and
applies is told, and so is what has no effect.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiplicativeLR, OneCycleLR

_ANOTHER = "begin a new run from the checkpoint's model (arborist export) for another"


def check_states(checkpoint: Mapping[str, Any], given: Mapping[str, Any], kind: type) -> None:
    """Whether a run can go on with a checkpoint's steps, optimizer and schedule. `lr_scheduler`, as YAML, of the run
    that made it and of this one: its state, which is loaded, holds the old options, and those that are others now are
    told. `kind`: this run's module.

    Raises:
        ValueError: there is no optimizer's state; it is that of another kind of training; the schedule is of another
            class, which the state says nothing to.
    """
    _check_kind(checkpoint.get("hyper_parameters", {}), kind)
    if "optimizer_states" not in checkpoint:
        raise ValueError(
            "ckpt_path: the checkpoint holds weights alone (save_weights_only), and no optimizer to go on with: name"
            " another, or begin a run with what `arborist export` makes of it as model.path"
        )
    then, now = checkpoint.get("hyper_parameters", {}).get("lr_scheduler"), given.get("lr_scheduler")
    if not isinstance(then, Mapping) or not isinstance(now, Mapping):
        return
    old, new = then.get("class_path"), now.get("class_path")
    if old != new:
        raise ValueError(
            f"model.lr_scheduler: {new} cannot go on with the state of {old}, which the checkpoint has: name that one,"
            f" set model.lr_scheduler to null for the optimizer's own rate, or {_ANOTHER} schedule"
        )
    before, after = then.get("init_args") or {}, now.get("init_args") or {}
    differ = (key for key in before | after if before.get(key) != after.get(key))
    changed = [f"{key} was {before.get(key)} and is {after.get(key)}" for key in differ]
    if changed:
        module, _, name = str(new).rpartition(".")
        schedule = getattr(sys.modules.get(module), name, None)
        # Plain functions are no part of a schedule's state; what else one's own code makes of an option, nobody knows.
        by_functions = not isinstance(schedule, type) or issubclass(schedule, LambdaLR | MultiplicativeLR)
        applied = ", which applies as far as it is no part of the schedule's state: that goes on as in the checkpoint"
        ignored = ", which has no effect: the schedule goes on as in the checkpoint"
        rank_zero_warn(
            f"model.lr_scheduler: {', '.join(changed)}{applied if by_functions else ignored}; {_ANOTHER} schedule"
        )


def check_schedules(trainer: Any) -> None:
    """Once a checkpoint is loaded: a schedule that is defined for so many steps (OneCycleLR) covers the run, and one
    that is new has its start, which is lost where torch alone loads what a run without a schedule saved.

    Raises:
        ValueError: it would end before the run, or has lost its start.
    """
    batches = trainer.max_epochs * trainer.num_training_batches if (trainer.max_epochs or -1) > 0 else math.inf
    steps = trainer.max_steps if trainer.max_steps > 0 else batches
    for schedule in (one.scheduler for one in trainer.lr_scheduler_configs):
        groups = schedule.optimizer.param_groups if isinstance(schedule, LRScheduler) else []
        if any("initial_lr" not in group for group in groups):
            raise ValueError(
                "model.lr_scheduler: the checkpoint has none, and under trainer.strategy"
                f" {type(trainer.strategy).__name__} one cannot begin on the way: set trainer.strategy to"
                f" app.strategies.DTAStrategy, leave the schedule out, or {_ANOTHER} schedule"
            )
        if not isinstance(schedule, OneCycleLR):
            continue
        total, left = schedule.total_steps, schedule.total_steps - schedule.last_epoch
        if steps - trainer.global_step > left:
            raise ValueError(
                f"model.lr_scheduler.init_args.total_steps: {total}, and the run is of {steps} steps, of which it has"
                f" done {trainer.global_step}: a schedule goes on as in its checkpoint and has no more than its own;"
                f" set trainer.max_steps to {trainer.global_step + left} at most, or begin a new run from the"
                " checkpoint's model (arborist export) with a longer one"
            )


def _check_kind(saved: Mapping[str, Any], kind: type) -> None:
    """Of the module that wrote the checkpoint the command line keeps the class path, and what it names counts where it
    is loaded: a checkpoint imports nothing. A class derived from the other goes on with its training."""
    path = str(saved.get("_class_path") or "")
    module, _, name = path.rpartition(".")
    before = getattr(sys.modules.get(module), name, None)
    if not isinstance(before, type) or issubclass(kind, before) or issubclass(before, kind):
        return
    raise ValueError(
        f"ckpt_path: the checkpoint is of {path}, and this run trains {kind.__name__}, which would go on with its step,"
        " optimizer and schedule: leave ckpt_path out and begin from its weights (model.path: the directory that"
        f" SavePretrained or `arborist export` makes of them), or set model to {path}"
    )


# Options of which a step's numbers are the same, up to rounding; and those that are told as their states are loaded.
_OF_NO_CONSEQUENCE = {"path", "reference_offload", "tree_training_mode", "chunk_tokens", "live_tokens", "attention"}
_OF_NO_CONSEQUENCE |= {"states", "elementwise", "self_check", "optimizer", "lr_scheduler"}
_OF_TRAINER = ("precision", "gradient_clip_val", "gradient_clip_algorithm")


def tell_changes(saved: Mapping[str, Any], model: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """What this run computes otherwise than the one that the checkpoint `saved` was made by: options of the model, and
    of the trainer, which the command line has data remember. (The data's own are told with its stream.)

    Args:
        model, data: hyper-parameters of this run's.
    """
    before, after = dict(saved.get("hyper_parameters", {})), dict(model)
    first, second = before.pop("reference", None), after.pop("reference", None)
    one, other = _place(first), _place(second)
    if one and other and one != other:
        rank_zero_warn(
            f"ckpt_path: model.reference was {one} and is {other}, which has no effect: the reference's weights are in"
            f" the checkpoint; {_ANOTHER}"
        )
    trainers = [remembered.get("trainer") or {} for remembered in (saved.get("datamodule_hyper_parameters", {}), data)]
    then, now = ({name: one[name] for name in _OF_TRAINER if name in one} for one in trainers)
    told = [*_changes("model", before, after), *_changes("trainer", then, now)]
    if isinstance(first, Mapping) == isinstance(second, Mapping) and bool(one) == bool(other):
        told += _changes("model.reference", first, second)
    elif not (one and other):  # of two kinds, whose options have nothing to do with each other
        told += _changes("model.reference", str(first), str(second))
    if told:
        rank_zero_warn(f"ckpt_path: the run goes on with other settings: {'; '.join(told)}")


def _changes(key: str, then: Any, now: Any, free: bool = False) -> Iterator[str]:
    """`free`: a dictionary of what the user wrote, in which an option that is left out has its default. Of arguments
    the program knows each, and one that only this or that version has was changed by nobody."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for name in {**then, **now}:
            shared = name in then and name in now and name not in _OF_NO_CONSEQUENCE and not str(name).startswith("_")
            if free or shared:
                inside = free or name in ("adapter", "config") or str(name).endswith("options")
                yield from _changes(f"{key}.{name}", then.get(name, "not set"), now.get(name, "not set"), inside)
    elif _in_words(then) != _in_words(now):
        yield f"{key} was {then} and is {now}"


def _in_words(value: Any) -> str:
    """Equal for a list and a tuple, and for objects, which modules made in Python may hold."""
    return json.dumps(value, default=lambda _: "an object")


def _place(reference: Any) -> str:
    """Where the weights of a reference came from that a checkpoint has a copy of; "" for a teacher on a server, a
    policy without its adapters, or none."""
    given = (reference.get("init_args") or reference) if isinstance(reference, Mapping) else {}
    return "initial" if reference == "initial" else str(given.get("path") or given.get("config") or "")
