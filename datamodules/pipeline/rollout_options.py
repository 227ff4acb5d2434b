"""Checks of `RolloutDataModule`'s arguments. Promises: what is refused is named, with the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from app.batch import TEMPERATURES
from datamodules.inference.protocol import InferenceEngine
from datamodules.prompts.base import PromptSource

LONGEST_S = 10_000_000
"""Seconds: every wait has an end, this one after four months."""
MOST_EPISODES = 1_000_000
"""In one batch; each is a task, and memory, from its first request on."""


def at_least(least: float, options: Mapping[str, float]) -> None:
    """Raises ValueError for the first of these options that is below `least`."""
    for name, value in options.items():
        if not value >= least:
            raise ValueError(f"{name}: {value}, must be at least {least}")


def at_most(most: float, options: Mapping[str, float | None]) -> None:
    """Raises ValueError for the first of these options that is above `most`, or no number."""
    for name, value in options.items():
        if value is not None and not value <= most:
            raise ValueError(f"{name}: {value}, must be at most {most:,}")


def deadline(options: Mapping[str, float]) -> None:
    """Raises ValueError for the first of these options that is no number of seconds one may wait."""
    for name, value in options.items():
        if not 0 < value <= LONGEST_S:
            raise ValueError(f"{name}: {value}, must be above 0 and at most {LONGEST_S:,} s")


def temperature(name: str, value: float) -> None:
    """Raises ValueError unless the option `name` is 0, for greedy, or a temperature one can sample with."""
    coldest, hottest = TEMPERATURES
    if value != 0 and not coldest <= value <= hottest:
        raise ValueError(f"{name}: {value}, must be 0 (greedy) or between {coldest:g} and {hottest:g}")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError when the option `name` is none of its choices."""
    if value not in choices:
        raise ValueError(f"{name}: {value!r}, must be one of {', '.join(choices)}")


def prompt_source(value: object, key: str) -> PromptSource:
    """`value`, if it is a source of prompts; else ValueError."""
    if not isinstance(value, PromptSource):
        raise ValueError(f"{key}: {type(value).__name__} is no PromptSource; subclass datamodules.prompts.PromptSource")
    return value


def inference_engine(value: Any) -> InferenceEngine:
    """`value`, if it has all methods of an engine; else ValueError names those it lacks."""
    # Looked up without running properties: an engine's may fail before its start.
    names = [name for name in vars(InferenceEngine) if not name.startswith("_")]
    missing = [name for name in names if inspect.getattr_static(value, name, None) is None]
    if missing:
        raise ValueError(f"engine: {type(value).__name__} is no InferenceEngine, it lacks {', '.join(missing)}")
    engine: InferenceEngine = value
    return engine
