"""What callbacks share: where a run writes, lines of JSON there, and every optimizer step's metrics.

Promises: `run_dir` is the same directory on every rank; a file of `append_lines` has complete lines whenever it is
written to, also after a launch that was killed, or had no more room, in the middle of one; `on_step_metrics` runs once
a step, after the module logged that step. (A callback's own `on_train_batch_end` runs before the module's: what it can
read there is the step before.)
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from lightning.pytorch import Callback, LightningModule, Trainer

from app.interruption import Interrupted, received
from app.strategies.shards import gathers, is_sharded, take_buffers, without_storage
from app.tree import quantised_layers, whole_weights
from datamodules.inference.export import WeightParts, base_model, weight_parts

AT_ONCE_MIB = 16
"""What may be read in a hurry: some 30,000 rows of metrics, with which a page of them takes two or three seconds."""
_BLOCK = 1 << 16  # bytes that are read at a time


def run_dir(trainer: Trainer) -> Path:
    """The run directory: `trainer.log_dir`, else (no logger) `trainer.default_root_dir`.

    A collective: call it on all ranks or on none (Lightning broadcasts rank 0's answer).
    """
    return Path(trainer.log_dir or trainer.default_root_dir)


def is_hurried(exception: BaseException) -> bool:
    """Whether SIGTERM ends the run, behind which a scheduler kills within seconds."""
    asked = exception.signum if isinstance(exception, Interrupted) else received()
    return asked == signal.SIGTERM


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Adds `lines`, given without their line feeds, to `path`, which is made if need be; lone surrogates as escapes.
    Half a line at its end goes first: behind it the first of them could not be read either.

    Raises:
        OSError: of the disk; names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("a+b") as file:
            _end_a_line(file)
            file.write("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
    except OSError as error:
        error.filename = error.filename or str(path)  # that of a write has none
        raise


def last_line(path: Path) -> bytes:
    """The last whole line of `path`, without its line feed; empty where there is none."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        end = _begin_of_line(file, file.seek(0, 2))
        begin = _begin_of_line(file, max(0, end - 1))
        file.seek(begin)
        return file.read(max(0, end - 1 - begin))


def _end_a_line(file: BinaryIO) -> None:
    """Leaves `file` at the end of its last whole line, and ends it there."""
    size = file.seek(0, 2)
    end = _begin_of_line(file, size)
    if end < size:
        file.truncate(end)


def _begin_of_line(file: BinaryIO, end: int) -> int:
    """Behind the last line feed before `end`."""
    while end > 0:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        if (feed := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + feed + 1
        end = begin
    return 0


def comes_in_parts(policy: Any) -> bool:
    """Whether a policy is exported by `policy_in_parts`: its tensors are not those of a plain model."""
    return is_sharded(policy) or bool(quantised_layers(policy))


def policy_in_parts(policy: Any, keep: bool) -> tuple[Any, WeightParts | None]:
    """Where `keep`, a model like `policy` without storage, and its weights, a layer at a time, made as one asks for the
    next; all of them have to be asked for. Of a policy that ranks hold in shards a collective, that gathers them, and
    elsewhere nothing, when the last was gathered; of one in 4 bit what these stand for."""
    if not is_sharded(policy):
        gather = whole_weights(base_model(policy)) if keep else None
    else:
        gather = gathers(base_model(policy), keep)
    if keep:
        assert gather is not None, "rank 0 keeps"
        like = without_storage(policy)
        take_buffers(policy, like)
        return like, WeightParts(policy, gather, like)
    if gather is not None:
        for names in weight_parts(policy):
            gather(names)
    return None, None


class StepMetrics(Callback):
    """Calls `on_step_metrics(trainer, step)`; read the values from `trainer.callback_metrics` there."""

    _seen_step = 0

    def on_step_metrics(self, trainer: Trainer, step: int) -> None:
        """Override: `step` is the number of optimizer steps done, from 1. Called on every rank."""
        raise NotImplementedError

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        if trainer.global_step > self._seen_step:
            self._seen_step = trainer.global_step
            self.on_step_metrics(trainer, trainer.global_step)
