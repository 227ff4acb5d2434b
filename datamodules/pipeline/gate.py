"""The staleness gate: how far rollouts may run ahead of the policy. Pure bookkeeping, no clock, no I/O.

The unit is the group (all samples of one prompt). With at most `max_staleness` versions between a group's admission
and its training, the first `(max_staleness + version + 1) * batch_size` groups may exist at `version`, so that

    admit while (max_staleness + version + 1) * batch_size - (accepted + running) > 0  and  running < max_concurrent.

Over-sampling lets a fixed number of groups more run (`spare`); as soon as enough are finished, `is_full` says that
all others are surplus, so that `accepted` never exceeds the bound either way. Groups that are admitted to be kept are
never surplus: they get no place among the spare ones, and theirs is free for nobody else.

Promises: thread-safe; a group that is dropped, for whatever reason, gives its place back (otherwise the gate
starves); a move the books cannot explain raises instead of bending the counters; at any moment, after a resume too,

    admitted = trained + queued + running + dropped_stale + dropped_filtered + failed + skipped + rested + requeued.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Literal

from app import checks

Drop = Literal["failed", "filtered", "skipped", "rested", "requeued"]

_DROPS: dict[Drop, str] = {
    "failed": "failed",
    "filtered": "dropped_filtered",
    "skipped": "skipped",
    "rested": "rested",
    "requeued": "requeued",
}
_LEFT = ("dropped_stale", *_DROPS.values())  # where a group can end besides training
_KEPT = ("accepted", *_LEFT, "truncated")


def unaccounted(counters: Mapping[str, int]) -> int:
    """Groups admitted that `counters` (of a gate, a checkpoint or a log) have lost sight of: 0, or there is a bug."""
    known = counters["trained"] + counters["queued"] + counters["running"]
    return counters["admitted"] - known - sum(counters.get(name, 0) for name in _LEFT)  # older ones have not all


class StalenessGate:
    """Counts groups from admission to training.

    A group is `running` from `admit` to `finish`, `queued` from `finish` to `collect`, and stays in `accepted`
    from `finish` on, unless it is dropped.

    Args:
        batch_size: groups one policy version is trained on, at least 1.
        max_staleness: most versions between admission and training; 0 is synchronous.
        max_concurrent: most groups running at once; None for as many as the bound allows.
        over_sampling: groups started for each group of a batch, at least 1.0; 1.5 starts half a batch more than is
            needed (rounded up).
    """

    def __init__(
        self, batch_size: int, max_staleness: int, max_concurrent: int | None = None, over_sampling: float = 1.0
    ) -> None:
        checks.at_least(1, {"batch_size": batch_size, "max_concurrent": max_concurrent})
        checks.at_least(0, {"max_staleness": max_staleness})
        checks.at_least(1.0, {"over_sampling": over_sampling})
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.spare = math.ceil((over_sampling - 1.0) * batch_size - 1e-9)
        self.max_concurrent = max_concurrent or (max_staleness + 1) * batch_size + self.spare
        self._lock = threading.Lock()
        self._version = self._kept = 0
        self._trained_elsewhere = 0  # groups the versions so far were trained on that `accepted` does not count
        self._counts = dict.fromkeys(("admitted", "running", "queued", *_KEPT), 0)

    @property
    def version(self) -> int:
        """Policy version of the newest weights."""
        return self._version

    def admit(self, keep: bool = False) -> int | None:
        """Starts a group, if there is a place for one: the version it is admitted at, or None. `keep`: one that is not
        given up as surplus; whoever ends it says so by `let_go`, first."""
        with self._lock:
            if self._room(0 if keep else self.spare) <= 0:
                return None
            self._counts["admitted"] += 1
            self._counts["running"] += 1
            self._kept += keep
            return self._version

    def let_go(self) -> None:
        """A group that was admitted to be kept ends, however it does."""
        with self._lock:
            if self._kept < 1:
                raise RuntimeError("StalenessGate: a group that is kept ends, and none is")
            self._kept -= 1

    def room(self) -> int:
        """Groups that may be admitted now, at least 0."""
        with self._lock:
            return max(0, self._room(self.spare))

    def is_full(self) -> bool:
        """True when finished groups and those that are kept fill the bound: what else runs is surplus, to be given up
        by `drop`."""
        with self._lock:
            return self._left() <= self._kept

    def finish(self) -> None:
        """A running group is complete and waits for the trainer."""
        with self._lock:
            self._take("running", 1)
            self._counts["accepted"] += 1
            self._counts["queued"] += 1

    def drop(self, reason: Drop, count: int = 1) -> None:
        """Running groups come to nothing: their places are free again.

        Args:
            reason: "failed"; "filtered"; "skipped", the prompt cannot be played at all; "rested", it sits out this
                turn; "requeued", cancelled, the prompt being played again later (which counts as another admission).
            count: how many.
        """
        with self._lock:
            self._take("running", count)
            self._counts[_DROPS[reason]] += count

    def is_stale(self, admitted_at: int) -> bool:
        """True when a group admitted at that version is too old to be trained on now."""
        return self._version - admitted_at > self.max_staleness

    def drop_stale(self, count: int = 1) -> None:
        """Queued groups grew too old: they leave `accepted` again."""
        with self._lock:
            self._take("queued", count)
            self._counts["accepted"] -= count
            self._counts["dropped_stale"] += count

    def collect(self, count: int) -> None:
        """Queued groups go to the trainer."""
        with self._lock:
            self._take("queued", count)

    def truncate(self, count: int) -> None:
        """Counts episodes that ended at their token limit, of groups that are filtered out too."""
        with self._lock:
            self._counts["truncated"] += count

    def publish(self, version: int) -> None:
        """New weights serve from now on. Raises ValueError when the version falls."""
        with self._lock:
            if version < self._version:
                raise ValueError(f"StalenessGate.publish: version {version} after {self._version}; versions never fall")
            self._version = version

    def open(
        self,
        version: int,
        queued: int = 0,
        counters: Mapping[str, int] | None = None,
        under_way: bool = False,
    ) -> None:
        """Sets the books for a stream that starts, or goes on, at `version` with `queued` finished groups.

        `version * batch_size` groups count as trained, whoever trained them, and those of a batch under way: a policy
        that starts at version 100 has no 100 batches of credit, and a batch lost with a crash leaves no hole that would
        starve the gate. Groups that ran when the counters were taken count as never admitted; they will be when they
        are played again.

        Args:
            version: of the weights that serve now.
            queued: finished groups restored with the stream.
            counters: as `counters()` gave them, to count on from there.
            under_way: whether the batch that takes the policy to the next version is with the trainer already.
        """
        with self._lock:
            counts = dict.fromkeys(self._counts, 0)
            for name in _KEPT:
                counts[name] = (counters or {}).get(name, 0)
            counts["queued"] = queued
            counts["accepted"] = max(counts["accepted"], queued)
            counts["admitted"] = counts["accepted"] + sum(counts[name] for name in _LEFT)
            self._counts = counts
            self._version, self._kept = version, 0
            self._trained_elsewhere = (version + under_way) * self.batch_size - (counts["accepted"] - queued)

    def counters(self) -> dict[str, int]:
        """Groups admitted, running, queued, accepted (trained or queued), trained (handed to the trainer),
        dropped_stale, dropped_filtered, failed, skipped, rested, requeued; episodes truncated."""
        with self._lock:
            return {**self._counts, "trained": self._counts["accepted"] - self._counts["queued"]}

    def _left(self) -> int:
        allowed = (self.max_staleness + self._version + 1) * self.batch_size
        return allowed - self._counts["accepted"] - self._trained_elsewhere

    def _room(self, spare: int) -> int:
        running, left = self._counts["running"], self._left()
        if left <= self._kept:
            return 0
        return min(left + spare - running, self.max_concurrent - running)

    def _take(self, name: str, count: int) -> None:
        if self._counts[name] < count:
            raise RuntimeError(f"StalenessGate: {count} groups cannot leave '{name}', which holds {self._counts[name]}")
        self._counts[name] -= count
