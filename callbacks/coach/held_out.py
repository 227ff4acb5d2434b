"""Held-out rewards of a run, validation by validation: is the model worse than it was?

Promises: prompts are compared with themselves; what is said to have fallen fell in the last two validations, both below
the best one before them, and that it is the best of many is paid for. Three validations are kept, however long the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from app.statistics import sign_flip_bound

_CHANCE = 0.01  # of a false alarm, over all pairs of validations that could have been compared


@dataclass(frozen=True)
class Validation:
    """Attributes: step, after which it was; rewards, mean reward of each prompt's episodes, by set and prompt id."""

    step: int
    rewards: Mapping[tuple[str, str], float]

    @property
    def mean(self) -> float:
        return sum(self.rewards.values()) / len(self.rewards)


@dataclass(frozen=True)
class Fall:
    """From one validation to a later one, over the prompts that both have.

    Attributes:
        step: of the earlier one. before, now: mean rewards. prompts: how many; worse, better: of these.
        p: bound of the chance of so large a fall, were there none.
    """

    step: int
    before: float
    now: float
    prompts: int
    worse: int
    better: int
    p: float

    @classmethod
    def between(cls, early: Validation, late: Validation) -> Fall:
        pairs = [(early.rewards[one], late.rewards[one]) for one in early.rewards if one in late.rewards]
        lost = [before - now for before, now in pairs]
        n = max(len(pairs), 1)
        return cls(
            early.step,
            sum(before for before, _ in pairs) / n,
            sum(now for _, now in pairs) / n,
            len(pairs),
            sum(one > 0 for one in lost),
            sum(one < 0 for one in lost),
            sign_flip_bound(lost),
        )


class HeldOut:
    """The validations of a launch.

    Attributes:
        fall: to the last validation from the best before the last two, where both are below it by more than chance;
            else None.
    """

    def __init__(self) -> None:
        self.fall: Fall | None = None
        self._best: Validation | None = None
        self._last: deque[Validation] = deque(maxlen=2)
        self._earlier = 0  # validations that `_best` is the best of

    def add(self, step: int, rewards: Mapping[tuple[str, str], float]) -> None:
        """One validation's, at least one prompt; `step` optimizer steps were done."""
        if len(self._last) == 2:
            self._earlier += 1
            if self._best is None or self._last[0].mean > self._best.mean:
                self._best = self._last[0]
        self._last.append(Validation(step, rewards))
        self.fall = None
        if self._best is not None:
            level = _CHANCE / (self._earlier * (self._earlier + 1) / 2)
            fall = Fall.between(self._best, self._last[-1])
            if fall.p <= level and Fall.between(self._best, self._last[0]).p <= level:
                self.fall = fall
