"""What a reward call gives back, and what to do when it fails: the nested `data.reward_options` of a config.

Promises: cheap to import (reward workers do it); an option out of range or without effect is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Failure = Literal["exception", "crash", "timeout", "memory", "nan"]
_RETRIED: tuple[Failure, ...] = ("exception", "crash", "timeout")


@dataclass(frozen=True)
class Judgement:
    """The reward of one completion.

    Attributes:
        value: finite.
        parts: what it is made of, by name, for the logs (empty when the reward is one number).
        failed: why there is no real reward and `value` is the configured one instead; "" when there is.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    failed: str = ""

    def metadata(self) -> dict[str, Any]:
        """What of this goes into a trajectory's metadata: `reward_parts` and `reward_failed`, where there are any."""
        found = {"reward_parts": dict(self.parts), "reward_failed": self.failed}
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True)
class RewardOptions:
    """How rewards are called beside their deadline.

    Attributes:
        retries: how often a failed call is made again, each time with a whole deadline, before it counts as failed.
        retry_on: the failures worth another try: "exception" (the reward raised), "crash" (its process ended),
            "timeout" (deadline passed, process killed), "memory" (over `memory_mb`, process killed), "nan" (no finite
            number). None for exception, crash and timeout.
        cache: results kept, by everything the reward sees (prompt and completion); the least recently used go first. 0
            keeps none: right for rewards that are not a function of what they see.
        on_failure: "drop" drops the group of a failed call; a number is its score instead (logged with the prompt's
            name, counted, marked in the trajectory's metadata).
        memory_mb: most resident memory of a worker process, in 10^6 bytes (its children not counted). A worker above it
            is replaced; if that is so in its first call, it is the call's doing, which fails. None for no limit.
        max_calls: calls after which a worker is replaced, against whatever else leaks. None for no limit.

    Raises:
        ValueError: an option out of range or without effect.
    """

    retries: int = 0
    retry_on: Sequence[Failure] | None = None
    cache: int = 0
    on_failure: Literal["drop"] | float = "drop"
    memory_mb: float | None = None
    max_calls: int | None = None

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"reward_options.retries: {self.retries}, must be at least 0")
        if self.retry_on is not None:
            unknown = [one for one in self.retry_on if one not in get_args(Failure)]
            if unknown or not self.retry_on:
                raise ValueError(
                    f"reward_options.retry_on: {list(self.retry_on)}, choose at least one of {get_args(Failure)}"
                )
            if self.retries == 0:
                raise ValueError("reward_options.retry_on has no effect with retries: 0; raise retries or remove it")
            if "memory" in self.retry_on and self.memory_mb is None:
                raise ValueError("reward_options.retry_on: 'memory' has no effect without memory_mb; set memory_mb")
        if self.cache < 0:
            raise ValueError(f"reward_options.cache: {self.cache}, must be at least 0")
        if self.on_failure != "drop" and not (
            isinstance(self.on_failure, int | float) and math.isfinite(self.on_failure)
        ):
            raise ValueError(f"reward_options.on_failure: {self.on_failure!r}, must be 'drop' or a finite score")
        if self.memory_mb is not None and not self.memory_mb > 0:
            raise ValueError(f"reward_options.memory_mb: {self.memory_mb}, must be above 0")
        if self.max_calls is not None and self.max_calls < 1:
            raise ValueError(f"reward_options.max_calls: {self.max_calls}, must be at least 1")

    @property
    def retried(self) -> tuple[Failure, ...]:
        """The failures that are tried again while retries are left."""
        return _RETRIED if self.retry_on is None else tuple(self.retry_on)

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_mb is None else int(self.memory_mb * 1e6)
