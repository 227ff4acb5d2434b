"""What is being played and what each prompt waits for: the table behind time-outs, the watchdog and `arborist doctor`.

Promises: cheap enough to be kept always (an entry a prompt, an entry a request or reward in flight); readable from any
thread without a lock, also while the thread that plays is stuck.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from datamodules.processes.awake import awake

Where = Callable[[str], str]
"""The server that a request waits at, by request id; "" where the engine does not know."""

_SHOWN = 5


class LastArrival:
    """When something last arrived: a reply, a reward, the end of an episode. `now` is a time of `awake`."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = awake()

    def note(self) -> None:
        self.last = awake()


class Wait:
    """One thing an episode waits for: `what` ("reply", "reward" or "resume"), the request's `name`, since when."""

    __slots__ = ("name", "since", "what")

    def __init__(self, what: str, name: str) -> None:
        self.what = what
        self.name = name
        self.since = awake()


class Pending:
    """A prompt being played.

    Attributes:
        index: position of the prompt in the stream.
        admitted_at: policy version when its group was admitted.
        attempt: how often the prompt was begun and given back before (surplus of over-sampling, stalls).
        stalls: how many of those were stalls.
        kept: played to the end, never given up as surplus.
        prompt_id: "?" until the prompt is dealt.
        samples, done: episodes of the group, and those that have ended.
        waits: what its episodes wait for now.
    """

    __slots__ = (
        "admitted_at",
        "arrivals",
        "attempt",
        "began",
        "done",
        "index",
        "kept",
        "prompt_id",
        "samples",
        "stalls",
        "waits",
    )

    def __init__(
        self,
        prompt_id: str = "?",
        arrivals: LastArrival | None = None,
        *,
        index: int = -1,
        admitted_at: int = 0,
        samples: int = 1,
        attempt: int = 0,
        stalls: int = 0,
        kept: bool = False,
    ) -> None:
        self.prompt_id = prompt_id
        self.arrivals = arrivals or LastArrival()
        self.index = index
        self.admitted_at = admitted_at
        self.samples = samples
        self.attempt = attempt
        self.stalls = stalls
        self.kept = kept
        self.began = awake()
        self.done = 0
        self.waits: dict[int, Wait] = {}

    @contextmanager
    def waiting(self, what: str, name: str = "") -> Iterator[None]:
        """Inside, an episode waits for this; its end, good or bad, is an arrival, unless the wait was cancelled."""
        wait = Wait(what, name)
        self.waits[id(wait)] = wait
        try:
            yield
        except asyncio.CancelledError:
            raise
        except BaseException:
            self.arrivals.note()
            raise
        else:
            self.arrivals.note()
        finally:
            del self.waits[id(wait)]

    def oldest_wait(self) -> Wait | None:
        return min(list(self.waits.values()), key=lambda one: one.since, default=None)


def describe(pending: Iterable[Pending], where: Where | None = None) -> str:
    """One line: how many prompts are being played, and of the oldest five name, seconds, samples done, what they wait
    for and at which server."""
    oldest = sorted(pending, key=lambda one: one.began)
    if not oldest:
        return "nothing is being played"
    now = awake()
    shown = ", ".join(
        f"'{one.prompt_id}' ({now - one.began:.1f} s, {one.done} of {one.samples} done{_waits(one, now, where)})"
        for one in oldest[:_SHOWN]
    )
    return f"{len(oldest)} being played, the oldest: {shown}"


def table(pending: Iterable[Pending], where: Where | None = None) -> str:
    """All of it: a line a prompt, oldest first, and below it one for every wait of its episodes."""
    now = awake()
    lines = []
    for one in sorted(pending, key=lambda one: one.began):
        again = f", attempt {one.attempt + 1}" if one.attempt else ""
        lines.append(
            f"'{one.prompt_id}' (index {one.index}, admitted at version {one.admitted_at}{again}):"
            f" {now - one.began:.1f} s, {one.done} of {one.samples} done"
        )
        for wait in sorted(list(one.waits.values()), key=lambda wait: wait.since):
            server = _server(wait, where)
            at = f" at {server}" if server else ""
            lines.append(f"    waits {now - wait.since:.1f} s for {wait.what} '{wait.name}'{at}")
    return "\n".join(lines) or "nothing"


def servers(pending: Iterable[Pending], where: Where | None) -> list[str]:
    """The servers at which replies are waited for, without repetition; those the engine cannot name are left out."""
    waits = [wait for one in pending for wait in list(one.waits.values())]
    return list(dict.fromkeys(name for wait in waits if (name := _server(wait, where))))


def _server(wait: Wait, where: Where | None) -> str:
    return where(wait.name) if where is not None and wait.what == "reply" else ""


def _waits(one: Pending, now: float, where: Where | None) -> str:
    oldest = one.oldest_wait()
    if oldest is None:
        return ""
    server = _server(oldest, where)
    at = f" at {server}" if server else ""
    name = f" '{oldest.name}'" if oldest.name else ""
    more = len(one.waits) - 1
    rest = f" and {more} more" if more else ""
    return f", waits {now - oldest.since:.1f} s for {oldest.what}{name}{at}{rest}"
