"""What a checkpoint directory says of itself, `manifest.json`, and whether its files still are what was written.

    {"format": 2, "ranks": 2, "files": {"shard-...safetensors": {"bytes": 123, "sha256": "..."}, ...}}

Promises: a checkpoint whose files were cut, mixed, damaged or edited is refused in one line that names the file.
Format 1, of older versions, has sizes only and is read with a note.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

MANIFEST_FILE = "manifest.json"
_FORMAT, _WITHOUT_HASHES = 2, 1
_READERS = 4  # threads that hash at a time; hashing needs about a second a GB, on one core


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names path, reason and remedy."""


@dataclass(frozen=True)
class Written:
    """A file as it was written: its size in bytes, and their SHA-256 in hexadecimal (None: not known)."""

    size: int
    sha256: str | None

    @classmethod
    def of(cls, data: bytes) -> Written:
        return cls(len(data), hashlib.sha256(data).hexdigest())


def manifest(files: Mapping[str, Written], ranks: int) -> bytes:
    """The contents of `manifest.json`."""
    entries = {name: {"bytes": file.size, "sha256": file.sha256} for name, file in sorted(files.items())}
    return json.dumps({"format": _FORMAT, "ranks": ranks, "files": entries}, indent=1).encode()


def read_manifest(path: Path) -> dict[str, Written]:
    """The files of the checkpoint `path`, by name.

    Raises:
        CheckpointError: this is no checkpoint, or of a format that is not known.
    """
    try:
        read: Any = json.loads((path / MANIFEST_FILE).read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"ckpt_path: {path} is no checkpoint of DTAStrategy: {MANIFEST_FILE}: {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path / MANIFEST_FILE, "is no JSON") from error
    if not isinstance(read, dict) or "format" not in read:
        raise _damaged(path / MANIFEST_FILE, "has no format")
    if read["format"] not in (_FORMAT, _WITHOUT_HASHES):
        raise CheckpointError(
            f"ckpt_path: {path} has format {read['format']!r:.40}, this version reads {_WITHOUT_HASHES} and {_FORMAT}:"
            " use the version of this project that wrote it"
        )
    entries = read.get("files")
    if not isinstance(entries, dict) or not entries:
        raise _damaged(path / MANIFEST_FILE, "names no files")
    return {name: _entry(path, name, entry) for name, entry in entries.items()}


def check_files(path: Path, files: Mapping[str, Written], rank: int = 0, ranks: int = 1) -> None:
    """Compares sizes, and the hashes of this rank's share of the files (all `ranks` together check all).

    Raises:
        CheckpointError: names the first file that is not what was written.
    """
    check_sizes(path, files)
    if any(written.sha256 is None for written in files.values()):
        rank_zero_warn(f"ckpt_path: {path} was written by an older version, without hashes: its bytes are not checked")
        return
    mine = sorted(files)[rank::ranks]
    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(lambda name: check_bytes(path / name, files[name]), mine))


def check_sizes(path: Path, files: Mapping[str, Written]) -> None:
    """Whether the files of the checkpoint `path` are all there in full, and no others; reads none of them.

    Raises:
        CheckpointError: names the first that is not.
    """
    for name, written in files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != written.size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(
                f"ckpt_path: {file} {state}, {written.size} were written: copy the whole directory again"
            )
    strange = sorted(file.name for file in path.glob("*.safetensors") if file.name not in files)
    if strange:  # it would be read with the others
        raise CheckpointError(
            f"ckpt_path: {path / strange[0]} is of another checkpoint: copy the whole directory again, to a place where"
            " nothing is"
        )


def check_bytes(file: Path, written: Written) -> None:
    """Compares what `file` holds with the hash that is known of it, if one is.

    Raises:
        CheckpointError: they differ.
    """
    if written.sha256 is not None and _sha256(file) != written.sha256:
        raise _damaged(file, "does not hold the bytes that were written")


def _entry(path: Path, name: str, entry: Any) -> Written:
    plain = Path(name).name == name and name not in ("", "..") and name.isascii() and name.isprintable()
    if plain and len(name) < 256:
        if isinstance(entry, int):
            return Written(entry, None)
        if isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str):
            return Written(entry["bytes"], entry["sha256"])
    raise _damaged(path / MANIFEST_FILE, f"describes no file with {name!r:.80}")


def _damaged(file: Path, state: str) -> CheckpointError:
    return CheckpointError(
        f"ckpt_path: {file} {state}: it was damaged or edited; copy the whole directory again, or take another"
        " checkpoint"
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
