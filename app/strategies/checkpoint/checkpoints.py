"""Checkpoint directories: written in the background while training goes on, complete or not there at all.

    step=100.ckpt/
      trainer.pt                      all but large tensors: loops, callbacks, schedulers, stream, hyper-parameters
      manifest.json                   names, sizes and hashes of the other files
      shard-*.safetensors             every rank's pieces of weights and optimizer state

Promises: a directory of that name appears in one rename, when every rank's files are on the disk (`.partial-*` before);
what it replaces, or a deletion asked for meanwhile, goes only after that. Training waits for the copy to CPU memory
and for the previous checkpoint, not for the disk. A failed write leaves nothing behind and ends the run at the next
save, or at its end, naming path and reason. Loading checks every byte (`manifest.py`) and unpickles nothing but tensors
and primitives. The directory must be one that all nodes share.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from app.strategies.checkpoint import directories
from app.strategies.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    Written,
    check_bytes,
    check_files,
    check_sizes,
    manifest,
    read_manifest,
)
from app.strategies.pieces import Piece, save_pieces
from app.text import printable

TRAINER_FILE = "trainer.pt"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

__all__ = ["CheckpointError", "CheckpointWriter", "check", "pack", "saved_step", "unpack", "unreadable"]


@dataclass
class _Save:
    path: Path
    packed: bytes | None
    pieces: Mapping[str, Piece]

    @property
    def size(self) -> int:
        """Bytes that all ranks together write."""
        sizes = (piece.local.element_size() * math.prod(piece.size) for piece in self.pieces.values())
        return sum(sizes) + len(self.packed or b"")


class CheckpointWriter:
    """Writes and deletes checkpoints in the order asked for, in a thread of its own, on every rank alike.

    Args:
        group: gloo process group of all ranks that nothing else uses.
        timeout: seconds to wait for one checkpoint (and for the other ranks).
        explain: says what is known of ranks that died, for errors.
        device: this rank's, where it has one of its own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: float,
        explain: Callable[[], str] = str,
        device: torch.device | None = None,
    ) -> None:
        self.group, self._device = group, device
        self.rank = dist.get_rank(group)
        self._timeout, self._explain = timeout, explain
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._error: BaseException | None = None
        self._cleaned: set[Path] = set()
        # Rank 0's: one name of what is being written, on all ranks.
        name = [directories.this_process()]
        dist.broadcast_object_list(name, group=group, group_src=0)
        self._process = name[0]
        self._thread: threading.Thread | None = None
        self.seconds = 0.0
        """Wall seconds that writing the last complete checkpoint took, in the background."""

    def save(self, path: Path, packed: bytes | None, pieces: Mapping[str, Piece]) -> None:
        """Collective. Waits for the previous checkpoint, copies the pieces to CPU memory and returns.

        Args:
            packed: the contents of `trainer.pt` (see `pack`); rank 0's is written.
            pieces: this rank's pieces, the same names on every rank.

        Raises:
            CheckpointError: the previous checkpoint failed.
        """
        self.wait(self._timeout)
        job = _Save(path.absolute(), packed, {name: piece.staged() for name, piece in pieces.items()})
        self._submit(lambda: self._write(job))

    def remove(self, path: Path) -> None:
        """On rank 0 deletes a checkpoint once what was asked for before is done, and only if that succeeded."""
        if self.rank == 0:
            self._submit(lambda: self._delete(path.absolute()))

    def wait(self, seconds: float) -> None:
        """Returns when everything asked for is done.

        Raises:
            CheckpointError: it failed, or was not done in `seconds`.
        """
        with self._jobs.all_tasks_done:
            done = self._jobs.all_tasks_done.wait_for(lambda: self._jobs.unfinished_tasks == 0, seconds)
        if not done:
            raise CheckpointError(
                f"rank {self.rank}: the checkpoint being written was not complete after {seconds:.0f} s: another rank"
                " has probably died or its disk is stuck; look for the first error in the other ranks' output"
            )
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(
                f"rank {self.rank}: a checkpoint was not written: {error} {self._explain()}".strip()
            ) from error

    def close(self) -> None:
        """Ends the thread when its queue is empty; another `save` starts a new one."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(1.0)
            self._thread = None

    def _submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            # A daemon: a rank that fails must be able to leave although the others no longer answer.
            self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            # Every thread begins at device 0: torch's writer would make a context there, and wait for another rank's
            # work.
            torch.cuda.set_device(self._device)
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                if self._error is None:  # after a failure nothing is deleted, and nothing written that was to follow
                    job()
            except BaseException as error:
                self._error = error
            finally:
                self._jobs.task_done()

    def _write(self, job: _Save) -> None:
        start = time.perf_counter()
        partial = directories.hidden(job.path, "partial", self._process)
        try:
            self._write_to(partial, job)
        except BaseException as error:
            if self.rank == 0:  # the others have failed too, or wait for nothing any more
                shutil.rmtree(partial, ignore_errors=True)
            raise RuntimeError(_reason(error, job)) from error
        self.seconds = time.perf_counter() - start

    def _write_to(self, partial: Path, job: _Save) -> None:
        if self.rank == 0:
            if job.path.parent not in self._cleaned and job.path.parent.is_dir():
                directories.clean(job.path.parent, self._process)
            self._cleaned.add(job.path.parent)
            with contextlib.suppress(OSError):  # tried again where an error reaches all ranks
                partial.mkdir(parents=True, exist_ok=True)
        try:
            dist.barrier(self.group)
        except RuntimeError as error:
            raise RuntimeError(f"not all ranks came to begin it within {self._timeout:.0f} s ({error})") from error

        def publish(written: dict[str, Written]) -> None:
            assert job.packed is not None
            directories.write_synced(partial / TRAINER_FILE, job.packed)
            files = written | {TRAINER_FILE: Written.of(job.packed)}
            directories.write_synced(partial / MANIFEST_FILE, manifest(files, dist.get_world_size(self.group)))
            directories.sync_directory(partial)
            directories.replace(partial, job.path, self._process)

        save_pieces(job.pieces, partial, self.group, publish)

    def _delete(self, path: Path) -> None:
        """Paths come from callbacks, whose state comes from checkpoints: nothing but a checkpoint is deleted."""
        known = path.suffix == ".ckpt" if path.is_file() else (path / MANIFEST_FILE).is_file()
        if path.exists() and not path.is_symlink() and not known:
            raise RuntimeError(f"{path} was to be deleted as one that is no longer kept, but it is no checkpoint")
        directories.delete(path, self._process)


def _reason(error: BaseException, job: _Save) -> str:
    """One line: why a checkpoint was not written."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            free = shutil.disk_usage(job.path.parent).free
            return (
                f"{job.path} does not fit: it needs {job.size / 1e6:.1f} MB, {free / 1e6:.1f} MB are free"
                f" ({cause.strerror}). Free space there, keep fewer (ModelCheckpoint's save_top_k), or choose another"
                " place (its dirpath)"
            )
        cause = cause.__cause__
    return " ".join(f"{job.path}: {error}".split())


def pack(contents: Mapping[str, Any]) -> bytes:
    """The bytes of `trainer.pt`.

    Raises:
        CheckpointError: a value could not be loaded again without unpickling arbitrary objects; names its key.
    """
    packed = _saved(contents)
    if _loads(packed):
        return packed
    bad = [key for key, value in contents.items() if not _loads(_saved(value))]
    raise CheckpointError(
        f"checkpoint: {bad} hold objects that could not be loaded again safely (only tensors and primitives are):"
        " leave them out of state_dict / on_save_checkpoint, or out of save_hyperparameters(ignore=[...])"
    )


def check(path: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compares the files of a checkpoint with what was written: all `ranks` together all of them.

    Raises:
        CheckpointError: files are missing, cut short or damaged, or this is no checkpoint.
    """
    check_files(path, read_manifest(path), rank, ranks)


def unpack(path: Path, checked: bool = False) -> dict[str, Any]:
    """The contents of `trainer.pt` of a complete checkpoint. `checked`: the files were compared before.

    Raises:
        CheckpointError: as `check`, or they cannot be read.
    """
    if not checked:
        check(path)
    file = path / TRAINER_FILE
    try:
        contents = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever damaged archives and pickles raise
        raise unreadable(file, error) from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"ckpt_path: {file} holds no dictionary: this project did not write it")
    return contents


def saved_step(path: Path) -> int:
    """The optimizer steps after which a checkpoint was written, a directory or a file of another strategy. Reads no
    weights: of a directory all files are there in full, but `trainer.pt` alone is compared with what was written.

    Raises:
        CheckpointError: as `unpack`, or it does not say.
    """
    file = path
    if path.is_dir():
        files, file = read_manifest(path), path / TRAINER_FILE
        check_sizes(path, files)
        if TRAINER_FILE in files:
            check_bytes(file, files[TRAINER_FILE])
    try:
        contents = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever damaged archives and pickles raise
        raise unreadable(file, error) from error
    step = contents.get("global_step") if isinstance(contents, dict) else None
    if not isinstance(step, int):
        raise CheckpointError(f"ckpt_path: {file} holds no global_step: it is no checkpoint of a run")
    return step


def unreadable(file: Path, error: Exception) -> CheckpointError:
    """The error of a file of a checkpoint that cannot be read because of `error`, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {printable(lines[0]):.200}" if lines else type(error).__name__
    told = CheckpointError(
        f"ckpt_path: {file} cannot be read ({reason}): it is damaged, or this project did not write it; copy the whole"
        " directory again, or take another checkpoint"
    )
    told.__cause__ = error
    return told


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loads(packed: bytes) -> bool:
    try:
        torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True
