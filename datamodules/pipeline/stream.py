"""The rollout stream's books: which prompt is where, from its admission to the trainer. No thread and no clock.

    prompts given back, else the next of the source -> running -> ready -> taken by the trainer
                     ^                                   |         |
                     '------ re-queued, restored --------'         '-> dropped as stale
                                                         '-> dropped: failed, filtered, skipped, at rest

With over-sampling, what is slow is given up as surplus again and again, and would soon fill all spare places. So a
prompt that was given up four times waits; once there is a batch of such prompts, they are played beside each other and
to the end, whatever finishes meanwhile (the long rounds of Gao et al. 2025, "RollPacker"). None is given up for ever,
and batches between long rounds are as short as ever.

Promises: a prompt's group and its place in the gate's books move under one lock, so that `state_dict` taken at any
moment misses no prompt and holds none twice, and `check` can account for every one; what a move says about a group
that was given up meanwhile is ignored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from datamodules.groups import Group, pack, unpack
from datamodules.pending import LastArrival, Pending
from datamodules.pipeline.gate import StalenessGate, unaccounted
from datamodules.pipeline.rest import Rest
from datamodules.pipeline.tally import Tally

_log = logging.getLogger(__name__)
_TRIES = 4
"""Times that a prompt is given up as surplus before it waits for others of its kind."""


class Stream:
    """The books of one stream.

    Args:
        gate: decides how far to run ahead.
        group_size: samples of each prompt.
        solved_at: reward from which an episode counts as solved, in the tally.
        rest: turns in a row that a prompt sits out at most, whose groups are filtered out.

    Attributes:
        tally: what finished groups were worth; see there.
        changed: guards everything here; notified when a group is ready.
        arrivals: when something last arrived.
        taken: the groups the trainer took last, until they are `released`.
    """

    def __init__(self, gate: StalenessGate, group_size: int, solved_at: float = 1.0, rest: int = 0) -> None:
        self.gate = gate
        self.tally = Tally(solved_at)
        self._rest = Rest(rest)
        self.changed = threading.Condition()
        self.arrivals = LastArrival()
        self._group_size = group_size
        self._position = 0  # next index of the source
        self._again: dict[int, tuple[int, int]] = {}  # index: attempts and stalls, of prompts to be played again
        self._long: set[int] = set()  # of those, to be played to the end
        self._running: dict[int, Pending] = {}
        self._ready: list[Group] = []
        self.taken: list[Group] = []

    def worth(self) -> dict[str, float]:
        """What the groups were worth that finished since this was last asked; see `Tally.take`."""
        with self.changed:
            return self.tally.take()

    # ---- the producer's moves

    def admit(self) -> Pending | None:
        """The next prompt to play, those given back first, but for the slow ones among them, which wait until there is
        a batch of them; None where the gate has no place."""
        with self.changed:
            slow = {index for index, (attempt, stalls) in self._again.items() if attempt - stalls >= _TRIES}
            if len(slow - self._long) >= self.gate.batch_size:
                self._long |= slow
            admitted_at = self.gate.admit(keep=True) if self._long else None
            kept = admitted_at is not None
            if admitted_at is None:
                admitted_at = self.gate.admit()
            if admitted_at is None:
                return None
            if candidates := self._long if kept else self._again.keys() - slow:
                index = min(candidates)
                attempt, stalls = self._again.pop(index)
                self._long.discard(index)
            else:
                index, attempt, stalls = self._position, 0, 0
                self._position += 1
            pending = Pending(
                arrivals=self.arrivals,
                index=index,
                admitted_at=admitted_at,
                samples=self._group_size,
                attempt=attempt,
                stalls=stalls,
                kept=kept,
            )
            self._running[index] = pending
            return pending

    def finish(self, pending: Pending, group: Group) -> list[Pending]:
        """Its group is complete.

        Returns:
            The surplus: with this group the bound is full, so these prompts were given back, and whoever plays them
            is to stop. Empty without over-sampling.
        """
        with self.changed:
            if not self._end(pending):
                return []
            self._ready.append(group)
            self._rest.kept(group.prompt_id)
            self.gate.finish()
            surplus = [one for one in self._running.values() if not one.kept] if self.gate.is_full() else []
            self.requeue(surplus)
            self._ended(group)
            self.changed.notify_all()
            return surplus

    def fail(self, pending: Pending, placeholder: bool = False) -> bool:
        """Its group failed; `placeholder`: a reply had one of a picture. False when it had been given up before."""
        with self.changed:
            dropped = self._drop(pending, "failed")
            self.tally.placeholders_sampled += dropped and placeholder
            return dropped

    def filter(self, pending: Pending, group: Group) -> bool:
        """Its group was complete and filtered out. False when it had been given up before."""
        with self.changed:
            dropped = self._drop(pending, "filtered")
            if dropped:
                self._rest.filtered(group.prompt_id)
                self._ended(group)
            return dropped

    def at_rest(self, pending: Pending, prompt_id: str) -> bool:
        """Whether the prompt sits out this turn, with which its group comes to nothing."""
        with self.changed:
            return (
                pending is self._running.get(pending.index)
                and self._rest.passes(prompt_id)
                and self._drop(pending, "rested")
            )

    def skip(self, pending: Pending) -> bool:
        """Its prompt cannot be played. False when it had been given up before."""
        return self._drop(pending, "skipped")

    def requeue(self, given_up: Iterable[Pending], stalled: bool = False) -> None:
        """These prompts are played again, before any new one. `stalled`: it is counted against them."""
        with self.changed:
            for pending in given_up:
                if self._end(pending):
                    self._again[pending.index] = (pending.attempt + 1, pending.stalls + stalled)
                    self.gate.drop("requeued")

    def running(self) -> list[Pending]:
        """What is being played; without the lock, so that it can be asked for in a run that hangs."""
        return list(self._running.values())

    # ---- the trainer's moves

    def take(self, count: int) -> list[Group] | None:
        """The `count` oldest of the finished groups, in prompt order; None while there are fewer.

        Drops those too old to be trained on first.
        """
        with self.changed:
            self._drop_stale()
            if len(self._ready) < count:
                return None
            self._ready.sort(key=lambda group: group.index)
            self.taken, self._ready = self._ready[:count], self._ready[count:]
            self.gate.collect(count)
            return self.taken

    def release(self) -> None:
        """The groups taken last are trained on, or never will be."""
        with self.changed:
            self.taken = []

    def renew(self) -> None:
        """A version has passed without new weights: no group is older for it."""
        with self.changed:
            for pending in self._running.values():
                pending.admitted_at = self.gate.version
            self._ready = [replace(group, admitted_at=self.gate.version) for group in self._ready]

    @property
    def ready(self) -> int:
        """Finished groups that wait for the trainer."""
        return len(self._ready)

    # ---- state

    def state_dict(self, in_training: Sequence[Group] = (), under_way: Sequence[Group] = ()) -> dict[str, Any]:
        """Next index, unfinished indices, finished groups, counters and what is tallied since it was last asked for, as
        primitives and tensors.

        Args:
            in_training: taken groups that are not yet trained on; saved as if they had not been taken.
            under_way: taken groups that are trained on in part; saved as taken, with the version they train.
        """
        with self.changed:
            ready = [*in_training, *self._ready]
            state = {
                "position": self._position,
                "unfinished": sorted([*self._again, *self._running]),
                "counters": self.gate.counters(),
                "tally": self.tally.state_dict(),
                "rest": self._rest.state_dict(),
            }
            if under_way:
                state |= {"version": self.gate.version, "under_way": pack(list(under_way))}
        return {**state, "ready": pack(sorted(ready, key=lambda group: group.index))}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        """Begins at policy `version`, or goes on from `state`.

        Finished groups that newer weights made, or of another group size, are played again; groups that were under way
        are taken again at the version they train, and finished groups at another.
        """
        groups, taken = unpack(state.get("ready", {})), unpack(state.get("under_way", {}))
        if state.get("version") != version:
            groups, taken = taken + groups, []
        kept = [group for group in groups if group.admitted_at <= version and self._is_whole(group)]
        lost = [group.index for group in groups if group not in kept]
        counters = dict(state.get("counters", {}))
        if lost:
            counters["accepted"] -= len(lost)
        with self.changed:
            self._position = state.get("position", 0)
            self._again = {index: (0, 0) for index in [*state.get("unfinished", []), *lost]}
            self._running, self._long = {}, set()
            self._ready, self.taken = kept, taken
            self.tally.load_state_dict(state.get("tally", {}))
            self._rest.load_state_dict(state.get("rest", {}))
            self.gate.open(version, queued=len(kept), counters=counters, under_way=bool(taken))

    def check(self) -> None:
        """Raises RuntimeError unless every prompt dealt so far is in exactly one place, and the gate agrees."""
        with self.changed:
            counters = self.gate.counters()
            places = [*self._again, *self._running, *(group.index for group in self._ready)]
            left = sum(
                counters[name]
                for name in ("trained", "dropped_stale", "dropped_filtered", "failed", "skipped", "rested")
            )
            held = (counters["running"], counters["queued"]) == (len(self._running), len(self._ready))
            balanced = self._position == left + len(places) and unaccounted(counters) == 0
            if not (held and balanced and len(set(places)) == len(places)):
                raise RuntimeError(
                    f"the rollout stream's books do not balance: {self._position} prompts dealt, {len(self._again)} to"
                    f" be played again, {len(self._running)} running, {len(self._ready)} ready; gate: {counters}"
                )

    # ---- inside

    def _ended(self, group: Group) -> None:
        """Counts what its episodes were, whether it is kept or filtered out: a filter leaves out just those that a run
        is to hear of."""
        self.gate.truncate(len({one.episode_id for one in group.trajectories if one.finish_reason == "length"}))
        self.tally.finished(group)

    def _end(self, pending: Pending) -> bool:
        if self._running.get(pending.index) is not pending:
            return False
        del self._running[pending.index]
        if pending.kept:
            self.gate.let_go()
        return True

    def _drop(self, pending: Pending, reason: Any) -> bool:
        with self.changed:
            if not self._end(pending):
                return False
            self.gate.drop(reason)
            return True

    def _is_whole(self, group: Group) -> bool:
        return len({one.episode_id for one in group.trajectories}) == self._group_size

    def _drop_stale(self) -> None:
        stale = [group for group in self._ready if self.gate.is_stale(group.admitted_at)]
        if stale:
            self._ready = [group for group in self._ready if not self.gate.is_stale(group.admitted_at)]
            self.gate.drop_stale(len(stale))
            for group in stale:
                self.tally.stale(group)
            names = ", ".join(f"'{group.prompt_id}' (version {group.admitted_at})" for group in stale[:5])
            _log.info("%d groups dropped as stale at version %d: %s", len(stale), self.gate.version, names)


def to_play_again(state: dict[str, Any]) -> dict[str, Any]:
    """`state` of a stream with its finished groups among those to be played: what older weights sampled is of use to
    training alone."""
    groups = [group for key in ("ready", "under_way") for group in unpack(state.get(key, {}))]
    counters = dict(state.get("counters", {}))
    if groups:
        counters["accepted"] -= len(groups)
    unfinished = sorted([*state.get("unfinished", []), *(group.index for group in groups)])
    kept = {key: value for key, value in state.items() if key not in ("ready", "under_way", "version")}
    return {**kept, "unfinished": unfinished, "counters": counters}
