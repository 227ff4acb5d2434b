"""JSON from files: values one by one (`parse_json`), and files with one object a line (`read_json_lines`).

Promises: what cannot be read is refused by file, line and reason, whatever is wrong with the bytes: cut, damaged or
fake gzip, nesting of more than 40 levels, half characters, a key that an object of a line has twice. What expands
without end is refused too: a line longer than 256 MiB, more than a million blank lines, more than 1 GiB that is over
200 times the file.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.text import has_surrogate, reason
from datamodules.files.data_files import RecordedDataError, check_expansion

_LONGEST_LINE = 256 * 2**20
_MOST_BLANK_LINES = 1_000_000
_DEEPEST = 40  # `foreign.metadata` takes 50 levels, and workflows may put records into something of their own
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes, unique: bool = False) -> Any:
    """The value that `text` (bytes: UTF-8) holds. Raises ValueError, with the reason, when it holds none.

    Args:
        unique: a key that stands twice in one object is refused, of which the last would count. Not for what a model
            wrote.
    """
    try:
        written = text if isinstance(text, str) else text.decode()
        value = _WITHOUT_TWINS.decode(written) if unique else json.loads(written)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    half = has_surrogate(written) or _SURROGATE_ESCAPE.search(written) is not None
    if half or written.count("[") + written.count("{") > _DEEPEST:
        _check(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


_WITHOUT_TWINS = json.JSONDecoder(object_pairs_hook=_unique)  # made once: as long as a short line takes


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, object) of each line of `path` (`.gz`: of gzip) that is not blank.

    Raises:
        RecordedDataError: as this file promises.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    number = blank = size = 0
    try:
        packed = path.stat().st_size
        with opened(path, "rb") as file:
            while line := file.readline(_LONGEST_LINE + 1):
                number, size = number + 1, size + len(line)
                check_expansion(path, packed, size)
                if len(line) > _LONGEST_LINE:
                    raise RecordedDataError(f"{path}:{number}: a line of more than 256 MiB; split the record")
                if not line.strip():
                    blank += 1
                    if blank > _MOST_BLANK_LINES:
                        raise RecordedDataError(f"{path}: more than {_MOST_BLANK_LINES:,} blank lines; remove them")
                    continue
                yield number, _object(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise RecordedDataError(
            f"{path}: unreadable after line {number} ({reason(error)}); make the file again"
        ) from None


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = parse_json(line.strip(), unique=True)
    except ValueError as error:
        raise RecordedDataError(f"{where}: not valid JSON ({reason(error)}); correct or remove the line") from None
    if not isinstance(value, dict):
        raise RecordedDataError(
            f"{where}: expected a JSON object, got {type(value).__name__}; correct or remove the line"
        )
    return value


def _check(value: Any) -> None:
    """Raises ValueError, naming the place, for text that UTF-8 cannot express, and for what pickle could not follow."""
    left: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while left:
        place, one = left.pop()
        if len(place) > _DEEPEST:
            raise ValueError(f"nested more than {_DEEPEST} deep")
        if isinstance(one, str) and has_surrogate(one):
            where = ".".join(map(str, place)) or "the text"
            raise ValueError(f"half a character (a lone surrogate) in {where}; write the whole one")
        if isinstance(one, dict):
            left.extend(((*place, key), inner) for key, inner in one.items())
            left.extend(((*place, "(a key)"), key) for key in one)
        elif isinstance(one, list):
            left.extend(((*place, k), inner) for k, inner in enumerate(one))
