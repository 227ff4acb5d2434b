"""How an option is checked, and what a refusal says: `<key>: <value>, must be ...`, or `<key> has no effect ...`.

Promises: every check names the first option that is wrong, with its value and what would do, in a ValueError; NaN
passes none of them; an option that is None is not set, and passes. Cheap to import (reward workers do it).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

LONGEST_S = 10_000_000
"""Seconds: every wait has an end, this one after four months."""


def at_least(least: float, options: Mapping[str, float | None], remedy: str = "") -> None:
    """Refuses what is below `least`."""
    for name, value in options.items():
        if value is not None and not value >= least:
            raise ValueError(f"{name}: {value}, must be at least {least}{remedy}")


def at_most(most: float, options: Mapping[str, float | None]) -> None:
    """Refuses what is above `most`."""
    for name, value in options.items():
        if value is not None and not value <= most:
            raise ValueError(f"{name}: {value}, must be at most {most:,}")


def positive(options: Mapping[str, float | None], remedy: str = "") -> None:
    """Refuses what is not above 0, or infinite."""
    for name, value in options.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}: {value}, must be above 0 and finite{remedy}")


def fraction(options: Mapping[str, float | None]) -> None:
    """Refuses what is not above 0 and at most 1."""
    for name, value in options.items():
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{name}: {value}, must be above 0 and at most 1")


def deadline(options: Mapping[str, float | None]) -> None:
    """Refuses what is no number of seconds one may wait."""
    for name, value in options.items():
        if value is not None and not 0 < value <= LONGEST_S:
            raise ValueError(f"{name}: {value}, must be above 0 and at most {LONGEST_S:,} s")


def temperature(name: str, value: float, greedy: bool = True, remedy: str = "") -> None:
    """Refuses what one cannot sample with, and 0 (greedy) unless `greedy`."""
    from app.batch import TEMPERATURES  # imports torch

    coldest, hottest = TEMPERATURES
    if not (coldest <= value <= hottest or (greedy and value == 0)):
        allowed = "0 (greedy) or between" if greedy else "between"
        raise ValueError(f"{name}: {value}, must be {allowed} {coldest:g} and {hottest:g}{remedy}")


def one_of(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuses what is none of the choices."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name}: {value!r}, must be one of {', '.join(choices)}")


def no_effect(why: str, options: Mapping[str, object], remedy: str = "remove it") -> None:
    """Refuses every option that is set, since it would be ignored; `why` says when, as "without reward"."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} has no effect {why}; {remedy}")
