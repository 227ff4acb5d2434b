"""Data files: expands `${ARBORIST_DATA}` in a configured path, explains what to do when a file is missing, and has the
error and the bound that all readers share.

Promise: every failure to find a file names the configuration key, the path as written, and a remedy (the variable to
set, or the command that makes the file).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from app.text import printable

VARIABLE = "ARBORIST_DATA"
_MAKERS = {
    "tau": "arborist data import-tau CHECKOUT --tokenizer DIR --out DATA (a checkout of sierra-research/tau-bench)",
    "gsm8k": "arborist data import-gsm8k CHECKOUT --out DATA (a checkout of openai/grade-school-math)",
}


_UNSUSPICIOUS_BYTES, _SUSPICIOUS_RATIO = 2**30, 200


class DataFileError(FileNotFoundError):
    """A configured data file that cannot be found; the message says how to get it."""


class RecordedDataError(ValueError):
    """Data that cannot be used; the message names the file, the line or array, and the remedy."""


def check_expansion(path: Path, packed: int, size: int) -> None:
    """Raises RecordedDataError when `packed` bytes of a file have become `size` that nobody packed there by intention:
    more than 1 GiB, over 200 times as many."""
    if size > max(_UNSUSPICIOUS_BYTES, _SUSPICIOUS_RATIO * packed):
        raise RecordedDataError(
            f"{path}: its {packed:,} bytes unpack to more than {size - 1:,}; give it unpacked if that is meant"
        )


def resolve(path: str, key: str, kind: Literal["file", "directory"] = "file") -> Path:
    """The existing file, or directory, that `path` means.

    Args:
        path: as configured; `~`, `$NAME` and `${NAME}` are expanded.
        key: the configuration key it came from, for the error.
        kind: what it has to be.

    Raises:
        DataFileError: an environment variable that is not set, or no such file or directory.
    """
    expanded = os.path.expanduser(os.path.expandvars(path))
    unset = [name for name in re.findall(r"\$\{?(\w+)\}?", path) if name not in os.environ]
    folder = next((name for name in _MAKERS if f"{name}/" in path), None)
    make = f"; to make it from the public repository: {_MAKERS[folder]}" if folder else ""
    if unset:
        raise DataFileError(
            f"{key}: '{path}' needs the environment variable {unset[0]}, which is not set; set it to the data folder "
            f"(for instance `export {unset[0]}=$PWD/data`), or write the path of the file itself{make}"
        )
    try:
        found = Path(expanded).is_file() if kind == "file" else Path(expanded).is_dir()
    except OSError as error:  # a name too long, a folder that may not be looked into
        raise DataFileError(
            f"{key}: '{expanded:.200}' cannot be looked at ({error.strerror}); correct the path"
        ) from None
    if not found:
        written = "" if expanded == path else f" (written '{path}')"
        if kind == "file" and Path(expanded).is_dir():
            raise DataFileError(f"{key}: '{printable(expanded)}'{written} is a folder; name one file in it{make}")
        raise DataFileError(f"{key}: there is no {kind} '{printable(expanded)}'{written}; correct the path{make}")
    return Path(expanded)
