"""Templates and regular expressions of a configuration, applied to text that models and data files hold.

Promises: a template reaches the values it is given and nothing behind them; a search ends, by a deadline where the
pattern backtracks without end; both say what is wrong with them when they are made.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import regex

DEADLINE_S = 5.0
"""Most processor seconds of one search."""
_LONGEST, _MOST_REPEATS = 10_000, 1_000_000
_REPEAT = re.compile(r"(\)?)\{(\d*),?(\d*)\}")


class Template:
    """Text with plain names in braces, such as "Q: {question}\\nA:"; "{{" and "}}" are braces.

    Args:
        text: the template.
        key: the configuration key it came from, for errors.

    Attributes:
        text: as given. names: the names in it.

    Raises:
        ValueError: braces without a partner, or more than a name in them.
    """

    def __init__(self, text: str, key: str) -> None:
        self.text = text
        try:
            pieces = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(f"{key}: {text!r:.200}: {error}; write {{{{ and }}}} for braces that are text") from None
        for _, name, specification, conversion in pieces:
            if name is not None and (specification or conversion or not name or set(name) & set("[]")):
                written = (
                    name + (f"!{conversion}" if conversion else "") + (f":{specification}" if specification else "")
                )
                raise ValueError(
                    f"{key}: {'{' + written + '}':.100} in {text!r:.200} is no name of a field; write {{question}} for"
                    " the field 'question', without indices, conversions and formats"
                )
        self._pieces = [(literal, name) for literal, name, _, _ in pieces]
        self.names = {name for _, name in self._pieces if name is not None}

    def fill(self, value: Callable[[str], Any]) -> str:
        """The text with each name's `value`."""
        parts = (literal + ("" if name is None else str(value(name))) for literal, name in self._pieces)
        return "".join(parts)


class Pattern:
    """A regular expression (Python's syntax) whose first group is what is looked for.

    Args:
        pattern: with at least one group.
        key: the configuration key it came from, for errors.
        dotall: "." matches line ends too.

    Raises:
        ValueError: no regular expression, one without a group, or one that is too large.
    """

    def __init__(self, pattern: str, key: str, dotall: bool = False) -> None:
        self.pattern = pattern
        self._key = key
        repeats = [(group, max(int(n or 1) for n in pair) or 1) for group, *pair in _REPEAT.findall(pattern)]
        # Those of groups multiply what is inside; others stand side by side.
        most = prod(n for group, n in repeats if group) * max((n for group, n in repeats if not group), default=1)
        if len(pattern) > _LONGEST or most > _MOST_REPEATS:
            raise ValueError(f"{key}: {pattern!r:.200} repeats too much; write a shorter pattern")
        try:
            re.compile(pattern)  # the same syntax: the library below knows more, and reads some of it in another way
            self._compiled = regex.compile(pattern, regex.DOTALL if dotall else 0)
        except (re.error, regex.error, OverflowError, RecursionError, MemoryError) as error:
            raise ValueError(f"{key}: {pattern!r:.200} is no regular expression: {error}") from None
        if self._compiled.groups < 1:
            raise ValueError(f"{key}: {pattern!r:.200} has no group; put the answer in (...)")

    def find(self, text: str) -> Iterator[str | None]:
        """What the first group holds, match by match; None where a match is without it.

        Raises:
            ValueError: the search took longer than `DEADLINE_S`.
        """
        try:
            for match in self._compiled.finditer(text, timeout=DEADLINE_S, concurrent=True):
                yield match[1]
        except TimeoutError:
            raise ValueError(
                f"{self._key}: {self.pattern!r:.200} searches {len(text):,} characters for more than {DEADLINE_S:g} s;"
                " write it without nested repetitions, such as (a+)+"
            ) from None
