"""Directories of weights that inference servers load while others are written: one complete directory a version.

    files = WeightFiles("runs/x/weights")
    path = files.write(policy, version=3)       # runs/x/weights/v00000003
    files.prune(keep=3)

Promises: a version's directory exists with all of its bytes on disk, or not at all (written aside, flushed, renamed),
also when the process is killed; a disk that is full is one error with the path and the bytes needed, the older
versions intact and nothing half-written left; it loads with `from_pretrained` and on an SGLang server. Of a policy with
adapters it is the merged model, or the adapter alone, as PEFT has it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module

from app.tree import own_config
from datamodules.files.publish import open_as_others
from datamodules.inference.export import ExportError, adapter_weights, base_model, checkpoint_weights, num_bytes
from datamodules.inference.served_config import put_back

_log = logging.getLogger(__name__)
SHARD_BYTES = 4 << 30
WRITTEN = "written"
"""In the metadata of files: what no other directory has, whatever its path."""
_MARGIN_BYTES = 1 << 20  # configuration, index and headers beside the tensors


class WeightFiles:
    """The versions below one directory; a single writer.

    Args:
        directory: made when missing. Servers must see it under the same path.
        shard_bytes: most bytes of tensors in one file (a larger tensor has a file of its own).
        adapter: write the policy's adapter, and not the model it is on.
    """

    def __init__(self, directory: str | Path, shard_bytes: int = SHARD_BYTES, adapter: bool = False) -> None:
        if shard_bytes < 1:
            raise ValueError(f"WeightFiles.shard_bytes: {shard_bytes}, must be at least 1")
        self.directory = Path(directory).absolute()
        self.shard_bytes = shard_bytes
        self.adapter = adapter

    def path(self, version: int) -> Path:
        return self.directory / f"v{version:08d}"

    def write(self, policy: Module, version: int, parts: Iterable[dict[str, Tensor]] | None = None) -> tuple[Path, int]:
        """Writes the policy's weights and configuration; an older directory of that version is replaced.

        Args:
            parts: the weights of a whole model, in its checkpoint's names and layout; `policy` may then be without
                storage. They are written as they come, up to `shard_bytes` together in memory.

        Returns:
            The directory, and the bytes of its tensors.

        Raises:
            ExportError: the policy cannot be exported, or the disk does not take it.
        """
        if parts is None:
            weights = adapter_weights(policy) if self.adapter else checkpoint_weights(policy)
            size, parts = num_bytes(weights), [weights]
        else:
            size = sum(parameter.nbytes for parameter in policy.parameters())
        target = self.path(version)
        aside = target.with_name(f".{target.name}.partial")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _remove(aside)  # of a process that was killed
            free = shutil.disk_usage(self.directory).free
            if free < size + _MARGIN_BYTES:
                raise OSError(f"only {free:,} bytes are free")
            aside.mkdir()
            if self.adapter:
                save_adapter(policy, aside)
            else:
                _save_config(policy, aside)
                put_back(aside)
                size = save_parts(parts, aside, self.shard_bytes)
            for path in (*aside.iterdir(), aside):
                _flush(path)
            _remove(target)
            aside.rename(target)
            _flush(self.directory)
        except (OSError, SafetensorError) as error:
            _remove(aside)
            raise ExportError(
                f"weight export: version {version} could not be written to {target}, which needs"
                f" {size + _MARGIN_BYTES:,} bytes: {error}; free space there, or set WeightSync.directory to"
                " another disk. The versions before it are intact"
            ) from error
        except BaseException:
            _remove(aside)
            raise
        return target, size

    def prune(self, keep: int) -> None:
        """Removes every version but `keep` (servers that join late or were lost load that one), and what killed
        writers left."""
        for path in (*self.directory.glob("v[0-9]*"), *self.directory.glob(".v[0-9]*")):
            if path != self.path(keep):
                _remove(path)


def save_model(
    policy: Module,
    directory: Path,
    parts: Iterable[dict[str, Tensor]] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """`save_pretrained` of the whole model that `policy` is, adapters merged, into a directory made when missing;
    servers read it too, or a warning says that they have no word for the order of its layers.

    Args:
        parts: its weights, where `policy` is without storage; see `WeightFiles.write`.
        dtype: of these, where it is another than the policy's.
        shard_bytes: most bytes of tensors in one file (a larger tensor has a file of its own).

    Raises:
        ExportError: the policy cannot be exported.
        OSError: the disk refuses a file, which it names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _save_config(policy, directory, dtype)
    save_parts([checkpoint_weights(policy)] if parts is None else parts, directory, shard_bytes)
    try:
        put_back(directory)
    except ExportError as error:
        _log.warning("%s holds a model that transformers reads, and SGLang would read wrongly: %s", directory, error)


def save_adapter(policy: Any, directory: Path, **options: Any) -> None:
    """PEFT's `save_pretrained` of the policy's adapter, with its `options`."""
    policy.save_pretrained(str(directory), **options)
    open_as_others(directory.glob(_TENSORS))


def _save_config(policy: Module, directory: Path, dtype: torch.dtype | None = None) -> None:
    """What stands beside the weights of the whole model that `policy` is, as transformers writes it."""
    base = base_model(policy)
    config = own_config(base)
    config.architectures = [type(base).__name__]
    config.dtype = str(dtype or base.dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.save_pretrained(directory)


def save_parts(parts: Iterable[dict[str, Tensor]], directory: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """Writes tensors as they come, a file whenever `shard_bytes` are together (a larger tensor has a file of its own),
    so that no more than these, twice, and one part are in memory. Parts are emptied, weights that stood there removed.
    Returns the bytes of all. Raises OSError: the disk refuses one."""
    for old in directory.iterdir():
        if _WEIGHTS.fullmatch(old.name):
            old.unlink()
    files: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}
    written = uuid.uuid4().hex
    together = 0  # bytes of what is held

    def write() -> None:
        files.append({name: tensor.nbytes for name, tensor in held.items()})
        file = directory / _file(len(files), 0)
        try:
            save_file(held, file, metadata={"format": "pt", WRITTEN: written})
        except SafetensorError as error:  # which does not say of what kind it is, nor where
            if (number := _OF_SYSTEM.search(str(error))) is None:
                raise
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(file)) from error
        held.clear()

    for part in parts:
        for name in list(part):
            tensor = part.pop(name)
            if held and together + tensor.nbytes > shard_bytes:
                write()
                together = 0
            together += tensor.nbytes
            held[name] = tensor.cpu().clone().contiguous()  # parameters may be views of a flat buffer
    write()
    for number in range(1, len(files) + 1):
        (directory / _file(number, 0)).rename(directory / _file(number, len(files)))
    open_as_others(directory.glob(_TENSORS))
    size = sum(sum(sizes.values()) for sizes in files)
    if len(files) > 1:
        index = {name: _file(number, len(files)) for number, sizes in enumerate(files, 1) for name in sizes}
        content = {"metadata": {"total_size": size}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(content, indent=2, sort_keys=True))
    return size


_OF_SYSTEM = re.compile(r"\(os error (\d+)\)")
_TENSORS = "*.safetensors"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def _file(number: int, of: int) -> str:
    """`of`: how many there are; 0 while nobody knows."""
    return "model.safetensors" if of == 1 else f"model-{number:05d}-of-{of:05d}.safetensors"


def split(weights: dict[str, Tensor], most_bytes: int) -> list[list[str]]:
    """Names in their order, cut where a part would exceed `most_bytes`; a larger tensor is a part of its own."""
    parts: list[list[str]] = []
    filled = 0
    for name, tensor in weights.items():
        if not parts or filled + tensor.nbytes > most_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += tensor.nbytes
    return parts


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Removes a directory if it is there. What is being deleted must not look complete: it is renamed first."""
    if not path.exists():
        return
    doomed = path.with_name(f".{path.name.lstrip('.')}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
