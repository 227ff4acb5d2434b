"""What ranks run in the tests of `app.strategies.ranks.sharing` (importable, hence not in a test file)."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.batch import RolloutBatch
from app.exchange import Parts, Said
from app.strategies.ranks.collectives import Communicator
from app.strategies.ranks.sharing import RankTraffic
from app.strategies.ranks.wire import PackedBatch
from tests.app.strategies.ranks.watch_jobs import lost_in_thought, watched
from tests.app.strategies.zero1_jobs import communicator

NOTHING: Said = (None, None, {})


def whole(batch: Parts | None) -> RolloutBatch | None:
    return batch.select(range(len(batch))) if isinstance(batch, PackedBatch) else batch


@dataclass
class Rank:
    """What one rank saw: what was asked of it, what was said last, every message's bytes; on rank 0 the answers, and
    the bytes it counted."""

    served: list[tuple[Any, Parts | None]] = field(default_factory=list)
    said: Said = (None, None, {})
    received: list[int] = field(default_factory=list)
    answers: list[list[Tensor]] = field(default_factory=list)
    bytes_sent: int = 0

    def serve(self, words: Any, batch: Parts | None) -> Tensor:
        """The behavior of the tokens, times the first of the words."""
        batch = whole(batch)
        self.served.append((words, batch))
        return torch.zeros(0) if batch is None else words[0] * batch.behavior_logprobs


def exchange(asked: list[tuple[Any, int | None]], batches: list[RolloutBatch], said: tuple[Any, Any, Any]) -> Rank:
    """Rank 0 asks for all of `asked`, about batches of these numbers, and says `said`."""
    ranks, seen = _counting(communicator())
    traffic = RankTraffic(ranks)

    def batch(number: int | None) -> RolloutBatch | None:
        return None if number is None else batches[number]

    def work() -> Said:
        seen.answers = [traffic.ask(words, batch(number), seen.serve) for words, number in asked]
        return said[0], batch(said[1]), said[2]

    words, named, values = traffic.lead(work, seen.serve)
    seen.said = (words, whole(named), values)
    seen.bytes_sent = traffic.bytes
    return seen


def keeps_its_object(batch: RolloutBatch) -> bool:
    """One process: nothing is copied."""
    traffic, seen = RankTraffic(Communicator(None, torch.device("cpu"))), Rank()

    def work() -> Said:
        traffic.ask([1], batch, seen.serve)
        return [1], batch, {}

    said = traffic.lead(work, seen.serve)
    return said[1] is batch and seen.served[0][1] is batch and (traffic.bytes, traffic.seconds) == (0, 0.0)


def forgets(batch: RolloutBatch) -> list[int]:
    """Bytes of a batch named three times, forgotten before the third."""
    traffic, sizes = RankTraffic(communicator()), []
    for again in range(3):
        if again == 2:
            traffic.forget()
        traffic.reset()
        found = whole(traffic.lead(lambda: ("x", batch, {}), Rank().serve)[1])
        assert found is not None and torch.equal(found.tokens, batch.tokens)
        sizes.append(traffic.bytes)
    return sizes


def fail_at_rank_zero(error: str, after: int, said: Any = None) -> None:
    """Rank 0 fails when it has asked `after` times; with `said` because that cannot be sent."""
    traffic, seen = RankTraffic(communicator()), Rank()

    def work() -> Said:
        for _ in range(after):
            traffic.ask("something", None, seen.serve)
        if said is None:
            raise ValueError(error)
        return said, None, {}

    traffic.lead(work, seen.serve)


def fail_while_serving(failing: tuple[int, ...], then_go_on: bool = False) -> Any:
    """The ranks `failing` fail in the second forward pass; with `then_go_on` the same ranks exchange something after
    all heard of it."""
    ranks = communicator()
    traffic = RankTraffic(ranks)

    def serve(words: Any, batch: Parts | None) -> Tensor:
        if words == 2 and ranks.rank in failing:
            raise MemoryError(f"rank {ranks.rank} has no memory left")
        return torch.ones(1)

    def work() -> Said:
        for number in (1, 2):
            traffic.ask(number, None, serve)
        return NOTHING

    if not then_go_on:
        return traffic.lead(work, serve)
    with contextlib.suppress(Exception):
        traffic.lead(work, serve)
    return traffic.lead(lambda: NOTHING, serve), ranks.sum(torch.ones(1)).tolist()


def die_while_serving() -> None:
    """Rank 1 dies in the forward pass that rank 0 waits for."""
    ranks = watched(timeout=50.0, death_timeout=20.0)
    traffic = RankTraffic(ranks)

    def serve(words: Any, batch: Parts | None) -> Tensor:
        if ranks.rank == 1:
            os._exit(3)
        return torch.ones(1)

    traffic.lead(lambda: ("x", None, {}) if traffic.ask("x", None, serve) else NOTHING, serve)


def lose_a_rank(over: Path) -> str:
    """Rank 1 is late for a message; what rank 0 says of it."""
    ranks = watched(timeout=6.0, death_timeout=20.0)
    message = ""
    if ranks.rank == 1:
        lost_in_thought(60.0, over)
    else:
        try:
            RankTraffic(ranks).lead(lambda: NOTHING, Rank().serve)
        except RuntimeError as error:
            message = str(error)
        over.touch()
    assert ranks.watch is not None
    ranks.watch.close()
    return message


def _counting(ranks: Communicator) -> tuple[Communicator, Rank]:
    seen, broadcast = Rank(), ranks.broadcast_bytes

    def counted(message: Any, what: str) -> Tensor:
        mine = broadcast(message, what)
        seen.received.append(len(mine))
        return mine

    ranks.broadcast_bytes = counted  # type: ignore[method-assign]
    return ranks, seen
