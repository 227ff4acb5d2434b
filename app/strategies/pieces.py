"""Pieces: what one rank holds of a tensor, saved and loaded through `torch.distributed.checkpoint`.

Promises: what some ranks saved as pieces loads as any other pieces, on any number of ranks, because only places in the
whole tensor are written down. Files are safetensors, their table of contents is JSON: nothing is unpickled; they are
hashed as they are written. Knows nothing of optimizers or Lightning.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from app.strategies.manifest import CheckpointError, Written
from app.text import printable

_FILE_BYTES = 1 << 30  # a file is put together in memory before it is written


@dataclass(frozen=True)
class Piece:
    """A box of a larger tensor.

    Attributes:
        local: the values, of any shape with as many dimensions as `size`; may be empty.
        offsets: where the box begins in the whole tensor.
        size: shape of the whole tensor.
    """

    local: Tensor
    offsets: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def rows(cls, whole: Tensor, rank: int, ranks: int) -> Piece:
        """This rank's rows of a tensor [n, ...] that every rank holds: an even share, and all shares are everything."""
        start, stop = (whole.shape[0] * r // ranks for r in (rank, rank + 1))
        return cls(whole[start:stop], (start, *(0 for _ in whole.shape[1:])), tuple(whole.shape))

    def staged(self) -> Piece:
        """A copy in CPU memory, which training cannot change any more."""
        return dataclasses.replace(self, local=self.local.detach().to("cpu", copy=True).contiguous())

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.local.shape)


class CheckpointMismatch(ValueError):
    """A checkpoint lacks a tensor or holds it in another shape; the message names it."""


def save_pieces(
    pieces: Mapping[str, Piece],
    directory: Path,
    group: dist.ProcessGroup,
    finish: Callable[[dict[str, Written]], None],
) -> None:
    """Collective over `group` (CPU tensors): writes all ranks' pieces below `directory`, which all ranks share.

    Args:
        pieces: staged pieces by name, the same names on every rank; at most one a name and rank.
        finish: called on rank 0 with all ranks' files, by name, when they are complete.

    Raises:
        RuntimeError: on every rank, when any rank failed; says which and why, and its cause is the first one's error.
    """
    files: dict[str, int] = {}
    number, filled = 1, 0
    for name, piece in pieces.items():
        size = piece.local.element_size()
        for extent in piece.size:
            size *= extent
        if filled and filled + size > _FILE_BYTES * dist.get_world_size(group):
            number, filled = number + 1, 0
        files[name] = number
        filled += size
    writer = _Writer(str(directory), finish, files)
    tensors: dict[str, Any] = {name: piece.local for name, piece in pieces.items()}
    try:
        dcp.save(tensors, storage_writer=writer, planner=_SavePlanner(pieces), process_group=group)
    except dcp.CheckpointException as error:  # not an Exception: nobody would catch it
        failures = [(rank, failure) for rank, (failure, _) in sorted(error.failures.items())]
        text = "; ".join(f"rank {rank}: {type(failure).__name__}: {failure}" for rank, failure in failures)
        raise RuntimeError(text) from failures[0][1]


class SavedPieces:
    """What `save_pieces` wrote to `directory`; its table of contents is read once.

    Attributes:
        tensors: of the shape and dtype of every whole tensor, by name, without storage.

    Raises:
        CheckpointError: files cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = _Reader(str(directory))
        with _readable(directory):
            known = self._reader.read_metadata().state_dict_metadata
            self.tensors = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
                for name, entry in known.items()
                if isinstance(entry, TensorStorageMetadata)
            }

    def load(self, pieces: Mapping[str, Piece]) -> None:
        """Fills `pieces[name].local` in place, whatever number of ranks wrote them. Every rank reads for itself.

        Raises:
            CheckpointMismatch: a tensor is missing or has another shape.
            CheckpointError: files cannot be read.
        """
        for name, piece in pieces.items():
            if name not in self.tensors:
                raise CheckpointMismatch(f"{self.directory}: the checkpoint holds no '{name}', which this run needs")
            if tuple(self.tensors[name].shape) != piece.size:
                raise CheckpointMismatch(
                    f"{self.directory}: '{name}' has shape {tuple(self.tensors[name].shape)} in the checkpoint and"
                    f" {piece.size} in this run: the checkpoint belongs to another model"
                )
        wanted: dict[str, Any] = {name: piece.local for name, piece in pieces.items()}
        with _readable(self.directory), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant: each rank by itself
            dcp.load(wanted, storage_reader=self._reader, planner=_LoadPlanner(pieces), no_dist=True)

    def whole(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors, whole, in CPU memory; errors as `load`."""
        found = {name: torch.empty_like(self.tensors[name], device="cpu") for name in names}
        self.load({name: Piece(whole, (0,) * whole.dim(), tuple(whole.shape)) for name, whole in found.items()})
        return found


def load_pieces(pieces: Mapping[str, Piece], directory: Path) -> None:
    """`SavedPieces.load`, once."""
    SavedPieces(directory).load(pieces)


def load_whole(directory: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors whose names are `wanted`, whole, in CPU memory."""
    saved = SavedPieces(directory)
    return saved.whole(filter(wanted, saved.tensors))


class _Reader(HuggingFaceStorageReader):
    """Opens every file once for what is in it, however often it is asked."""

    _known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._known is None:
            self._known = super().read_metadata()
        return self._known


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Around reading files that may be damaged: only hashes tell that, and old checkpoints have none."""
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception: nobody would catch it
        reason = printable(" ".join(str(error).split()))[-200:]
        raise CheckpointError(
            f"ckpt_path: the shards in {directory} cannot be read ({reason}): copy the whole directory again, or take"
            " another checkpoint"
        ) from error


class _HashedFiles(FileSystem):
    """Hashes what is written, on the way to the disk."""

    def __init__(self) -> None:
        self.written: dict[str, Written] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashed = _HashedStream(stream)
            yield hashed
        self.written[Path(path).name] = Written(hashed.bytes, hashed.hash.hexdigest())


class _HashedStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.bytes, self.hash = 0, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.bytes += len(data)
        self.hash.update(data)
        return int(self._stream.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Writer(HuggingFaceStorageWriter):
    def __init__(self, path: str, finish: Callable[[dict[str, Written]], None], files: dict[str, int]) -> None:
        super().__init__(path, fqn_to_index_mapping=files, save_distributed=True)
        self.fs = self._files = _HashedFiles()
        self._finish = finish

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.rank and not Path(self.path).is_dir():
            raise FileNotFoundError(
                f"{self.path} was made by rank 0 and is not visible to rank {self.rank}: checkpoints need a directory"
                " that all nodes share"
            )
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """What was written where, as torch wants it, and behind that this rank's files: they travel to rank 0."""
        results = super().write_data(plan, planner).value()
        done: Future[list[Any]] = Future()
        done.set_result([*results, self._files.written])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, [result[:-1] for result in results])
        self._finish({name: file for result in results for name, file in result[-1].items()})


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(name, torch.Size(piece.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=piece.chunk,
                    properties=TensorProperties.create_from_tensor(piece.local),
                    size=torch.Size(piece.size),
                ),
            )
            for name, piece in self._pieces.items()
            if piece.local.numel()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._pieces[index.fqn].local


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in self._pieces.items():
            if piece.local.numel():
                known = self.metadata.state_dict_metadata[name]
                assert isinstance(known, TensorStorageMetadata), "safetensors files hold nothing else"
                items += create_read_items_for_chunk_list(name, known, [piece.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].local
