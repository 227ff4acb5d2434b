"""Rollouts on disk: one file a batch, as the trainer got it, for training again without rolling out.

    DIR/batch_00000012.safetensors      the batch that took the policy from version 12 to 13

A file holds the batch's tensors bit for bit (token ids, masks, log-probabilities, versions, rewards, temperatures), and
in its header, as JSON, the groups, prompt ids, finish reasons and metadata.

Promises: a file that is there is whole (written aside, then renamed); batches that are there are never overwritten;
what is read back equals what was written, but for metadata that JSON cannot express, which comes back as text. Nothing
is unpickled.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from app.batch import BatchError
from datamodules.groups import Group, pack, unpack

FORMAT = "arborist-rollouts-1"
_NAME = re.compile(r"batch_(\d{8})\.safetensors")


class RecordingError(ValueError):
    """A recording that cannot be written or read; the message names the file and the remedy."""


class RolloutRecorder:
    """Writes batches into a directory, which is made when the first one comes.

    Args:
        directory: where to.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def begin(self, version: int) -> None:
        """Raises RecordingError when the directory holds batches from `version` on: another run went on from there."""
        later = [known for known in versions(self.directory) if known >= version]
        if later:
            raise RecordingError(
                f"record: {self.directory} already holds batches of versions {later[0]} to {later[-1]}, and this run"
                f" begins at version {version}; name another directory, or a relative one, which lies in the run"
                " directory"
            )

    def write(self, version: int, groups: list[Group]) -> Path:
        """Writes the batch that policy `version` is trained on. Raises RecordingError when that fails."""
        path = self.directory / f"batch_{version:08d}.safetensors"
        packed = pack(groups)
        tensors = packed.pop("tensors")
        header = {"format": FORMAT, "version": str(version), "batch": json.dumps(packed)}
        aside = path.with_suffix(".part")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, aside, metadata=header)
            os.replace(aside, path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise RecordingError(
                f"record: the batch of version {version} could not be written to {path}: {error}; free space there, or"
                " leave record out"
            ) from error
        return path


def versions(directory: Path) -> list[int]:
    """The policy versions whose batches `directory` holds, in order."""
    found = (_NAME.fullmatch(path.name) for path in directory.glob("batch_*.safetensors"))
    return sorted(int(match.group(1)) for match in found if match)


def read_batch(directory: Path, version: int) -> list[Group]:
    """The groups of one recorded batch, in the order they were trained in.

    Raises:
        RecordingError: no such file, or one that is broken or of another format.
    """
    path = directory / f"batch_{version:08d}.safetensors"
    if not path.is_file():
        known = versions(directory)
        held = f"it holds versions {known[0]} to {known[-1]}, {len(known)} batches" if known else "it holds none"
        raise RecordingError(
            f"path: {directory} has no batch that was trained at version {version} ({held}); start from the weights the"
            " recorded run started from (model, or ckpt_path), and record without interruption"
        )
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if header.get("format") != FORMAT:
            raise RecordingError(f"{path}: of format {header.get('format')!r}, expected {FORMAT!r}; record it again")
        return unpack({**json.loads(header["batch"]), "tensors": tensors})
    except (SafetensorError, BatchError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise RecordingError(f"{path}: not a whole recorded batch ({error}); record it again") from error
