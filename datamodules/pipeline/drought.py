"""When rollouts bring nothing any more: groups that fail, are filtered out or skipped, one after the other.

Promises: no silent endless loop. Each kind has a bound; past it the error says how many, of which kind, the last
one's reason and the option to look at. Filtered groups are logged with their count.
"""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)
_MAX_SKIPPED = 10_000  # prompts too long in a row; they cost no generation


class RolloutsFailed(RuntimeError):
    """No group comes through any more; the message says how many were dropped and why the last one was."""


class Drought:
    """Counts since the last group that came through.

    Args:
        max_failures: groups that fail in a row.
        max_filtered: groups filtered out since the last good one, whatever failed in between.
    """

    def __init__(self, max_failures: int, max_filtered: int) -> None:
        self._max_failures = max_failures
        self._max_filtered = max_filtered
        self._failed = self._filtered = self._skipped = 0

    def ended(self) -> None:
        """A group came through."""
        self._failed = self._filtered = self._skipped = 0

    def failed(self, prompt_id: str, reason: str) -> RolloutsFailed | None:
        """A group failed; the error to stop with, if that was one too many."""
        self._failed += 1
        if self._failed < self._max_failures:
            return None
        return RolloutsFailed(
            f"{self._failed} groups in a row (max_failures) were dropped, the last one of prompt"
            f" '{prompt_id}': {reason}"
        )

    def filtered(self, prompt_id: str, reason: str) -> RolloutsFailed | None:
        """A group was filtered out; the error to stop with, if that was one too many."""
        self._failed = 0  # it was played to its end
        self._filtered += 1
        _log.info("group filtered out, prompt '%s': %s (%d since the last one kept)", prompt_id, reason, self._filtered)
        if self._filtered < self._max_filtered:
            return None
        return RolloutsFailed(
            f"{self._filtered} groups in a row (max_filtered) were filtered out, the last one of prompt '{prompt_id}':"
            f" {reason}; nothing is left to train on: look at the reward and at how hard the prompts are, or change"
            " filter"
        )

    def skipped(self) -> RolloutsFailed | None:
        """A prompt was skipped; the error to stop with, if that was one too many."""
        self._skipped += 1
        if self._skipped < _MAX_SKIPPED:
            return None
        return RolloutsFailed(
            f"{self._skipped} prompts in a row were too long for the model's context and skipped (long_prompts: skip);"
            " shorten them, lower max_new_tokens, or use a model with a longer context"
        )
