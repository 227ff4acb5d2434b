"""Which groups the filters leave out, and what they say about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from app.batch import CALL_REWARD, LEFT_OUT, BatchError, Trajectory
from datamodules.filters import (
    Custom,
    Filters,
    GroupFilter,
    LeaveOutRepetitive,
    LeaveOutTruncated,
    NoSignal,
    RewardBand,
    TooManyTruncated,
    decide,
)
from datamodules.groups import Group, earned, to_batch
from datamodules.pipeline.tally import Tally
from modules.metrics import episode_reward


def group(*episodes: tuple[float, str], turns: int = 1) -> Group:
    """Episodes of (reward, how they ended); all turns but the last ended with a stop token."""
    return Group(
        index=3,
        prompt_id="p3",
        admitted_at=0,
        trajectories=[
            Trajectory(
                tokens=torch.tensor([2, 3]),
                loss_mask=torch.tensor([False, True]),
                behavior_logprobs=torch.zeros(2),
                versions=torch.tensor([-1, 0]),
                reward=reward,
                group_id=3,
                episode_id=number,
                turn_index=turn,
                finish_reason=ended if turn == turns - 1 else "stop",
            )
            for number, (reward, ended) in enumerate(episodes)
            for turn in range(turns)
        ],
    )


def credited(*episodes: Sequence[float | None]) -> Group:
    """Episodes without a reward of their own, by the rewards of their calls."""
    made = group(*((0.0, "stop") for _ in episodes), turns=len(episodes[0]))
    for one, value in zip(made.trajectories, [value for own in episodes for value in own], strict=True):
        if value is not None:
            one.metadata[CALL_REWARD] = value
    return made


def test_rewards_of_single_calls_are_their_episodes() -> None:
    same, other = [0.5, None, 0.5], [None, 1.0, None]
    assert NoSignal().reason(credited(same, other)) == "no signal: the rewards of its 2 episodes are all 1"
    assert NoSignal().reason(credited(same, [0.5, 0.25, None])) is None
    assert RewardBand(0.5, 0.9).reason(credited(same, other)) == "mean reward 1 outside [0.5, 0.9]"
    tally = Tally()
    tally.finished(credited(same, [0.0, None, -1.0]))
    found = tally.take()
    assert (found["reward"], found["flat"], found["unsolved"]) == (0.0, 0.0, 0.0)
    with pytest.raises(BatchError, match="call_reward is much; it must be a finite number"):
        earned(credited([0.5], ["much"]).trajectories[1:])  # type: ignore[list-item]
    batch = to_batch([credited(same, [0.0, None, -1.0])])
    assert episode_reward(batch) == (0.0, 2)


def odd(group: Group) -> str | None:
    """A user's own rule."""
    return "an odd number of sequences" if len(group.trajectories) % 2 else None


class Everything:
    """A user's own class that inherits from nothing."""

    def reason(self, group: Group) -> str | None:
        return f"'{group.prompt_id}' is left out, as everything is"


class Silent:
    """A user's own class that says nothing of what it keeps."""

    def reason(self, group: Group) -> str | None:
        return ""


def test_groups_without_signal_are_named() -> None:
    right, wrong = (1.0, "stop"), (0.0, "stop")
    assert NoSignal().reason(group(right, wrong)) is None
    assert NoSignal().reason(group(right, right, right)) == "no signal: the rewards of its 3 episodes are all 1"
    assert NoSignal().reason(group(right, wrong, turns=5)) is None
    parts = group((0.1 + 0.2, "stop"), (0.3, "stop"))  # one reward of float32, as a batch holds it
    assert NoSignal().reason(parts) == "no signal: the rewards of its 2 episodes are all 0.3"
    close = group((0.50, "stop"), (0.51, "stop"))
    assert NoSignal().reason(close) is None
    assert NoSignal(tolerance=0.02).reason(close) == (
        "no signal: the rewards of its 2 episodes are all within [0.5, 0.51]"
    )


def test_mean_rewards_count_episodes_not_turns() -> None:
    uneven = group((1.0, "stop"), (0.0, "stop"), (0.0, "stop"), (0.0, "stop"))
    uneven.trajectories.extend(uneven.trajectories[:1] * 8)  # eight more turns of the episode that succeeded
    assert RewardBand(0.2, 0.3).reason(uneven) is None
    assert RewardBand(0.3, 0.9).reason(uneven) == "mean reward 0.25 outside [0.3, 0.9]"


@pytest.mark.parametrize("bound", [0.1, 0.2, 0.7, 0.9])
def test_bounds_of_the_band_are_inside(bound: float) -> None:
    """Whatever rounding makes of a mean: seven times 0.9 have the mean 0.9000000000000001."""
    for episodes in range(1, 20):
        equal = group(*[(bound, "stop")] * episodes)
        assert RewardBand(bound, bound).reason(equal) is None
        assert RewardBand(bound + 1e-4, 1.0).reason(equal) is not None
        assert RewardBand(0.0, bound - 1e-4).reason(equal) is not None
    assert TooManyTruncated(0.29).reason(group(*[(0.0, "length")] * 29, *[(0.0, "stop")] * 71)) is None


def test_truncated_episodes_are_counted_once() -> None:
    half = group((1.0, "length"), (0.0, "stop"), turns=4)
    assert TooManyTruncated(0.5).reason(half) is None
    assert TooManyTruncated(0.4).reason(half) == "truncated: 1 of 2 episodes"
    assert TooManyTruncated(0.0).reason(group((1.0, "stop"), (0.0, "stop"))) is None


def test_truncated_episodes_teach_nothing() -> None:
    some = group((1.0, "length"), (0.0, "stop"), (0.0, "length"), turns=2)
    assert decide(Filters([NoSignal(), LeaveOutTruncated()]), some) is None
    assert [one.metadata.get(LEFT_OUT) for one in some.trajectories] == [
        *["truncated"] * 2,
        None,
        None,
        *["truncated"] * 2,
    ]
    every = group((1.0, "length"), (0.0, "length"))
    assert decide(LeaveOutTruncated(), every) == "all of its 2 episodes are left out: truncated"
    assert decide(Everything(), group((1.0, "stop"))) == "'p3' is left out, as everything is"
    for wrong in ([0], {7: "unknown"}, {0: ""}):
        own = type(
            "Own", (LeaveOutTruncated,), {"left_out": lambda self, group, wrong=wrong: wrong, "reason": lambda *_: None}
        )
        with pytest.raises(TypeError, match=r"Own.left_out returned .* of the ids \[0\]"):
            decide(own(), group((1.0, "stop")))


@pytest.mark.parametrize(("certain", "loops"), [(3, False), (4, True), (9, True)])
@pytest.mark.parametrize("before", [0, 2])
def test_loops_are_so_many_certain_tokens_in_a_row(certain: int, loops: bool, before: int) -> None:
    """Wherever they stand among the sampled tokens; what was not sampled neither adds to them nor parts them."""
    made = group((1.0, "stop"), (0.0, "stop"))
    probability = torch.tensor([0.5] * before + [0.999] * certain + [0.9])
    sampled = torch.cat([torch.zeros(3), probability.log()[:-2], torch.zeros(5), probability.log()[-2:]])
    mask = torch.tensor([False] * 3 + [True] * (len(probability) - 2) + [False] * 5 + [True] * 2)
    made.trajectories[1] = replace(
        made.trajectories[1],
        tokens=torch.arange(len(sampled)),
        loss_mask=mask,
        behavior_logprobs=sampled,
        versions=torch.where(mask, 0, -1),
    )
    assert decide(LeaveOutRepetitive(window=4), made) is None
    assert [LEFT_OUT in one.metadata for one in made.trajectories] == [False, loops]


def test_filters_compose_and_the_first_reason_counts() -> None:
    both = Filters([NoSignal(), TooManyTruncated(0.0), Everything()])
    assert both.reason(group((1.0, "length"), (1.0, "length"))).startswith("no signal")  # type: ignore[union-attr]
    assert both.reason(group((1.0, "length"), (0.0, "stop"))) == "truncated: 1 of 2 episodes"
    assert "everything" in str(both.reason(group((1.0, "stop"), (0.0, "stop"))))
    assert Filters([NoSignal(), Custom(odd)]).reason(group((1.0, "stop"), (0.0, "stop"))) is None


def test_own_functions_must_give_a_reason_or_none() -> None:
    with pytest.raises(TypeError, match="returned True for prompt 'p3'"):
        Custom(lambda group: True).reason(group((1.0, "stop")))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"Silent\.reason returned '' for prompt 'p3'; it must return a reason or None"):
        Filters([Silent()]).reason(group((1.0, "stop")))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: NoSignal(-1.0), "NoSignal.tolerance: -1"),
        (lambda: RewardBand(1.0, 0.0), "RewardBand.least: 1.0"),
        (lambda: TooManyTruncated(1.0), "TooManyTruncated.most: 1.0"),
        (lambda: Filters([]), "Filters.filters: empty"),
        (lambda: Filters([object()]), "object has no method reason"),  # type: ignore[list-item]
    ],
)
def test_arguments_out_of_range_are_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_yaml_composes_filters_and_takes_own_ones() -> None:
    parser = ArgumentParser()
    parser.add_argument("--filter", type=GroupFilter)
    own = {"class_path": "tests.datamodules.test_filters.Everything"}
    function = {
        "class_path": "datamodules.filters.Custom",
        "init_args": {"function": "tests.datamodules.test_filters.odd"},
    }
    signal = {"class_path": "datamodules.filters.NoSignal", "init_args": {"tolerance": 0.1}}
    chosen = {"class_path": "datamodules.filters.Filters", "init_args": {"filters": [signal, function, own]}}
    made = parser.instantiate_classes(parser.parse_object({"filter": chosen})).filter
    assert made.reason(group((1.0, "stop"))).startswith("no signal")
    assert made.reason(group((1.0, "stop"), (0.0, "stop"), (0.0, "stop"))) == "an odd number of sequences"
    assert "everything" in made.reason(group((1.0, "stop"), (0.0, "stop")))
