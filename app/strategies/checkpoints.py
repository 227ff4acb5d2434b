"""Checkpoint directories: written in the background while training goes on, complete or not there at all.

    step=100.ckpt/
      trainer.pt                      all but large tensors: loops, callbacks, schedulers, stream, hyper-parameters
      manifest.json                   names and sizes of the other files
      shard-*.safetensors             every rank's pieces of weights and optimizer state

Promises: a directory of that name appears in one rename, when every rank's files are on the disk (`.partial-*` before);
what it replaces, or a deletion asked for meanwhile, goes only after that. Training waits for the copy to CPU memory
and for the previous checkpoint, not for the disk. A failed write ends the run at the next save, or at its end, naming
path and reason. Loading unpickles nothing but tensors and primitives. The directory must be one that all nodes share.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import os
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

from app.strategies.pieces import Piece, save_pieces

TRAINER_FILE, MANIFEST_FILE = "trainer.pt", "manifest.json"
_FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names path, reason and remedy."""


@dataclass
class _Save:
    path: Path
    packed: bytes | None
    pieces: Mapping[str, Piece]


class CheckpointWriter:
    """Writes and deletes checkpoints in the order asked for, in a thread of its own, on every rank alike.

    Args:
        group: gloo process group of all ranks that nothing else uses.
        timeout: seconds to wait for one checkpoint (and for the other ranks).
        explain: says what is known of ranks that died, for errors.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float, explain: Callable[[], str] = str) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self._timeout, self._explain = timeout, explain
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._error: BaseException | None = None
        self._cleaned: set[Path] = set()
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
            self._submit(lambda: _delete(path.absolute()))

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
        partial = _beside(job.path, "partial")
        if self.rank == 0:
            self._clean(job.path.parent)
            with contextlib.suppress(OSError):  # tried again where an error reaches all ranks
                partial.mkdir(parents=True, exist_ok=True)
        dist.barrier(self.group)

        def publish() -> None:
            assert job.packed is not None
            _write_synced(partial / TRAINER_FILE, job.packed)
            sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
            manifest = {"format": _FORMAT, "ranks": dist.get_world_size(self.group), "files": sizes}
            _write_synced(partial / MANIFEST_FILE, json.dumps(manifest, indent=1).encode())
            _sync_directory(partial)
            _replace(partial, job.path)

        save_pieces(job.pieces, partial, self.group, publish)
        self.seconds = time.perf_counter() - start

    def _clean(self, directory: Path) -> None:
        """Removes what a run that was killed left in this directory, once."""
        if directory not in self._cleaned and directory.is_dir():
            for left in (*directory.glob(".partial-*"), *directory.glob(".replaced-*")):
                shutil.rmtree(left, ignore_errors=True)
        self._cleaned.add(directory)


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


def unpack(path: Path) -> dict[str, Any]:
    """The contents of `trainer.pt` of a complete checkpoint.

    Raises:
        CheckpointError: files are missing or cut short, or this is no checkpoint.
    """
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text())
    except OSError as error:
        raise CheckpointError(f"ckpt_path: {path} is no checkpoint of DTAStrategy: {error}") from error
    if manifest["format"] != _FORMAT:
        raise CheckpointError(f"ckpt_path: {path} has format {manifest['format']}, this version reads {_FORMAT}")
    for name, size in manifest["files"].items():
        file = path / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(f"ckpt_path: {file} {state}, {size} were written: copy the whole directory again")
    return torch.load(path / TRAINER_FILE, map_location="cpu", weights_only=True)


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


def _beside(path: Path, role: str) -> Path:
    """A hidden name in the same directory. It does not contain the path's own: Lightning looks for checkpoints by
    parts of names."""
    return path.parent / f".{role}-{hashlib.sha256(path.name.encode()).hexdigest()[:12]}"


def _replace(new: Path, path: Path) -> None:
    """`new` becomes `path`, and whatever was there is gone afterwards; at no time is there nothing."""
    if os.path.lexists(path):
        if _exchange(new, path):
            _delete(new)
        else:  # a file system without atomic exchange: an interruption here leaves the old one under its hidden name
            old = _beside(path, "replaced")
            _delete(old)
            path.rename(old)
            new.rename(path)
            _delete(old)
    else:
        new.rename(path)
    _sync_directory(path.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two directory entries in one step, where the system can (Linux's renameat2)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_working_directory, exchange = -100, 2
    if rename is None:
        return False
    return rename(at_working_directory, bytes(first), at_working_directory, bytes(second), exchange) == 0


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        # Renamed first: a deletion that is cut off must not leave half a checkpoint under a good name.
        if not path.name.startswith("."):
            doomed = _beside(path, "replaced")
            _delete(doomed)
            path = path.rename(doomed)
        shutil.rmtree(path)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
