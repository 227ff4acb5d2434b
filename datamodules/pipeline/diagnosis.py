"""What to say about a producer: one line for errors and the watchdog, and all there is for a run that hangs.

Promises: callable from any thread, also while the rollout thread is stuck or the engine fails; takes no lock that a
hung trainer could hold before everything else is said; equal stacks are counted, not repeated.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Protocol

from datamodules.inference.protocol import ServerEngine
from datamodules.pending import Pending, Where, describe, table
from datamodules.pipeline.gate import StalenessGate
from datamodules.pipeline.player import EpisodePlayer
from datamodules.pipeline.stream import Stream

_FRAMES = ("cr_frame", "gi_frame", "ag_frame")  # of coroutines, generators and asynchronous generators
_AWAITED = ("cr_await", "gi_yieldfrom", "ag_await")


class Diagnosed(Protocol):
    """What is told of: a `Producer`."""

    gate: StalenessGate
    stream: Stream
    player: EpisodePlayer
    trainer_waits: bool
    loop: asyncio.AbstractEventLoop | None
    evaluating: dict[Any, Pending]

    def pending(self) -> list[Pending]: ...


def one_line(producer: Diagnosed) -> str:
    """What is pending where, the gate's counters, the engine's health."""
    where = _where(producer.player.engine)
    pending = describe(producer.pending(), where)
    if producer.evaluating:
        pending += f"; training: {describe(producer.stream.running(), where)}"
    try:
        health: Any = producer.player.engine.health()
    except Exception as error:  # what is said about a failing engine must not be lost with it
        health = f"{type(error).__name__}: {error}"
    return f"{pending}; gate: {producer.gate.counters()} at version {producer.gate.version}; engine: {health}"


def everything(producer: Diagnosed) -> str:
    """Many lines: all that is pending, where every task of the rollout thread waits, gate and engine."""
    where = _where(producer.player.engine)
    waits = "yes" if producer.trainer_waits else "no"
    parts = [
        f"{producer.stream.ready} groups ready; the trainer waits for a batch: {waits}",
        "training prompts being played:",
        table(producer.stream.running(), where),
    ]
    if producer.evaluating:
        parts += ["validation prompts being played:", table(list(producer.evaluating.values()), where)]
    parts += ["tasks of the rollout thread:", describe_tasks(producer.loop), one_line(producer)]
    return "\n".join(parts)


def _where(engine: object) -> Where | None:
    return engine.where if isinstance(engine, ServerEngine) else None


def describe_tasks(loop: asyncio.AbstractEventLoop | None) -> str:
    """Every task's stack, from its own coroutine down to what that awaits, most frequent stacks first."""
    if loop is None or loop.is_closed():
        return "no event loop"
    stacks = Counter(_stack(task) for task in asyncio.all_tasks(loop) if not task.done())
    return "\n".join(f"{count} x\n{stack}" for stack, count in stacks.most_common()) or "none"


def _stack(task: asyncio.Task[Any]) -> str:
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = next((f for name in _FRAMES if (f := getattr(awaited, name, None)) is not None), None)
        if frame is None:
            lines.append(f"    awaits {type(awaited).__name__}")
            break
        lines.append(f"    {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        awaited = next((a for name in _AWAITED if (a := getattr(awaited, name, None)) is not None), None)
    return "\n".join(lines)
