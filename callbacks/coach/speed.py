"""Rules about time: who waits for whom, and what weights cost to send."""

from __future__ import annotations

import math

from callbacks.coach.facts import Advice, Facts
from callbacks.coach.history import History


def trainer_waits(history: History, facts: Facts) -> Advice | None:
    """A quarter of the step spent waiting for rollouts, where servers could be added; with an engine in the trainer's
    process, which shares its machine, three fifths. What balances: n servers finish a batch in a step of s seconds, of
    which w were waited, so n s / (s - w) finish it in s - w."""
    share = _share(history, "time/wait")
    if facts.servers is None or share <= (0.25 if facts.servers else 0.6):
        return None
    if facts.max_staleness == 0:
        remedy = "data.max_staleness: 1 lets rollouts go on while the model trains"
    elif facts.servers:
        remedy = f"{math.ceil(facts.servers / max(1 - share, 0.01) - 1e-9)} servers in place of"
        remedy += f" {facts.servers} would balance"
    else:
        remedy = "SGLang servers on devices of their own take generation off this process (datamodules.inference)"
    return Advice("trainer_waits", f"the trainer waits for rollouts {share:.0%} of the time", remedy, {"share": share})


def servers_idle(history: History, facts: Facts) -> Advice | None:
    """In seven steps of eight a whole batch lay ready and nothing was generated when the trainer took its own: servers
    stand still for what the gate does not let through."""
    running, queued = history.now("rollouts/running"), history.now("rollouts/queued")
    if not facts.servers or not facts.batch_size or len(running) < history.due("rollouts/running"):
        return None
    idle = sum(r == 0 and q >= facts.batch_size for r, q in zip(running, queued, strict=True)) / len(running)
    if idle < 0.875:
        return None
    fewer = f"{facts.servers - 1} of {facts.servers} servers, or " if facts.servers > 1 else ""
    bound = (facts.max_staleness or 0) + 1
    return Advice(
        "servers_idle",
        "servers wait for the trainer, with whole batches ready",
        f"{fewer}data.max_staleness: {bound} with an objective for it, larger batches, or more training devices",
        {"rollouts/idle_share": idle},
    )


def sync_takes_long(history: History, facts: Facts) -> Advice | None:
    """A fifth of the step spent on sending weights."""
    share = _share(history, "time/sync")
    if share <= 0.2:
        return None
    remedy = "more episodes a step (data.batch_size)"
    if facts.servers:
        remedy += ", WeightSync's method distributed instead of disk, or a LoRA with SGLangEngine's adapters"
    return Advice("sync_takes_long", f"{share:.0%} of the time goes into sending weights", remedy, {"share": share})


def layers_unfused(history: History, facts: Facts) -> Advice | None:
    """Half of the step in passes of low precision on a GPU, whose element-wise parts run operator by operator: fused, a
    pass of a 0.6B model took a fifth less on an H100, and the first step half a minute more (docs/results.md)."""
    share = _share(history, "time/tree")
    if not facts.unfused or share <= 0.5:
        return None
    finding = f"{share:.0%} of the time goes into passes, whose norms, rotary embeddings and activations run one by one"
    return Advice("layers_unfused", finding, "model.elementwise: compile fuses them", {"share": share})


def _share(history: History, name: str) -> float:
    """Of the time of steps, in that half of the window where it is smaller: one long step is no bottleneck."""
    whole, part = history.now("time/step"), history.now(name)
    if len(whole) < history.window or len(part) != len(whole):
        return 0.0
    middle = len(whole) // 2
    halves = (slice(None, middle), slice(middle, None))
    return min(sum(part[half]) / (sum(whole[half]) or math.inf) for half in halves)
