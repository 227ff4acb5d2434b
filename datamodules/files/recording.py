"""Rollouts on disk: one file a batch, as the trainer got it, for training again without rolling out.

    DIR/batch_00000012.safetensors      the batch that took the policy from version 12 to 13
    DIR/pictures/<key>.png              what its sequences show, once for all batches

A file holds the batch's tensors bit for bit (token ids, masks, log-probabilities, versions, rewards, temperatures); the
groups, prompt ids, finish reasons and metadata, and keys and digests of pictures, as JSON in the bytes of one more
tensor (`json`; a file's header is too small for those of large batches); and in its header the SHA-256 of all that.

Promises: a file that is there is whole (written aside, then named); batches that are there are never overwritten, by
other processes neither: those after the checkpoint from which a run goes on are set aside, into `superseded_<number>`;
what is read back equals what was written, but for metadata that JSON cannot express, which comes back as text; a file
of which a bit has changed is refused. Nothing is unpickled.

Recordings of the format before (`arborist-rollouts-1`: JSON in the header, no hash) are read too; damage inside their
tensors shows only where it makes data that no batch may hold.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from app.pictures import key_of
from app.text import reason
from datamodules.files.picture_files import PictureError, read_png, write_png
from datamodules.files.publish import aside_of, open_as_others, publish
from datamodules.groups import Group, pack, unpack

_log = logging.getLogger(__name__)
FORMAT = "arborist-rollouts-2"
_WITHOUT_HASH = "arborist-rollouts-1"
_JSON = "json"
PICTURES = "pictures"
"""Folder of the pictures, below that of the batches."""
_NAME = re.compile(r"batch_(\d{8})\.safetensors")


class RecordingError(ValueError):
    """A recording that cannot be written or read; the message names the file and the remedy."""


class AlreadyRecorded(RecordingError):
    """There is a batch of that version already."""


def check_directory(key: str, directory: Path) -> None:
    """Before there is anything to lose. Raises RecordingError: nobody can write there, or make it.

    Args:
        key: of the option that names it.
        directory: need not be there; nothing is made.
    """
    there = next(one for one in (directory, *directory.absolute().parents) if os.path.lexists(one))
    if not there.is_dir():
        raise RecordingError(f"{key}: {there} is no directory; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RecordingError(f"{key}: {there} cannot be written to; name another directory, or change its permissions")


class RolloutRecorder:
    """Writes batches into a directory, which is made when the first one comes.

    Args:
        directory: where to.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def begin(self, version: int, goes_on: bool) -> None:
        """Before the first batch of a run, which is that of `version`.

        Args:
            version: of the policy.
            goes_on: from a checkpoint. What was recorded after it, by a run that was killed say, is played again, and
                set aside here.

        Raises:
            RecordingError: a new run, where the directory holds batches from `version` on; or they cannot be moved, or
                none be written.
        """
        check_directory("record", self.directory)
        later = [known for known in versions(self.directory) if known >= version]
        if not later:
            return
        if not goes_on:
            raise RecordingError(
                f"record: {self.directory} already holds batches of versions {later[0]} to {later[-1]}, of another run;"
                " name another directory (a relative one lies in the run directory), or move those away"
            )
        folders = (self.directory / f"superseded_{number}" for number in itertools.count())
        aside = next(folder for folder in folders if not folder.exists())
        try:
            aside.mkdir()
            for known in reversed(later):  # what is left when this is cut short is still whole
                path = _path(self.directory, known)
                os.replace(path, aside / path.name)
        except OSError as error:
            raise RecordingError(
                f"record: batches of versions {later[0]} to {later[-1]} could not be set aside to {aside}: {error};"
                " move them away, or name another directory"
            ) from error
        _log.warning(
            "record: the run goes on at version %d; batches of versions %d to %d, recorded after that checkpoint, are"
            " set aside in %s",
            version,
            later[0],
            later[-1],
            aside,
        )

    def write(self, version: int, groups: list[Group]) -> Path:
        """Writes the batch that policy `version` is trained on. Raises AlreadyRecorded; RecordingError when that
        fails."""
        path = _path(self.directory, version)
        packed = pack(groups)
        shown = packed.pop("pictures", [])
        if shown:
            packed["pictures"] = [(key, tokens, key_of(pixels.numpy()).hex()) for key, tokens, pixels in shown]
        tensors = {name: tensor.contiguous() for name, tensor in packed.pop("tensors").items()}
        tensors[_JSON] = torch.frombuffer(bytearray(json.dumps(packed).encode()), dtype=torch.uint8)
        header = {"format": FORMAT, "version": str(version), "sha256": _hash(version, tensors)}
        aside = aside_of(path)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for key, _, pixels in shown:
                write_png(self.directory / PICTURES / f"{key}.png", pixels.numpy())
            save_file(tensors, aside, metadata=header)
            open_as_others([aside])
            publish(aside, path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            if isinstance(error, FileExistsError):
                raise AlreadyRecorded(
                    f"record: {path} is there already, written by another run or gateway; name another directory"
                ) from error
            raise RecordingError(
                f"record: the batch of version {version} could not be written to {path}: {error}; free space there, or"
                " leave record out"
            ) from error
        return path


def _path(directory: Path, version: int) -> Path:
    return directory / f"batch_{version:08d}.safetensors"


def versions(directory: Path) -> list[int]:
    """The policy versions whose batches `directory` holds, in order."""
    found = (_NAME.fullmatch(path.name) for path in directory.glob("batch_*.safetensors"))
    return sorted(int(match.group(1)) for match in found if match)


def read_batch(directory: Path, version: int) -> list[Group]:
    """The groups of one recorded batch, in the order they were trained in.

    Raises:
        RecordingError: no such file, or one that is broken or of another format.
    """
    path = _path(directory, version)
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
    except (SafetensorError, OSError) as error:
        why = reason(error)
        raise RecordingError(f"{path}: not a whole recorded batch ({why}); record it again") from error
    found = header.get("format")
    if found not in (FORMAT, _WITHOUT_HASH):
        raise RecordingError(f"{path}: of format {found!r}, expected {FORMAT!r}; record it again")
    if header.get("version") != str(version):
        raise RecordingError(
            f"{path}: holds the batch of version {header.get('version')}; give the file its own name back"
        )
    if found == FORMAT and header.get("sha256") != _hash(version, tensors):
        raise RecordingError(f"{path}: damaged, its contents are not those of its SHA-256; record it again")
    try:
        text = header["batch"] if found == _WITHOUT_HASH else tensors.pop(_JSON).numpy().tobytes()
        packed = json.loads(text)
        if "pictures" in packed:
            packed["pictures"] = [_picture(directory, *one) for one in packed["pictures"]]
        return _groups(packed, tensors)
    except RecordingError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:  # a BatchError is a ValueError
        raise RecordingError(
            f"{path}: not a recorded batch ({type(error).__name__}: {reason(error)}); record it again"
        ) from None


def _picture(directory: Path, key: str, tokens: int, digest: str) -> tuple[str, int, Tensor]:
    """A picture as `datamodules.groups.pack` has it. Raises RecordingError unless its pixels are those recorded."""
    path = directory / PICTURES / f"{bytes.fromhex(key).hex()}.png"
    try:
        pixels = read_png(path)
    except PictureError as error:
        raise RecordingError(f"{error}; copy {PICTURES}/ with the batches, or record them again") from None
    if key_of(pixels).hex() != digest:
        raise RecordingError(f"{path}: damaged, its pixels are not those that were recorded; record the batches again")
    return key, tokens, torch.from_numpy(pixels)


def _groups(packed: Any, tensors: dict[str, Tensor]) -> list[Group]:
    """The groups in a file's JSON and tensors. Raises ValueError, TypeError or KeyError for what are none."""
    for name in ("prompt_ids", "finish_reasons"):
        if not all(isinstance(one, str) for one in packed[name]):
            raise TypeError(f"{name}: expected texts")
    groups = unpack({**packed, "tensors": tensors})
    for group in groups:
        if not isinstance(group.prompt_id, str) or not all(type(n) is int for n in (group.index, group.admitted_at)):
            raise TypeError("groups: expected index, prompt id and version of each")
        if not all(isinstance(one.metadata, dict) for one in group.trajectories):
            raise TypeError("metadata: expected an object for each sequence")
    return groups


def _hash(version: int, tensors: dict[str, Tensor]) -> str:
    """SHA-256, in hexadecimal, of a batch's version and of its tensors' names, dtypes, shapes and bytes."""
    digest = hashlib.sha256(str(version).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode(errors="backslashreplace"))
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
