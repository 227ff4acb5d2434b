"""Calls that a client gave up, and the same calls once they come again: what tells a repetition from a second call.

A client that waits too long, or whose connection breaks, leaves and sends the same request once more. Where the reply
was still being sampled, that ended with the client's leaving, and the repetition is sampled anew. Where it was
complete, the repetition gets that very reply, so that no sampled token is lost and none is trained twice.

Promises: a request is a repetition when its client says so (the providers' clients count their retries; a second one
with the same `Idempotency-Key` is one), or when an equal one was left with a complete reply that nobody has taken;
everything else is a call of its own. Where the first is
still being sampled because its connection looks alive, a repetition waits for it, as long as the engine's own deadlines
let it, and gets the same reply; unless several equal ones run and nobody can tell which of them it repeats. What one
of them took stays taken, whoever leaves.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from datamodules.workflows.gateway.rewards import Exchange
from datamodules.workflows.gateway.transcript import Call

_CANCEL_S = 10.0


@dataclass
class _Request:
    running: list[asyncio.Future[Exchange]] = field(default_factory=list)
    given_up: int = 0  # whose repetition has not come yet
    left: list[Exchange] = field(default_factory=list)  # complete, and not taken
    taken: Exchange | None = None  # the last answer that went out


class Repeats:
    """The requests of a session, told apart by their bytes."""

    def __init__(self) -> None:
        self._requests: defaultdict[bytes, _Request] = defaultdict(_Request)
        self._sending: Counter[int] = Counter()  # clients that wait for an answer which is there, by its replies' id()
        self._arrived: set[int] = set()

    @property
    def running(self) -> list[asyncio.Future[Exchange]]:
        """The calls that are being read or sampled."""
        return [sampling for one in self._requests.values() for sampling in one.running]

    async def again(self, request: bytes, retried: bool) -> Exchange | None:
        """The reply to give once more; None where it is to be sampled.

        Args:
            request: what makes it equal to another one.
            retried: the client says that it gave an equal one up, if there was one.
        """
        known = self._requests[request]
        while retried and not known.left and not known.given_up and len(known.running) == 1:
            await asyncio.wait(known.running)  # it is answered, or given up after all
            await asyncio.sleep(0)
        if known.left:
            return known.left.pop(0)
        if not retried:
            return None
        if known.given_up:
            known.given_up -= 1
            return None
        return None if known.running else known.taken

    def begin(self, request: bytes, sampling: asyncio.Future[Exchange]) -> None:
        """It is being read and sampled, until `end`."""
        self._requests[request].running.append(sampling)

    async def cancel(self) -> None:
        """Ends the sampling of all that run, and waits until it has."""
        running = self.running
        for sampling in running:
            sampling.cancel()
        if running:
            await asyncio.wait(running, timeout=_CANCEL_S)

    def end(self, request: bytes, sampling: asyncio.Future[Exchange]) -> None:
        """Comes after what became of it."""
        self._requests[request].running.remove(sampling)

    def taken(self, request: bytes, exchange: Exchange) -> None:
        """The answer goes out; `arrived` or `is_lost` comes next."""
        self._requests[request].taken = exchange
        self._sending[id(exchange.calls)] += 1

    def arrived(self, calls: list[Call]) -> None:
        """A client has the whole answer, as far as one can know."""
        self._sending[id(calls)] -= 1
        self._arrived.add(id(calls))

    def is_lost(self, calls: list[Call]) -> bool:
        """A client left before it had the whole answer: whether nobody else has it or waits for it."""
        self._sending[id(calls)] -= 1
        return not self._sending[id(calls)] and id(calls) not in self._arrived

    def given_up(self, request: bytes) -> None:
        """Nothing came of it: its client left, or was told to come again."""
        self._requests[request].given_up += 1

    def left(self, request: bytes, exchange: Exchange) -> None:
        """Its client left before it had the complete answer."""
        known = self._requests[request]
        known.left.append(exchange)
        if known.taken is exchange:
            known.taken = None
