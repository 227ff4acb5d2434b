"""What happens when training diverges: how many steps may be without effect, and which checkpoints are kept.

Promises: a gradient that is not finite costs its step; too many in a row end the run with the metrics that showed it
first, and with what made them so, as far as module and parameters tell. Where no step worked before, that is not called
a divergence. While the newest step had no effect, or a parameter is not finite, no checkpoint is written and none is
deleted: the last good one stays, whatever it is called, and costs at most what was trained since. No collectives: all
ranks know what is decided from, and decide alike.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_ABSURD = 1e12  # metrics beyond it are told beside those that are not finite: no reward or norm of use is so large
_FROM_THE_START = (  # no step has moved a weight, so no learning rate did this
    "Mend the weights that the run begins with, the dtype they run in, or what is named here, and begin again"
)
_LATER = "with a lower learning rate, trainer.gradient_clip_val, or rewards and coefficients within bounds"
_TOLD = 6  # metrics of each kind in the message


class Diverged(RuntimeError):
    """Training has no effect any more; the message says since when, what showed it first, and what can be done."""


class Divergence:
    """Steps without effect of one fit, and the checkpoints that wait for the next good one.

    Args:
        limit: steps in a row without effect that end the run.
        last_good: the checkpoint that the fit goes on from.

    Attributes:
        skipped: steps of this fit without effect.
        in_a_row: those since the last that had one.
        held_back: whether the last checkpoint that was asked for was not to be written.
        last_good: the newest checkpoint that was not in doubt.
    """

    def __init__(self, limit: int, last_good: Path | None = None) -> None:
        self.limit = limit
        self.skipped = self.in_a_row = 0
        self._since = 0
        self._worked = False
        self._shown: str | None = None
        self.last_good = last_good
        self.held_back = self._doubtful = False
        self._to_remove: list[Path] = []

    def begin_step(self, metrics: Callable[[], Mapping[str, Any]], module: Any = None) -> None:
        """Before a step: `metrics` are those of the last one, which was `module`'s. It may say what made them so, by
        `why_not_finite(values)`."""
        if self.in_a_row and self._shown is None:
            values = {name: float(value) for name, value in metrics().items()}
            why = getattr(module, "why_not_finite", lambda values: "")(values)
            self._shown = describe(values) + why
            if why:
                rank_zero_warn(f"step {self._since}:{why}")

    def worked(self) -> None:
        """The step's gradient is finite."""
        self.in_a_row, self._shown, self._worked = 0, None, True

    def failed(self, step: int, grad_norm: float, learning_rate: float, bad_parameter: str | None = None) -> None:
        """The gradient of step `step` is not finite. `bad_parameter`: what is wrong with one, if anything is.

        Raises:
            Diverged: as so many in a row before it.
        """
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row == 1:
            self._since = step
        if self.in_a_row >= self.limit:
            what, remedy = "no step could be trained", _FROM_THE_START
            if self._worked:
                again = "Begin again" if self.last_good is None else f"Go on from {self.last_good}"
                what, remedy = "training has diverged", f"{again} {_LATER}"
            raise Diverged(
                f"{what}: the gradients of {self.in_a_row} steps in a row (from step {self._since} on;"
                f" max_skipped_steps={self.limit}) were not finite, so nothing was trained. grad_norm={grad_norm},"
                f" learning rate={learning_rate:g}.{f' The {bad_parameter}.' if bad_parameter else ''}"
                f"{self._shown or ''} {remedy}"
            )
        rank_zero_warn(
            f"gradient norm is {grad_norm}: optimizer step skipped on all ranks ({self.skipped} so far,"
            f" {self.in_a_row} in a row of {self.limit}){f'; {bad_parameter}' if bad_parameter else ''}"
        )

    def holds_back(self, path: Path, bad_parameter: str | None, forced: bool = False) -> bool:
        """Whether a checkpoint is not to be written, which is then said.

        Args:
            bad_parameter: what is wrong with a parameter, if anything is.
            forced: it is written all the same.
        """
        reason = bad_parameter or ("the last step had no effect" if self.in_a_row else None)
        self._doubtful = reason is not None
        if self._doubtful:
            kept = f"{self.last_good} stays" if self.last_good is not None else "there is none before it"
            state = "is written, but" if forced else "is not written:"
            rank_zero_warn(f"checkpoint {path} {state} {reason}, training may have diverged; {kept}")
        self.held_back = self._doubtful and not forced
        return self.held_back

    def link(self, path: Path) -> None:
        """Instead of one that was held back, for callbacks that point to it next: a link to the last good one."""
        if self.last_good is not None and not os.path.lexists(path):
            path.symlink_to(os.path.relpath(self.last_good, path.parent))

    def written(self, path: Path) -> list[Path]:
        """A checkpoint was begun. Returns those whose deletion waited for a good one."""
        if self._doubtful:
            return []
        self.last_good = path
        due, self._to_remove = [old for old in self._to_remove if old != path], []
        return due

    def keeps(self, path: Path) -> bool:
        """Whether a checkpoint that is to be deleted stays until the next good one, for which it waits."""
        if self._doubtful:
            self._to_remove.append(path)
        return self._doubtful


def describe(metrics: Mapping[str, Any]) -> str:
    """Which metrics are not finite, and which are absurdly large; a sentence, or "" where none is."""
    values = {name: float(value) for name, value in metrics.items()}
    wrong = [f"{name}={value}" for name, value in sorted(values.items()) if not math.isfinite(value)]
    large = [f"{name}={value:.3g}" for name, value in sorted(values.items()) if _ABSURD < abs(value) < math.inf]
    parts = []
    if wrong:
        parts.append(f"not finite: {_few(wrong)}")
    if large:
        parts.append(f"very large: {_few(large)}")
    return f" In the first of them {'; '.join(parts)}." if parts else ""


def _few(texts: list[str]) -> str:
    more = f" and {len(texts) - _TOLD} more" if len(texts) > _TOLD else ""
    return ", ".join(texts[:_TOLD]) + more
