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

import copy
import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module

from datamodules.inference.export import ExportError, adapter_weights, base_model, checkpoint_weights, num_bytes
from datamodules.inference.served_config import put_back

_MARGIN_BYTES = 1 << 20  # configuration, index and headers beside the tensors


class WeightFiles:
    """The versions below one directory; a single writer.

    Args:
        directory: made when missing. Servers must see it under the same path.
        shard_bytes: most bytes of tensors in one file (a larger tensor has a file of its own).
        adapter: write the policy's adapter, and not the model it is on.
    """

    def __init__(self, directory: str | Path, shard_bytes: int = 4 << 30, adapter: bool = False) -> None:
        if shard_bytes < 1:
            raise ValueError(f"WeightFiles.shard_bytes: {shard_bytes}, must be at least 1")
        self.directory = Path(directory).absolute()
        self.shard_bytes = shard_bytes
        self.adapter = adapter

    def path(self, version: int) -> Path:
        return self.directory / f"v{version:08d}"

    def write(self, policy: Module, version: int) -> tuple[Path, int]:
        """Writes the policy's weights and configuration; an older directory of that version is replaced.

        Returns:
            The directory, and the bytes of its tensors.

        Raises:
            ExportError: the policy cannot be exported, or the disk does not take it.
        """
        weights = adapter_weights(policy) if self.adapter else checkpoint_weights(policy)
        size = num_bytes(weights)
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
                policy.save_pretrained(str(aside))  # type: ignore[operator]
            else:
                _save_config(policy, aside)
                _save_shards(weights, aside, self.shard_bytes)
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


def _save_config(policy: Module, directory: Path) -> None:
    base = base_model(policy)
    config = copy.deepcopy(base.config)  # the trainer's own stays as it is
    config.architectures = [type(base).__name__]
    config.dtype = str(base.dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    put_back(directory)
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.save_pretrained(directory)


def _save_shards(weights: dict[str, Tensor], directory: Path, shard_bytes: int) -> None:
    shards = split(weights, shard_bytes)
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        suffix = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
        file = f"model{suffix}.safetensors"
        # One shard at a time on the host, each tensor in memory of its own: parameters may be views of a flat buffer.
        tensors = {name: weights[name].cpu().clone().contiguous() for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        content = {"metadata": {"total_size": sum(t.nbytes for t in weights.values())}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(content, indent=2, sort_keys=True))


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
