"""The last checkpoint of a run: what `--ckpt_path last`, `arborist export` and `arborist compare` take.

Promises: it is the one after most optimizer steps, as the checkpoints themselves say, in a copy of the run too, whose
files have other times, and whatever Lightning called it: where a callback does not know `last.ckpt` as its own it writes
`last-v1.ckpt` beside it. Times decide between equals alone. One whose files are not all there, or cannot be read, is
passed over where there is another, which is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from app.strategies.checkpoint.checkpoints import CheckpointError, saved_step

LAST = "last"


def last_checkpoints(directories: Iterable[Path]) -> list[Path]:
    """What `last_checkpoint` chooses from, in these directories."""
    named = [path for directory in directories if directory.is_dir() for path in sorted(directory.glob("last*.ckpt"))]
    return [path for path in named if path.exists()]  # no link to what is gone


def last_checkpoint(directories: Iterable[Path], others: Iterable[Path] = ()) -> Path | None:
    """The last checkpoint in these directories, or of `others`; None where there is none. Where none of several can be
    read it is the one that was written last, for whoever loads it to say what is wrong with it."""
    found = [*last_checkpoints(directories), *(path for path in others if path.exists())]
    if len(found) < 2:  # what is wrong with it, its reader says
        return found[0] if found else None
    steps: dict[Path, int] = {}
    damaged: list[Exception] = []
    for path in found:
        try:
            steps[path] = saved_step(path)
        except (CheckpointError, OSError) as error:  # OSError: it may not be read, or its run replaces it just now
            damaged.append(error)
    newest = max(steps or found, key=_written)
    if not steps:
        return newest
    last = max(steps, key=lambda path: (steps[path], _written(path)))
    for damage in damaged:
        rank_zero_warn(f"{damage}. {last}, of step {steps[last]}, is taken as the run's last")
    if steps[newest] < steps[last]:  # as in a copy, but also where two runs write to one directory
        rank_zero_warn(
            f"{last}, of step {steps[last]}, is taken as the run's last; {newest}, of step {steps[newest]}, is newer by"
            " its time: name it where it is meant"
        )
    return last


def to_load(ckpt_path: str | None, trainer: Trainer, directories: Iterable[Path]) -> str | None:
    """`--ckpt_path`, with the checkpoint's path in the place of 'last', for which Lightning would go by times. Where
    there is none yet it stays, which starts from the beginning."""
    if ckpt_path != LAST:
        return ckpt_path
    others = [Path(one.ckpt_path) for one in trainer.callbacks if isinstance(one, OnExceptionCheckpoint)]
    last = last_checkpoint(directories, others)
    return ckpt_path if last is None else str(last)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
