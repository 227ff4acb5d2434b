"""What ranks run in the tests of `app.strategies.sharing` (importable, hence not in a test file)."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from app.batch import RolloutBatch
from app.strategies.collectives import Communicator
from app.strategies.sharing import Parts, RankTraffic
from tests.distributed.jobs import communicator
from tests.distributed.watch_jobs import lost_in_thought, watched


@dataclass
class Rank:
    """What one rank saw: the parts it served and what was asked of them, its part of what came next, every message's
    bytes; on rank 0 the answers, and the bytes it counted."""

    served: list[tuple[Any, RolloutBatch | None]] = field(default_factory=list)
    part: RolloutBatch | None = None
    received: list[int] = field(default_factory=list)
    answers: list[list[Tensor]] = field(default_factory=list)
    bytes_sent: int = 0

    def serve(self, words: Any, part: RolloutBatch | None) -> Tensor:
        """Twice the behavior of the part's tokens."""
        self.served.append((words, part))
        return torch.zeros(0) if part is None else 2 * part.behavior_logprobs


def exchange(asked: list[tuple[Any, Parts]], given: Parts | None) -> Rank:
    """Rank 0 asks for all of `asked`, and gives the ranks `given`."""
    ranks, seen = _counting(communicator())
    traffic = RankTraffic(ranks)

    def work() -> Parts | None:
        seen.answers = [traffic.ask(words, parts, seen.serve) for words, parts in asked]
        return given

    seen.part = traffic.lead(work, seen.serve)
    seen.bytes_sent = traffic.bytes
    return seen


def keeps_its_object(batch: RolloutBatch) -> bool:
    """One process: nothing is copied."""
    traffic, seen = RankTraffic(Communicator(None, torch.device("cpu"))), Rank()

    def work() -> Parts:
        traffic.ask("x", [batch], seen.serve)
        return [batch]

    part = traffic.lead(work, seen.serve)
    return part is batch and seen.served[0][1] is batch and (traffic.bytes, traffic.seconds) == (0, 0.0)


def fail_at_rank_zero(error: str, after: int, given: Parts | None = None) -> None:
    """Rank 0 fails when it has asked `after` times; with `given` because that cannot be sent."""
    traffic, seen = RankTraffic(communicator()), Rank()

    def work() -> Parts | None:
        for _ in range(after):
            traffic.ask("something", [None] * 2, seen.serve)
        if given is None:
            raise ValueError(error)
        return given

    traffic.lead(work, seen.serve)


def fail_while_serving(failing: tuple[int, ...], then_go_on: bool = False) -> Any:
    """The ranks `failing` fail in the second forward pass; with `then_go_on` the same ranks exchange something after
    all heard of it."""
    ranks = communicator()
    traffic = RankTraffic(ranks)

    def serve(words: Any, part: RolloutBatch | None) -> Tensor:
        if words == 2 and ranks.rank in failing:
            raise MemoryError(f"rank {ranks.rank} has no memory left")
        return torch.ones(1)

    def work() -> Parts | None:
        for number in (1, 2):
            traffic.ask(number, [None] * ranks.size, serve)
        return None

    if not then_go_on:
        return traffic.lead(work, serve)
    with contextlib.suppress(Exception):
        traffic.lead(work, serve)
    return traffic.lead(lambda: None, serve), ranks.sum(torch.ones(1)).tolist()


def die_while_serving() -> None:
    """Rank 1 dies in the forward pass that rank 0 waits for."""
    ranks = watched(timeout=50.0, death_timeout=20.0)
    traffic = RankTraffic(ranks)

    def serve(words: Any, part: RolloutBatch | None) -> Tensor:
        if ranks.rank == 1:
            os._exit(3)
        return torch.ones(1)

    traffic.lead(lambda: traffic.ask("x", [None, None], serve) and None, serve)


def lose_a_rank() -> str:
    """Rank 1 is late for the parts; what rank 0 says of it."""
    ranks = watched(timeout=6.0, death_timeout=20.0)
    message = ""
    if ranks.rank == 1:
        lost_in_thought(10.0)
    else:
        try:
            RankTraffic(ranks).lead(lambda: None, Rank().serve)
        except RuntimeError as error:
            message = str(error)
    assert ranks.watch is not None
    ranks.watch.close()
    return message


def _counting(ranks: Communicator) -> tuple[Communicator, Rank]:
    seen, scatter = Rank(), ranks.scatter

    def counted(parts: Any, what: str) -> Tensor:
        mine = scatter(parts, what)
        seen.received.append(len(mine))
        return mine

    ranks.scatter = counted  # type: ignore[method-assign]
    return ranks, seen
