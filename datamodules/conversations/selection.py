"""Recorded conversations by task: which of them belong together, and which are used.

Promise: a selection that the recordings cannot give is refused by name and source (RecordedDataError).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from app.statistics import equal
from datamodules.conversations.sessions import Session
from datamodules.conversations.tokens import Conversation, RecordedDataError

Episode = TypeVar("Episode", Conversation, Session, Conversation | Session)


def grouped(conversations: Sequence[Episode]) -> dict[tuple[str, str], list[Episode]]:
    """Conversations of one task and one policy, ordered by trial, in the file's order of tasks."""
    groups: dict[tuple[str, str], list[Episode]] = {}
    for conversation in conversations:
        group = groups.setdefault((conversation.task, conversation.model), [])
        twin = next((other for other in group if other.trial == conversation.trial), None)
        if twin is not None:
            raise RecordedDataError(
                f"{conversation.source}: task '{conversation.task}' has trial {conversation.trial} already "
                f"({twin.source}); number the trials of a task differently or remove one"
            )
        group.append(conversation)
    return {key: sorted(group, key=lambda c: c.trial) for key, group in groups.items()}


def choose(
    groups: dict[tuple[str, str], list[Episode]], tasks: list[str | int] | None, path: str
) -> dict[tuple[str, str], list[Episode]]:
    """The groups of the tasks of these names (None: all), in the file's order."""
    if tasks is None:
        return groups
    names = [str(task) for task in tasks]
    known = list(dict.fromkeys(task for task, _ in groups))
    for name in names:
        if name not in known or names.count(name) > 1:
            problem = "is listed twice" if name in known else f"is not in {path}, which has {known[:10]} and others"
            raise RecordedDataError(f"tasks: '{name}' {problem}; name every task once")
    return {key: group for key, group in groups.items() if key[0] in names}


def first_trials(group: list[Episode], trials: int | None) -> list[Episode]:
    """The first `trials` conversations of a group (None: all)."""
    if trials is None:
        return group
    if len(group) < trials:
        raise RecordedDataError(
            f"trials: {trials}, but task '{group[0].task}' has only {len(group)} ({group[0].source}); lower `trials` "
            "or choose other `tasks`"
        )
    return group[:trials]


def best_and_worst(group: list[Episode]) -> list[Episode]:
    """The conversations of largest and smallest reward, in this order; [] where all rewards are equal."""
    best, worst = max(group, key=lambda one: one.reward), min(group, key=lambda one: one.reward)
    return [] if equal([best.reward, worst.reward]) else [best, worst]
