"""Checkpoints as ranks read them together.

Promises: what one rank finds (damage, another model) ends the run on all of them, and so does another checkpoint than
rank 0's; a rank that is to get its weights from rank 0 reads none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.nn import Module

from app.strategies.checkpoint.checkpoints import CheckpointError, check, unreadable
from app.strategies.checkpoint.trainer_state import mismatch, put_together
from app.strategies.pieces import CheckpointMismatch
from app.strategies.ranks.collectives import Communicator

_OPTIONS = {"reference": "model.reference", "critic": "model.critic"}  # of children that are no part of model.model


def read(path: Path, ranks: Communicator, read_file: Callable[[], Any], weights: bool) -> dict[str, Any]:
    """Collective: a checkpoint directory, or what `read_file` makes of a file of another strategy. The ranks share the
    checking of a directory's bytes. `weights`: whether this rank wants those of the model.

    Raises:
        CheckpointError: it is damaged, or no checkpoint; ranks were given different ones.
    """
    same = f"they read one directory, and each chooses: name {path.parent}/NAME.ckpt in --ckpt_path"
    _equal(ranks, path.name, same)
    if path.is_dir():
        _together(path, ranks, lambda: check(path, ranks.rank, ranks.size))
        read_file = lambda: put_together(path, checked=True, weights=weights)  # noqa: E731
    contents: dict[str, Any] = _together(path, ranks, read_file)
    _equal(ranks, f"{path.name} of step {contents.get('global_step')}", same)
    return contents


def _equal(ranks: Communicator, checkpoint: str, remedy: str) -> None:
    try:
        ranks.require_equal(checkpoint, "ckpt_path: the checkpoints that are loaded", remedy)
    except RuntimeError as error:
        raise CheckpointError(str(error)) from error


def _together(path: Path, ranks: Communicator, read: Callable[[], Any]) -> Any:
    result, error = None, None
    try:
        result = read()
    except Exception as failure:  # whatever damaged archives and pickles raise
        error = failure if isinstance(failure, CheckpointError) else unreadable(path, failure)
    try:
        ranks.raise_together(error, f"ckpt_path: {path}")
    except CheckpointError:
        raise
    except RuntimeError as failure:
        raise CheckpointError(str(failure)) from failure
    return result


def load_weights(
    load: Callable[[], None] | None, checkpoint: Mapping[str, Any], module: Module, ranks: Communicator
) -> None:
    """Collective: `load`, which puts the weights of `checkpoint` into `module`; None on ranks that want none.

    Raises:
        CheckpointMismatch: they do not fit on some rank; names a parameter and what the models differ in.
    """
    error: Exception | None = None
    try:
        if load is not None:
            load()
    except RuntimeError as failure:
        name, found = mismatch(checkpoint, module, own=_OPTIONS) or ("", " ".join(str(failure).split())[:500])
        child = name.partition(".")[0]
        what, option = (child, _OPTIONS[child]) if child in _OPTIONS else ("model", "model.model")
        error = CheckpointMismatch(
            f"ckpt_path: the checkpoint is of another {what}: {found}. Resume with the {what} that wrote it ({option})"
        )
        error.__cause__ = failure
    ranks.raise_together(error, "loading the weights of ckpt_path")
