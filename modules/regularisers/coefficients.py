"""Coefficients of regularisers that change in a run: by a schedule, or so that what the regulariser measures stays at a
target.

    model:
      regularisers:
        - name: entropy
          coef: {class_path: modules.regularisers.SteppedCoef, init_args: {target: 0.3}}
        - name: kl
          coef: {class_path: modules.regularisers.ProportionalCoef, init_args: {start: 0.05, target: 0.01}}
        - name: kl
          where: reward
          coef: {class_path: modules.regularisers.LinearCoef, init_args: {start: 0.05, end: 0.0, steps: 500}}

Promises: all tokens of an optimizer step weigh by one coefficient, the same on all ranks (in the reward: all of a
rollout batch); it changes after the step, by what was measured over all of it, and where nothing was (a step without
sequences) by no measurement of another's; checkpoints hold how far it is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from app import checks


@dataclass(frozen=True)
class CoefState:
    """How far a coefficient is.

    Attributes:
        value: what its rule works with.
        steps: optimizer steps that are done (in the reward: rollout batches).
        measured: mean over the trained tokens of the last of them that had any: of `entropy` the entropy, of all others
            the cost; None before the first.
    """

    value: float
    steps: int = 0
    measured: float | None = None


class Coef(ABC):
    """A rule of one's own is a class derived from this.

    Attributes:
        start: what it begins with, at least 0.
    """

    start: float

    def __repr__(self) -> str:
        """What checkpoints know it by: its class, and what it was made with."""
        options = (f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join(options)})"

    @abstractmethod
    def step(self, state: CoefState, bonus: bool) -> float:
        """The value after a step.

        Args:
            state: `value` before that step, `steps` with it, `measured` what it measured, None where it had no tokens.
            bonus: the regulariser raises what is measured, as entropy's does; all others make it small.
        """

    def applied(self, state: CoefState, bonus: bool) -> float:
        """What costs are multiplied by in the step after `state`, finite and at least 0."""
        return state.value


@dataclass(frozen=True)
class LinearCoef(Coef):
    """From `start` to `end` in `steps`, where it stays. Steps are the optimizer's; in the reward, rollout batches.

    Raises:
        ValueError: a number out of range.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _not_negative("LinearCoef", {"start": self.start, "end": self.end})
        checks.at_least(1, {"regularisers: coef: LinearCoef: steps": self.steps})
        if self.start == self.end:
            raise ValueError(f"regularisers: coef: LinearCoef: start and end are both {self.start}: write the number")

    def step(self, state: CoefState, bonus: bool) -> float:
        return self.start + (self.end - self.start) * min(1.0, state.steps / self.steps)

    def applied(self, state: CoefState, bonus: bool) -> float:
        return self.step(state, bonus)  # of a run that goes on with other steps, too


@dataclass(frozen=True)
class ProportionalCoef(Coef):
    """x (1 + gain x e) after every step, e = measured / target - 1 within -0.2 and 0.2: the adaptive coefficient of a
    KL divergence (Ziegler et al. 2019, section 2.2, whose gain is 0.1). For entropy, which is raised, -e.

    Args:
        start: what it begins with, above 0.
        target: what is held, in nats a token (of a cost of one's own: its unit), above 0.
        gain: share by which it moves at most, over 0.2. verl's `horizon` of h episodes is a gain of
            episodes a step / h.

    Raises:
        ValueError: a number out of range.
    """

    start: float
    target: float
    gain: float = 0.1

    def __post_init__(self) -> None:
        given = {"start": self.start, "target": self.target, "gain": self.gain}
        checks.positive({f"regularisers: coef: ProportionalCoef: {name}": value for name, value in given.items()})

    def step(self, state: CoefState, bonus: bool) -> float:
        if state.measured is None:
            return state.value
        off = max(-0.2, min(0.2, state.measured / self.target - 1.0))
        return state.value * (1.0 + self.gain * (-off if bonus else off))


@dataclass(frozen=True)
class SteppedCoef(Coef):
    """`delta` more after a step that missed the target, `delta` less after one that did not; applied after the former
    alone (Skywork-OR1, He et al. 2025, "adaptive entropy control"). Entropy misses it where it is at or below the
    target, costs where they are at or above.

    Args:
        target: nats a token (of a cost of one's own: its unit).
        start: what it begins with.
        delta: above 0. lowest, highest: its bounds.

    Raises:
        ValueError: a number out of range, or bounds that leave out the start or each other.
    """

    target: float
    start: float = 0.0
    delta: float = 0.005
    lowest: float = 0.0
    highest: float = 1.0

    def __post_init__(self) -> None:
        _not_negative("SteppedCoef", {"target": self.target, "start": self.start, "lowest": self.lowest})
        given = {"delta": self.delta, "highest": self.highest}
        checks.positive({f"regularisers: coef: SteppedCoef: {name}": value for name, value in given.items()})
        if not self.lowest <= self.start <= self.highest or self.lowest == self.highest:
            raise ValueError(
                f"regularisers: coef: SteppedCoef: start {self.start} must be within lowest {self.lowest} and highest"
                f" {self.highest}, and these must differ"
            )

    def step(self, state: CoefState, bonus: bool) -> float:
        if state.measured is None:
            return state.value
        return self._bounded(state.value + (self.delta if self._missed(state, bonus) else -self.delta))

    def applied(self, state: CoefState, bonus: bool) -> float:
        return self._bounded(state.value) if self._missed(state, bonus) else 0.0  # of a run that has other bounds, too

    def _bounded(self, value: float) -> float:
        return max(self.lowest, min(self.highest, value))

    def _missed(self, state: CoefState, bonus: bool) -> bool:
        if state.measured is None:
            return False
        return state.measured <= self.target if bonus else state.measured >= self.target


class Coefs:
    """The coefficients of an algorithm's regularisers, by the names under which these are logged.

    Args:
        given: numbers above 0, or rules.
        bonuses: names of those that raise what they measure.

    Raises:
        ValueError: neither, or a rule without a start.
    """

    def __init__(self, given: Mapping[str, float | Coef], bonuses: Collection[str] = ()) -> None:
        for name, coef in given.items():
            _check(name, coef)
        self._fixed = {name: coef for name, coef in given.items() if not isinstance(coef, Coef)}
        self._rules = {name: coef for name, coef in given.items() if isinstance(coef, Coef)}
        self._bonuses = bonuses
        starts = {name: getattr(rule, "start", None) for name, rule in self._rules.items()}
        self._states = {n: CoefState(_number(n, self._rules[n], start, 0)) for n, start in starts.items()}

    def __getitem__(self, name: str) -> float:
        """What costs of `name` are multiplied by in this step.

        Raises:
            ValueError: a rule gives no finite number of at least 0.
        """
        if name in self._fixed:
            return self._fixed[name]
        rule, state = self._rules[name], self._states[name]
        found = _number(name, rule, rule.applied(state, name in self._bonuses), state.steps)
        if found < 0:
            raise _no_number(name, rule, found, state.steps)
        return found

    @property
    def logged(self) -> dict[str, float]:
        """Those that change, by the names of metrics."""
        return {f"coef/{name}": self[name] for name in self._rules}

    def step(self, measured: Mapping[str, float | None]) -> None:
        """Ends the step of these names: `measured`, means over its trained tokens, None where it had none."""
        for name in measured.keys() & self._rules.keys():
            state, now = self._states[name], measured[name]
            known = now is not None and math.isfinite(now)
            rule, done = self._rules[name], replace(state, steps=state.steps + 1, measured=now if known else None)
            value = _number(name, rule, rule.step(done, name in self._bonuses), done.steps)
            self._states[name] = replace(done, value=value, measured=now if known else state.measured)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {name: {"rule": repr(self._rules[name]), **asdict(state)} for name, state in self._states.items()}

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Those that were of the same class go on where they were, others begin; which is told of all but rules with
        the same options."""
        for name in saved.keys() & self._rules.keys():
            state, now = dict(saved[name]), repr(self._rules[name])
            before, how = str(state.pop("rule")), "begins at"
            if before.partition("(")[0] == now.partition("(")[0]:
                self._states[name], how = CoefState(**state), "goes on from"
            if before != now:
                rank_zero_warn(
                    f"model.regularisers.{name}.coef was {before} and is {now}, which {how} {self[name]:g}; the"
                    f" checkpoint is after {state['steps']} steps"
                )


def _number(name: str, rule: Coef, given: Any, steps: int) -> float:
    """What a rule gives, as checkpoints can load it: numpy's numbers and tensors they cannot."""
    try:
        found = float(given)
    except (TypeError, ValueError):
        raise _no_number(name, rule, given, steps) from None
    if not math.isfinite(found):
        raise _no_number(name, rule, given, steps)
    return found


def _no_number(name: str, rule: Coef, given: Any, steps: int) -> ValueError:
    return ValueError(
        f"regularisers.{name}: coef: {type(rule).__name__} gives {given} after {steps} steps, must be finite and at"
        " least 0: mend its start, step or applied"
    )


def _check(name: str, coef: Any) -> None:
    if isinstance(coef, Coef):
        return
    if coef == 0:
        raise ValueError(f"regularisers.{name}: coef=0 has no effect; remove it or give it a weight")
    if isinstance(coef, bool) or not isinstance(coef, int | float) or not 0 < coef < math.inf:
        raise ValueError(
            f"regularisers.{name}: coef={coef!r} must be a finite number above 0: costs are made small (or a rule,"
            " modules/regularisers/coefficients.py)"
        )


def _not_negative(rule: str, options: Mapping[str, float]) -> None:
    for name, value in options.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"regularisers: coef: {rule}: {name}: {value}, must be finite and at least 0")
