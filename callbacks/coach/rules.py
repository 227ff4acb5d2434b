"""All rules, what makes a run worthless before what makes it slow.

A rule is a function of `(History, Facts)` that returns an `Advice` or nothing; its docstring says where its threshold
comes from. Promises: no rule without a remedy, silence when all is well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from callbacks.coach.facts import Advice, Facts
from callbacks.coach.history import History
from callbacks.coach.learning import (
    clip_decides,
    clipped_too_often,
    entropy_collapses,
    gradient_jumps,
    held_out_falls,
    no_gradient,
    sampler_differs,
    steps_lost,
)
from callbacks.coach.rollouts import (
    dropped_as_stale,
    length_runs_away,
    no_signal,
    nothing_trained,
    prompts_too_long,
    replies_cut,
    rewards_fail,
)
from callbacks.coach.speed import layers_unfused, servers_idle, sync_takes_long, trainer_waits

Rule = Callable[[History, Facts], Advice | None]


RULES: tuple[Rule, ...] = (
    steps_lost,
    no_gradient,
    sampler_differs,
    rewards_fail,
    prompts_too_long,
    gradient_jumps,
    clip_decides,
    held_out_falls,
    no_signal,
    entropy_collapses,
    replies_cut,
    length_runs_away,
    clipped_too_often,
    dropped_as_stale,
    trainer_waits,
    servers_idle,
    sync_takes_long,
    layers_unfused,
)
"""In order of importance: what is said when several hold."""


def at_once(history: History, facts: Facts) -> Advice | None:
    """What a single step shows, for who has not heard it yet in a launch; windows are judged by `advise`."""
    return nothing_trained(history, facts)


def advise(history: History, facts: Facts) -> list[Advice]:
    """What holds now, the most important first; nothing within the first window of a launch."""
    if history.steps < history.window:
        return []
    found = (rule(history, facts) for rule in RULES)
    return [one for one in found if one is not None]


def in_order(advice: Iterable[Advice]) -> list[Advice]:
    """Advice of these rules, the most important first."""
    names = [rule.__name__ for rule in RULES]
    return sorted(advice, key=lambda one: names.index(one.rule))
