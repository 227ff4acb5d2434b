"""Reads verdicts out of what a judge answers.

Promises: a number is the judge's own or there is none: what is missing, out of range, of another type or said twice
differently is `Misread`, in words that can be shown to the judge (they hold nothing of what it was shown).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")
_MOST_CHARACTERS = 200_000
_MOST_TRIED = 200


class Misread(ValueError):
    """No verdict in an answer."""


def verdict(text: str, read: Callable[[dict[str, Any]], _T]) -> _T:
    """What `read` makes of the JSON object in `text`: the whole text, or one in prose or a code block, after whatever
    stands before `</think>`.

    Args:
        text: the judge's answer.
        read: makes a verdict of an object; raises Misread for one that is none.

    Raises:
        Misread: no object that can be read, or several that do not say the same.
    """
    text = text.rpartition("</think>")[2]
    if len(text) > _MOST_CHARACTERS:
        raise Misread(f"an answer of more than {_MOST_CHARACTERS:,} characters")
    found: list[_T] = []
    why = "no JSON object"
    decoder, at = json.JSONDecoder(), 0
    for _ in range(_MOST_TRIED):
        at = text.find("{", at)
        if at < 0:
            break
        try:
            value, at = decoder.raw_decode(text, at)
            one = read(value)
        except Misread as error:
            why = str(error)
        except (ValueError, RecursionError):
            at += 1
        else:
            found += [one] if one not in found else []
    if not found:
        raise Misread(why)
    if len(found) > 1:
        raise Misread(f"{len(found)} verdicts that differ")
    return found[0]


def points(value: dict[str, Any], name: str, most: int) -> int:
    """The whole number from 0 to `most` under `name`. Raises Misread."""
    if name not in value:
        raise Misread(f"'{name}' is missing")
    found = value[name]
    if isinstance(found, str) and found.strip().isdecimal() and len(found) < 10:
        found = int(found)
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= most:
        raise Misread(f"'{name}' is no whole number from 0 to {most}")
    return found
