"""A producer and a trainer around the real books (`Stream` and its gate), moved by random events, without a clock.

Every event is checked: concurrency, the staleness bound of what is trained and of what exists, groups whole, every
prompt in exactly one place. What was trained is remembered by prompt, so that a resume that loses or repeats one shows.
"""

from __future__ import annotations

import random
from typing import Any

from app.batch import Trajectory
from datamodules.groups import Group, label
from datamodules.pending import Pending
from datamodules.pipeline.gate import StalenessGate, unaccounted
from datamodules.pipeline.stream import Stream

SAMPLES = 2
EVENTS = {
    "admit": 30.0,
    "finish": 24.0,
    "train": 8.0,
    "failed": 1.0,
    "filtered": 2.0,
    "skipped": 0.3,
    "stall": 0.1,
    "checkpoint": 0.5,
    "crash": 0.2,
}


def name_of(pending: Pending) -> str:
    """Of a prompt that comes again."""
    return f"p{pending.index % 20}"


def group_of(pending: Pending) -> Group:
    def episode(sample: int) -> list[Trajectory]:
        one = Trajectory([1, 2], [False, True], [0.0, -1.0], [-1, pending.admitted_at], 1.0, 0, 0)  # type: ignore[arg-type]
        one.finish_reason = "length" if (pending.index + sample) % 3 == 0 else "stop"
        return label([one], pending.index, sample, SAMPLES)

    episodes = [one for sample in range(SAMPLES) for one in episode(sample)]
    return Group(pending.index, name_of(pending), pending.admitted_at, episodes)


class Simulation:
    """One run: `step` makes a random event, `finish_a_batch` shows that progress is possible from here."""

    def __init__(self, rng: random.Random, *gate: Any) -> None:
        self.rng = rng
        self.gate_options = gate
        self.begin(0, {})
        self.ever = dict.fromkeys(EVENTS, 0) | {"surplus": 0, "stale": 0, "trained": 0, "oldest": 0, "rested": 0}
        self.trained: dict[int, int] = {}  # prompt -> version it was trained at
        self.lost: set[int] = set()  # prompts dropped for good
        self.saved: tuple[Any, ...] = self.checkpoint()

    def _filter(self, pending: Pending) -> bool:
        return self.stream.filter(pending, group_of(pending))

    def begin(self, version: int, state: dict[str, Any]) -> None:
        self.gate = StalenessGate(*self.gate_options)
        self.stream = Stream(self.gate, SAMPLES, rest=3)
        self.stream.restore(version, state)
        self.playing: list[Pending] = []  # including those given up, whose end comes late
        self.slow: set[int] = set()

    def checkpoint(self) -> tuple[Any, ...]:
        return self.gate.version, self.stream.state_dict(), dict(self.trained), set(self.lost)

    def step(self) -> None:
        names = list(EVENTS)
        event = self.rng.choices(names, [EVENTS[name] for name in names])[0]
        if self.act(event):
            self.ever[event] += 1
        self.check()

    def act(self, event: str) -> bool:
        match event:
            case "admit":
                return self.admit()
            case "finish":
                return self.finish()
            case "train":
                return self.train()
            case "failed" | "filtered" | "skipped":
                return self.drop(event)
            case "stall":
                running = self.stream.running()
                self.stream.requeue(running, stalled=True)
                return bool(running)
            case "checkpoint":
                self.saved = self.checkpoint()
                return True
        version, state, self.trained, self.lost = (*self.saved[:2], dict(self.saved[2]), set(self.saved[3]))
        self.begin(version, state)  # all since the checkpoint is gone, weights included
        return True

    def admit(self) -> bool:
        pending = self.stream.admit()
        if pending is None:
            return False
        assert pending.index not in self.trained and pending.index not in self.lost
        if self.stream.at_rest(pending, name_of(pending)):
            self.lost.add(pending.index)
            self.ever["rested"] += 1
            return True
        if self.rng.random() < 0.1:
            self.slow.add(pending.index)  # is chosen to finish much more rarely
        self.playing.append(pending)
        return True

    def pick(self) -> Pending | None:
        if not self.playing:
            return None
        for _ in range(5):
            at = self.rng.randrange(len(self.playing))
            if self.playing[at].index not in self.slow:
                break
        return self.playing.pop(at)

    def finish(self) -> bool:
        pending = self.pick()
        if pending is None:
            return False
        counts = self.stream._running.get(pending.index) is pending  # else it was given up, and ends too late
        before = self.stream.ready
        surplus = self.stream.finish(pending, group_of(pending))
        assert self.stream.ready == before + counts
        self.ever["surplus"] += len(surplus)
        assert self.gate.spare or not surplus
        return True

    def drop(self, how: str) -> bool:
        pending = self.pick()
        if pending is None:
            return False
        move = {"failed": self.stream.fail, "filtered": self._filter, "skipped": self.stream.skip}[how]
        if move(pending):
            self.lost.add(pending.index)
            return True
        return False

    def train(self) -> bool:
        ready = {group.index for group in self.stream._ready}
        groups = self.stream.take(self.gate.batch_size)
        stale = ready - {group.index for group in self.stream._ready} - {group.index for group in groups or ()}
        self.lost |= stale
        self.ever["stale"] += len(stale)
        if groups is None:
            return False
        assert [group.index for group in groups] == sorted(group.index for group in groups)
        for group in groups:
            assert len(group.trajectories) == SAMPLES and group.index not in self.trained
            age = self.gate.version - group.admitted_at
            assert age <= self.gate.max_staleness
            self.ever["oldest"] = max(self.ever["oldest"], age)
            self.trained[group.index] = self.gate.version
        self.ever["trained"] += len(groups)
        self.gate.publish(self.gate.version + 1)
        return True

    def check(self) -> None:
        self.stream.check()
        counters, gate = self.gate.counters(), self.gate
        assert unaccounted(counters) == 0
        assert counters["running"] <= gate.max_concurrent
        # The bound: what is finished fits into the versions to come, what runs exceeds it by the spare groups only.
        ahead = (gate.max_staleness + 1) * gate.batch_size
        assert counters["queued"] <= ahead
        assert counters["queued"] + counters["running"] <= ahead + gate.spare
        # Against this simulation's own memory: every prompt dealt is trained, lost for good, or still in the stream.
        assert counters["trained"] == len(self.trained)
        held = {group.index for group in self.stream._ready} | set(self.stream._running) | set(self.stream._again)
        assert not held & self.trained.keys() and not held & self.lost
        assert len(held) + len(self.trained) + len(self.lost) == self.stream._position

    def finish_a_batch(self) -> None:
        """From any state, a producer and a trainer that both keep working get to the next version."""
        for _ in range(10_000):
            if self.train():
                return
            while self.admit():
                pass
            assert self.stream.running(), "starved: nothing runs, nothing is admitted, no batch is complete"
            self.finish()
            self.check()
        raise AssertionError("no batch after 10,000 groups")
