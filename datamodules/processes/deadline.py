"""Deadlines by a clock that may stand still: time in which nobody could have gone on is not counted.

Promises: what is late is cancelled, and raises TimeoutError as by `asyncio.timeout`; while time stands still, and for
the seconds in which this process was stopped (`stopped_s`), nothing is late. Standard library alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from datamodules.processes.awake import stopped_s

_LOOK_S = 0.1  # how often time that stands still is looked at


@dataclass(frozen=True)
class Held:
    """Seconds that were not counted so far, those of a pause that lasts included.

    Attributes:
        seconds: asked in this process.
        url, key: what GET there says, `{"held_s": seconds}`, to processes of other machines with this key as bearer.
    """

    seconds: Callable[[], float]
    url: str
    key: str

    def __call__(self) -> float:
        return self.seconds()


@asynccontextmanager
async def deadline(
    seconds: float | None, held: Callable[[], float] | None = None, look_s: float = _LOOK_S
) -> AsyncIterator[asyncio.Timeout]:
    """`async with deadline(30.0, held) as limit:` as `asyncio.timeout`, but for the seconds by which `held()` grows
    and those in which this process was stopped.

    Args:
        seconds: None for no deadline.
        held: seconds that were not counted so far; None where all are.
        look_s: seconds between two looks at it, where it is due; it is late by as much at most.

    Raises:
        TimeoutError: what is inside was not over in time; `limit.expired()` tells it from one that was raised there.
    """
    async with asyncio.timeout(None) as limit:
        if seconds is None:
            yield limit
            return

        def uncounted() -> float:
            return stopped_s() + (0.0 if held is None else held())

        loop, before = asyncio.get_running_loop(), uncounted()
        ends = loop.time() + seconds
        due: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal due  # the timer that calls this next
            left = ends + uncounted() - before - loop.time()
            if left > 0:
                due = loop.call_later(max(left, look_s), look)
            else:
                limit.reschedule(loop.time())

        due = loop.call_later(seconds, look)
        try:
            yield limit
        finally:
            if due is not None:
                due.cancel()
