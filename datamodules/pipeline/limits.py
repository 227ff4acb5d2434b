"""What bounds a run of `RolloutDataModule`: the nested `data.limits` of a config, and the count of groups in vain.

Promises: no wait without an end and no silent endless loop. Groups that fail, are filtered out or skipped one after the
other have a bound each; past it the error says how many, of which kind, the last one's reason and the option to look
at. What fails in the same way from the first group on is not tried to that bound. Groups that failed are logged with
their reason, which is said again only as often as its count doubles; filtered ones with their count.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Literal, get_args

from app import checks

_log = logging.getLogger(__name__)
_MAX_FILTERED = 1000
_MOST_REST = 1000  # where everything rests, all prompts so often are dealt for nothing, and none is played meanwhile
_MAX_ALIKE = 8  # groups that fail in one way before any has come through
_VARIES = re.compile(r"\S*/\S+|[0-9a-f]{12,}")  # paths and ids, in what fails in the same way
_MAX_SKIPPED = 10_000  # prompts too long in a row; they cost no generation
MOST_EPISODES = 1_000_000
"""In one batch; each is a task, and memory, from its first request on."""
LongPrompts = Literal["error", "skip"]


@dataclass(frozen=True)
class Limits:
    """How long to wait, how often to fail, and how much at once.

    Attributes:
        episode_deadline_s: seconds one episode may take; then its group is dropped.
        collect_deadline_s: seconds the trainer waits for a batch, or for validation, before it stops with an error.
        max_failures: groups dropped in a row that stop the run, once it is saved; 8 do, where none has come through
            before them and all of them failed with the same words, but for deadlines. A run that goes on counts anew.
        max_filtered: groups filtered out since the last one kept that stop the run; None for 1000. With `filter` only.
        rest: turns in a row that a prompt sits out at most, counted as `rested`: after a group of it that was filtered
            out one, after a second in a row three, then seven and so on; a group that is kept ends that. 7 plays what
            is always solved, or never, once in eight times; None: no rest. Of prompts that come again, with `filter`.
        max_concurrent: most groups played at once; None for all that may be.
        long_prompts: "error" refuses prompts that leave no room for a reply in the model's context; "skip" leaves
            them out, with a logged count.

    Raises:
        ValueError: an option out of range, an episode's deadline beyond the trainer's.
    """

    episode_deadline_s: float = 300.0
    collect_deadline_s: float = 900.0
    max_failures: int = 32
    max_filtered: int | None = None
    rest: int | None = None
    max_concurrent: int | None = None
    long_prompts: LongPrompts = "error"

    def __post_init__(self) -> None:
        deadlines = {"episode_deadline_s": self.episode_deadline_s, "collect_deadline_s": self.collect_deadline_s}
        checks.deadline({f"limits.{name}": seconds for name, seconds in deadlines.items()})
        if self.episode_deadline_s > max(self.collect_deadline_s, Limits.episode_deadline_s):  # so it was set
            raise ValueError(
                f"limits.episode_deadline_s: {self.episode_deadline_s:g} has no effect beyond"
                f" limits.collect_deadline_s of {self.collect_deadline_s:g}, after which the trainer waits no longer;"
                " raise that too"
            )
        checks.at_least(1, {"limits.max_failures": self.max_failures, "limits.max_filtered": self.max_filtered})
        checks.at_least(1, {"limits.rest": self.rest})
        checks.at_most(_MOST_REST, {"limits.rest": self.rest})
        checks.at_least(1, {"limits.max_concurrent": self.max_concurrent})
        checks.at_most(MOST_EPISODES, {"limits.max_concurrent": self.max_concurrent})
        checks.one_of("limits.long_prompts", self.long_prompts, get_args(LongPrompts))


class RolloutsFailed(RuntimeError):
    """No group comes through any more; the message says how many were dropped and why the last one was."""


class FailureLimits:
    """Counts the groups in vain since the last one that came through, against `limits`."""

    def __init__(self, limits: Limits) -> None:
        self._max_failures = limits.max_failures
        self._max_filtered = limits.max_filtered or _MAX_FILTERED
        self._failed = self._filtered = self._skipped = 0
        self._words, self._alike = "", 0  # of the last one that failed, and how often in a row
        self._worked = False

    def came_through(self) -> None:
        """A group came through."""
        self._failed = self._filtered = self._skipped = self._alike = 0
        self._worked = True

    def failed(self, prompt_id: str, reason: str, late: bool = False) -> RolloutsFailed | None:
        """A group failed; the error to stop with, if that was one too many in a row.

        Args:
            prompt_id: of the group.
            reason: of the failure. What stands behind a semicolon is a detail.
            late: a deadline passed, which may have another cause each time.
        """
        self._failed += 1
        words = _VARIES.sub("", reason.replace(prompt_id, "").partition(";")[0])
        self._alike = self._alike + 1 if words == self._words and self._alike else 1
        self._words = words
        if self._alike == 1:
            _log.warning("group dropped, prompt '%s': %s", prompt_id, reason)
        else:
            level = logging.INFO if self._alike & (self._alike - 1) else logging.WARNING  # as its count doubles
            _log.log(level, "group dropped, prompt '%s': the same, %d in a row", prompt_id, self._alike)
        if self._failed >= self._max_failures:
            return RolloutsFailed(
                f"{self._failed} groups in a row (limits.max_failures) were dropped, the last one of prompt"
                f" '{prompt_id}': {reason}"
            )
        if self._worked or late or self._alike < _MAX_ALIKE or self._alike < self._failed:
            return None
        return RolloutsFailed(
            f"the first {self._alike} groups were dropped, all in the same way, the last one of prompt"
            f" '{prompt_id}': {reason}"
        )

    def filtered(self, prompt_id: str, reason: str) -> RolloutsFailed | None:
        """A group was filtered out; the error to stop with, if that was one too many, whatever failed in between."""
        self._failed = self._alike = 0  # it was played to its end
        self._worked = True
        self._filtered += 1
        _log.info("group filtered out, prompt '%s': %s (%d since the last one kept)", prompt_id, reason, self._filtered)
        if self._filtered < self._max_filtered:
            return None
        return RolloutsFailed(
            f"{self._filtered} groups in a row (limits.max_filtered) were filtered out, the last one of prompt"
            f" '{prompt_id}': {reason}; nothing is left to train on: look at the reward and at how hard the prompts"
            " are, or change filter"
        )

    def skipped(self) -> RolloutsFailed | None:
        """A prompt was skipped; the error to stop with, if that was one too many in a row."""
        self._skipped += 1
        if self._skipped < _MAX_SKIPPED:
            return None
        return RolloutsFailed(
            f"{self._skipped} prompts in a row were too long for the model's context and skipped (limits.long_prompts:"
            " skip); shorten them, lower max_new_tokens, or use a model with a longer context"
        )
