"""The forms in which a version of the weights goes to servers: tensors, a directory, or an adapter's.

Promises: what a form says stays so while servers come late and ask for it; tensors of one dtype travel in buckets, and
those that are in files alone are read one bucket at a time; each has a label that no other has, by which a server says
whose weights made a token: other runs count the same versions.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from datamodules.inference.protocol import GenerationError, WeightUpdate
from datamodules.inference.weight_files import WRITTEN, split

BUCKET_BYTES = 256 << 20
_LABEL = re.compile(r"v[0-9]+-[0-9a-f]{8}")


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype, one after another in `data`, uint8 [bytes] on the CPU; or by name in `files`, or as they
    are, in `live`, where the model that has them stands still meanwhile."""

    names: list[str]
    shapes: list[list[int]]
    dtype: str
    data: Tensor | None
    files: Mapping[str, Path] = field(default_factory=dict)
    live: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [math.prod(shape) * getattr(torch, self.dtype).itemsize for shape in self.shapes]

    def read(self, device: torch.device | None = None) -> Tensor:
        """What `data` is, or would be; of `live` ones made on `device`, of others on the CPU.

        Raises:
            GenerationError: a file cannot be read.
        """
        if self.data is not None:
            return self.data
        if self.live:
            return _flat(self.live, device or torch.device("cpu"))
        tensors = {}
        for name in self.names:
            try:
                with safe_open(self.files[name], framework="pt") as file:
                    tensors[name] = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise GenerationError(f"{self.files[name]} cannot be read: {error}") from error
        return _flat(tensors, torch.device("cpu"))


@dataclass(frozen=True)
class _Form:
    """What all forms have.

    Attributes:
        version: of the policy.
        nbytes: of all tensors.
        tag: of these weights alone.
    """

    version: int
    nbytes: int
    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:8], kw_only=True)

    @property
    def label(self) -> str:
        """What servers call them."""
        return f"v{self.version}-{self.tag}"


@dataclass(frozen=True)
class HostWeights(_Form):
    """A copy of the weights in host memory or on disk, for broadcasts: the trainer may go on, servers may ask later.

    Attributes:
        device: where the trainer has them. From a GPU to servers on GPUs they travel by NCCL, else by gloo.
        path: of those in files.
        written: of those in files that `WeightFiles` wrote, what no other directory has.
    """

    buckets: tuple[Bucket, ...]
    device: torch.device
    path: Path | None = None
    written: str = ""

    @classmethod
    def copy_of(cls, weights: dict[str, Tensor], version: int, bucket_bytes: int = BUCKET_BYTES) -> HostWeights:
        """Copies tensors on any device; the names are those of a checkpoint (`export.checkpoint_weights`)."""
        cpu = torch.device("cpu")
        buckets = [_bucket(tensors, _flat(tensors, cpu)) for tensors in _cut(weights, bucket_bytes)]
        return cls(version, _nbytes(weights), tuple(buckets), _device(weights))

    @classmethod
    def live_in(cls, weights: dict[str, Tensor], version: int, bucket_bytes: int = BUCKET_BYTES) -> HostWeights:
        """As `copy_of` has them, the tensors themselves: whoever has them leaves them alone until all are sent."""
        buckets = [_bucket(tensors, None, live=tensors) for tensors in _cut(weights, bucket_bytes)]
        return cls(version, _nbytes(weights), tuple(buckets), _device(weights))

    @classmethod
    def in_files(cls, path: Path, version: int, bucket_bytes: int = BUCKET_BYTES) -> HostWeights:
        """Those in a directory of `WeightFiles`, which are read one bucket at a time when they are sent.

        Raises:
            GenerationError: there are none, or they cannot be read.
        """
        found: dict[str, Tensor] = {}
        where: dict[str, Path] = {}
        written = set()
        for file in _files_in(path):
            try:
                with safe_open(file, framework="pt") as content:
                    written.add((content.metadata() or {}).get(WRITTEN, ""))
                    for name in content.keys():  # noqa: SIM118, it is no mapping
                        view = content.get_slice(name)
                        dtype = view[:0].dtype if view.get_shape() else content.get_tensor(name).dtype
                        found[name] = torch.empty(view.get_shape(), dtype=dtype, device="meta")
                        where[name] = file
            except (OSError, SafetensorError) as error:
                raise GenerationError(f"WeightUpdate.path: {file} cannot be read: {error}") from error
        buckets = [_bucket(tensors, None, {n: where[n] for n in tensors}) for tensors in _cut(found, bucket_bytes)]
        one = written.pop() if len(written) == 1 else ""
        return cls(version, _nbytes(found), tuple(buckets), torch.device("cpu"), path, one)

    @property
    def table(self) -> str:
        """A digest of what the buckets are, and of which files: two processes with the same, whose parameters are the
        same where they are in none, send the same, bucket by bucket."""
        said = [self.written, [[bucket.names, bucket.shapes, bucket.dtype] for bucket in self.buckets]]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


@dataclass(frozen=True)
class SharedWeights(_Form):
    """Such a copy for servers on this host, which read it from memory that both have: bucket after bucket is put there
    while an update lasts (`shared_tensors`), and a server that comes late has the same done.

    Attributes:
        device: where the trainer has them.
    """

    buckets: tuple[Bucket, ...]
    device: torch.device


@dataclass(frozen=True)
class DiskWeights(_Form):
    """A directory of `WeightFiles` that the server sees under the same path."""

    path: str


@dataclass(frozen=True)
class AdapterWeights(_Form):
    """A directory of a PEFT adapter, which the server sees under the same path and knows by its label beside others:
    requests under way go on with the adapter they began with."""

    path: str


Weights = HostWeights | SharedWeights | DiskWeights | AdapterWeights


def from_a_run(label: object) -> bool:
    """Whether what a server calls its weights is a label, of this run or another."""
    return isinstance(label, str) and _LABEL.fullmatch(label) is not None


def weights_of(update: WeightUpdate, adapter: bool = False, one_gpu: bool = False) -> Weights:
    """What servers are brought to by this update; copies its tensors, so it may take a while for a large model.
    `adapter`: its path is that of an adapter. `one_gpu`: servers are on the trainer's, which NCCL refuses."""
    if update.state_dict is not None:
        copy = HostWeights.copy_of(update.state_dict, update.version)
    elif update.path is None:
        raise GenerationError("WeightUpdate.parts: servers take no parts; give state_dict, or path")
    elif update.read_here:
        copy = HostWeights.in_files(Path(update.path), update.version)
    else:
        return _on_disk(Path(update.path), update.version, adapter)
    if update.shared:
        return SharedWeights(copy.version, copy.nbytes, copy.buckets, copy.device)
    return replace(copy, device=torch.device("cpu")) if one_gpu else copy


def _on_disk(path: Path, version: int, adapter: bool) -> DiskWeights | AdapterWeights:
    size = sum(file.stat().st_size for file in _files_in(path))
    return (AdapterWeights if adapter else DiskWeights)(version, size, str(path.absolute()))


def _files_in(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise GenerationError(f"WeightUpdate.path: {path} holds no *.safetensors file; write it with WeightFiles")
    return files


def _cut(weights: dict[str, Tensor], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """In parts of one dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in weights.values()):
        same = {name: tensor for name, tensor in weights.items() if tensor.dtype == dtype}
        yield from ({name: same[name] for name in names} for names in split(same, bucket_bytes))


def _bucket(
    tensors: dict[str, Tensor],
    data: Tensor | None,
    files: Mapping[str, Path] | None = None,
    live: Mapping[str, Tensor] | None = None,
) -> Bucket:
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    shapes = [list(tensor.shape) for tensor in tensors.values()]
    return Bucket(list(tensors), shapes, dtype, data, files or {}, live or {})


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _device(tensors: Mapping[str, Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors.values() if tensor.is_cuda), torch.device("cpu"))


@torch.no_grad()
def _flat(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """A copy, uint8 [bytes]."""
    pinned = device.type == "cpu" and _device(tensors).type == "cuda"
    data = torch.empty(_nbytes(tensors), dtype=torch.uint8, device=device, pin_memory=pinned)
    offset = 0
    for tensor in tensors.values():
        data[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        offset += tensor.nbytes
    return data
