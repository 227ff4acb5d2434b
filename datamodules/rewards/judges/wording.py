"""The instructions of judges: files that a person can edit, with named places that code fills.

Promises: a place that is unknown or missing is refused by name before anything is asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_PLACE = re.compile(r"\{([a-z_]+)\}")
_PACKAGED = Path(__file__).parent / "prompts"


def instructions(path: str | None, packaged: str, key: str, places: Sequence[str]) -> str:
    """The text of an instructions file.

    Args:
        path: the file; None for the packaged one.
        packaged: name of that.
        key: the option that names the path, for errors.
        places: what has to stand in it, each as `{name}`.

    Raises:
        ValueError: no such file, or a place that is missing or unknown.
    """
    file = _PACKAGED / packaged if path is None else Path(path)
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{key}: {file} cannot be read: {error}; begin with a copy of {_PACKAGED / packaged}"
        ) from None
    found = set(_PLACE.findall(text))
    for name in sorted(found ^ set(places)):
        wrong = "is unknown; remove it" if name in found else "is missing; put it where that belongs"
        raise ValueError(f"{key}: {file}: the place {{{name}}} {wrong} (known: {', '.join(places)})")
    return text


def fill(text: str, values: Mapping[str, str]) -> str:
    """The instructions with their places filled, in one pass: what is put in is not looked through again."""
    return _PLACE.sub(lambda match: values.get(match[1], match[0]), text)
