"""Dynamic sampling: which finished groups are worth training on.

A filter is any object with `reason(group) -> str | None`: why the group is left out, or None to keep it. The producer
drops and counts (`dropped_filtered`) what a filter names a reason for, and rolls out more prompts in its place. Where
it has a method `left_out(group) -> {episode id: why}`, these episodes of a group that is kept count in its statistics
(its mean reward, say) and are not trained on themselves; a group of which nothing is left is left out.

Promises: the filters here are pure functions of the group; they judge episodes, not turns (an episode of 20 sequences
counts once, by its reward and those of its single calls together, as advantages do), and their reasons say what was
measured.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from app import checks
from app.batch import LEFT_OUT, Trajectory
from app.statistics import ROUNDING, equal
from datamodules.groups import Group, earned


class GroupFilter(ABC):
    """Decides about groups. Any class with a method `reason` counts as one, without inheriting from this."""

    @abstractmethod
    def reason(self, group: Group) -> str | None:
        """Why `group` is not trained on, in a few words for the log; None when it is."""

    def left_out(self, group: Group) -> Mapping[int, str]:
        """Why, by id, for the episodes of a group that is kept which are not trained on themselves."""
        return {}

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return cls is GroupFilter and callable(getattr(other, "reason", None))


class NoSignal(GroupFilter):
    """Leaves out groups whose episodes all have the same reward (DAPO, Yu et al. 2025, section 3.2): their group
    advantages are all 0, unless a regulariser with `where: reward` tells the episodes apart, which the filter does not
    see.

    Args:
        tolerance: rewards count as equal when the largest exceeds the smallest by no more than this, or by rounding.

    Raises:
        ValueError: a negative tolerance.
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        checks.at_least(0, {"NoSignal.tolerance": tolerance})
        self.tolerance = tolerance

    def reason(self, group: Group) -> str | None:
        rewards = list(episode_rewards(group).values())
        if not equal(rewards, self.tolerance):
            return None
        return f"no signal: the rewards of its {len(rewards)} episodes are all {_span(rewards)}"


class RewardBand(GroupFilter):
    """Leaves out groups that are too hard or too easy: whose mean reward lies outside `[least, most]` by more than
    rounding.

    Raises:
        ValueError: `least` above `most`.
    """

    def __init__(self, least: float, most: float) -> None:
        if not least <= most:
            raise ValueError(f"RewardBand.least: {least}, must not be above most ({most})")
        self.least = least
        self.most = most

    def reason(self, group: Group) -> str | None:
        rewards = episode_rewards(group).values()
        mean = sum(rewards) / len(rewards)
        rounding = ROUNDING * max(1.0, abs(mean))  # seven times 0.9 have the mean 0.9000000000000001
        if self.least - rounding <= mean <= self.most + rounding:
            return None
        return f"mean reward {mean:g} outside [{self.least:g}, {self.most:g}]"


class TooManyTruncated(GroupFilter):
    """Leaves out groups many of whose episodes were cut off (a sequence has finish reason "length"): their rewards say
    little.

    Args:
        most: largest share of such episodes that is still trained on, in [0, 1).

    Raises:
        ValueError: a share outside that range (1 would keep every group).
    """

    def __init__(self, most: float = 0.5) -> None:
        if not 0 <= most < 1:
            raise ValueError(f"TooManyTruncated.most: {most}, must be at least 0 and below 1")
        self.most = most

    def reason(self, group: Group) -> str | None:
        episodes = len(episode_rewards(group))
        cut = len({one.episode_id for one in group.trajectories if one.finish_reason == "length"})
        return None if cut <= self.most * episodes + ROUNDING else f"truncated: {cut} of {episodes} episodes"


class LeaveOutTruncated(GroupFilter):
    """Keeps groups, and leaves out of training their episodes that were cut off (a sequence has finish reason "length",
    in agents of several conversations any of them): their rewards still count in the group's statistics. DAPO's
    overlong filtering (Yu et al. 2025, section 3.4). Not for objectives that compare episodes (dpo, tba).
    """

    def reason(self, group: Group) -> str | None:
        return None

    def left_out(self, group: Group) -> dict[int, str]:
        return {one.episode_id: "truncated" for one in group.trajectories if one.finish_reason == "length"}


class LeaveOutRepetitive(GroupFilter):
    """Keeps groups, and leaves out of training their episodes that end up in a loop: where so many sampled tokens in a
    row were each all but certain (MiniMax-M1, Chen et al. 2025, section 3.2, which cuts such replies off). Their
    rewards still count in the group's statistics. Not for objectives that compare episodes (dpo, tba).

    Args:
        window: sampled tokens in a row, at least 1. Text that is learnt by heart is as certain: far above its length.
        probability: above which each of them was sampled, in (0, 1), at the temperature of sampling.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, window: int = 3000, probability: float = 0.99) -> None:
        checks.at_least(1, {"LeaveOutRepetitive.window": window})
        if not 0 < probability < 1:
            raise ValueError(f"LeaveOutRepetitive.probability: {probability}, must be above 0 and below 1")
        self.window = window
        self.probability = probability

    def reason(self, group: Group) -> str | None:
        return None

    def left_out(self, group: Group) -> dict[int, str]:
        return {one.episode_id: "repetitive" for one in group.trajectories if self._loops(one)}

    def _loops(self, one: Trajectory) -> bool:
        sampled = one.behavior_logprobs[one.versions >= 0]  # whatever stands between two replies
        hesitates = (sampled <= math.log(self.probability)).nonzero()[:, 0]
        edges = torch.cat([torch.tensor([-1]), hesitates, torch.tensor([len(sampled)])])
        return bool((edges.diff() > self.window).any())


class Filters(GroupFilter):
    """Several filters: a group stays when it passes all of them; the reason is the first one's that it fails. Episodes
    are left out that any of them leaves out.

    Args:
        filters: at least one.

    Raises:
        ValueError: none, or something that is no filter.
    """

    def __init__(self, filters: Sequence[GroupFilter]) -> None:
        if not filters:
            raise ValueError("Filters.filters: empty, so nothing would be filtered; name filters or leave it out")
        for one in filters:
            if not callable(getattr(one, "reason", None)):
                raise ValueError(f"Filters.filters: {type(one).__name__} has no method reason(group)")
        self.filters = list(filters)

    def reason(self, group: Group) -> str | None:
        return next((why for one in self.filters if (why := reason_of(one, group)) is not None), None)

    def left_out(self, group: Group) -> dict[int, str]:
        return {episode: why for one in reversed(self.filters) for episode, why in left_out_of(one, group).items()}


class Custom(GroupFilter):
    """A function of your own: `(group) -> str | None`, by its import path."""

    def __init__(self, function: Callable[[Group], str | None]) -> None:
        self.function = function

    def reason(self, group: Group) -> str | None:
        return _checked(self.function(group), "Custom.function", group)


def reason_of(one: GroupFilter, group: Group) -> str | None:
    """What a filter says, which may be a class of users. Raises TypeError: neither a reason nor None."""
    return _checked(one.reason(group), f"{type(one).__name__}.reason", group)


def left_out_of(one: GroupFilter, group: Group) -> dict[int, str]:
    """What a filter says, which may be a class of users, of single episodes. Raises TypeError: no reasons by ids of the
    group's episodes."""
    if not callable(method := getattr(one, "left_out", None)):
        return {}
    found, known = method(group), {trajectory.episode_id for trajectory in group.trajectories}
    if not isinstance(found, Mapping) or not all(
        key in known and why and type(why) is str for key, why in found.items()
    ):
        raise TypeError(
            f"{type(one).__name__}.left_out returned {found!r} for prompt '{group.prompt_id}'; it must return"
            f" {{episode id: reason}}, of the ids {sorted(known)}"
        )
    return dict(found)


def decide(one: GroupFilter, group: Group) -> str | None:
    """Why a finished group is not trained on; where it is, the episodes that are left out of it are marked
    (`app.batch.LEFT_OUT`)."""
    if (why := reason_of(one, group)) is not None:
        return why
    left_out = left_out_of(one, group)
    if left_out and len(left_out) == len(episode_rewards(group)):
        return f"all of its {len(left_out)} episodes are left out: {', '.join(dict.fromkeys(left_out.values()))}"
    for trajectory in group.trajectories:
        if trajectory.episode_id in left_out:
            trajectory.metadata[LEFT_OUT] = left_out[trajectory.episode_id]
    return None


def episode_rewards(group: Group) -> dict[int, float]:
    """Episode id -> what it earned, rewards of single calls included, in the order of the group's episodes."""
    turns: dict[int, list[Trajectory]] = {}
    for one in group.trajectories:
        turns.setdefault(one.episode_id, []).append(one)
    return {episode: earned(own) for episode, own in turns.items()}


def _checked(why: Any, where: str, group: Group) -> str | None:
    if why is not None and (not isinstance(why, str) or not why):
        raise TypeError(f"{where} returned {why!r} for prompt '{group.prompt_id}'; it must return a reason or None")
    return why


def _span(rewards: Sequence[float]) -> str:
    least, most = min(rewards), max(rewards)
    return f"{least:g}" if equal(rewards) else f"within [{least:g}, {most:g}]"
