"""What a reward call gives back, and what to do when it fails: the nested `data.reward_options` of a config.

Promises: cheap to import (reward workers do it); an option out of range or without effect is refused by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from app import checks
from datamodules.processes.limits import looks_secret

Failure = Literal["exception", "crash", "timeout", "memory", "nan"]
FEEDBACK = "feedback"
"""Key of what a reward says in words: among the parts that it returns, and in the metadata of an episode."""
_RETRIED: tuple[Failure, ...] = ("exception", "crash", "timeout")


@dataclass(frozen=True)
class Judgement:
    """The reward of one completion.

    Attributes:
        value: finite.
        parts: what it is made of, by name, for the logs (empty when the reward is one number).
        failed: why there is no real reward and `value` is the configured one instead; "" when there is.
        unreadable: the reward could not read the completion within its bounds and took it for wrong.
        turns: what each call of a transcript earns on top, at its end, in their order; () where nothing is said of
            single ones.
        feedback: what the reward says in words, such as the error of a test; "" for nothing.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    unreadable: bool = False
    turns: tuple[float, ...] = ()
    feedback: str = ""

    def metadata(self) -> dict[str, Any]:
        """What of this goes into a trajectory's metadata, where there is any: `reward_parts`, `reward_failed`,
        `reward_unreadable`, `feedback`."""
        found = {
            "reward_parts": dict(self.parts),
            "reward_failed": self.failed,
            "reward_unreadable": self.unreadable,
            FEEDBACK: self.feedback,
        }
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True)
class RewardOptions:
    """How rewards are called.

    Attributes:
        workers: processes for rewards.
        deadline_s: seconds one reward may take, time spent waiting for a worker not counted; then its worker is killed
            and the call has failed.
        retries: how often a failed call is made again, each time with a whole deadline, before it counts as failed.
        retry_on: the failures worth another try: "exception" (the reward raised), "crash" (its process ended),
            "timeout" (deadline passed, process killed), "memory" (over `memory_mb`, process killed), "nan" (no finite
            number). None for exception, crash and timeout.
        cache: results kept, by everything the reward sees (prompt and completion); the least recently used go first. 0
            keeps none: right for rewards that are not a function of what they see.
        on_failure: "drop" drops the group of a failed call; a number is its score instead (logged with the prompt's
            name, counted, marked in the trajectory's metadata).
        memory_mb: most memory of a worker process with all it started, in 10^6 bytes. A worker above it is replaced; if
            that is so in its first call, it is the call's doing, which fails. None for its share, among the workers, of
            a quarter of the machine's memory, at least 1000. The largest allocation is bounded by the kernel, as
            RLIMIT_DATA, at twice as much and 2000.
        max_calls: calls after which a worker is replaced, against whatever else leaks. None for no limit.
        keep_environment: environment variables that rewards may see though their names look like secrets (those with
            `_KEY`, `_TOKEN`, `SECRET`, `PASSWORD`, `CREDENTIALS` and the like, or a URL with a password as
            their value, which workers do not get).

    Raises:
        ValueError: an option out of range or without effect.
    """

    workers: int = 1
    deadline_s: float = 15.0
    retries: int = 0
    retry_on: Sequence[Failure] | None = None
    cache: int = 0
    on_failure: Literal["drop"] | float = "drop"
    memory_mb: float | None = None
    max_calls: int | None = None
    keep_environment: Sequence[str] | None = None

    def __post_init__(self) -> None:
        name = "reward_options."
        checks.at_least(0, {f"{name}retries": self.retries, f"{name}cache": self.cache})
        checks.at_least(1, {f"{name}workers": self.workers, f"{name}max_calls": self.max_calls})
        checks.deadline({f"{name}deadline_s": self.deadline_s})
        checks.positive({f"{name}memory_mb": self.memory_mb})
        if self.retry_on is not None:
            unknown = [one for one in self.retry_on if one not in get_args(Failure)]
            if unknown or not self.retry_on:
                raise ValueError(
                    f"reward_options.retry_on: {list(self.retry_on)}, choose at least one of {get_args(Failure)}"
                )
            if self.retries == 0:
                raise ValueError("reward_options.retry_on has no effect with retries: 0; raise retries or remove it")
        if self.on_failure != "drop" and not (
            isinstance(self.on_failure, int | float) and math.isfinite(self.on_failure)
        ):
            raise ValueError(f"reward_options.on_failure: {self.on_failure!r}, must be 'drop' or a finite score")
        for variable in self.keep_environment or ():
            # One that is not set here, or is a URL, may have a secret as its value elsewhere or another time.
            value = os.environ.get(variable, "://")
            if "://" not in value and not looks_secret(variable):
                raise ValueError(
                    f"reward_options.keep_environment: {variable!r} has no effect, it looks like no secret and is there"
                    " anyway; remove it"
                )

    @property
    def retried(self) -> tuple[Failure, ...]:
        """The failures that are tried again while retries are left."""
        return _RETRIED if self.retry_on is None else tuple(self.retry_on)
