"""Advantages against naive Python (`naive_advantages`), on random groups of unequal size, torn ones and long ones."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.batch import BatchError, RolloutBatch
from app.functions import choose
from modules.advantages import ADVANTAGES, Estimate
from modules.algorithm import ADVANTAGE_INPUTS
from modules.episodes import episodes, turns
from tests.helpers.tiny_policy import make_batch
from tests.modules.advantages import naive_advantages as naive
from tests.modules.advantages.batches import Play, column, plays, random_play, to_batch

CASES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"std": "batch"}),
    ("grpo", {"mean": "batch", "std": "batch"}),
    ("grpo", {"mean": "none", "std": "none"}),
    ("grpo", {"mean": "batch", "std": "none"}),
    ("dr_grpo", {}),
    ("rloo", {}),
    ("reward", {}),
    ("discounted", {}),
    ("discounted", {"gamma": 0.5, "std": "none"}),
    ("discounted", {"gamma": 1.0}),
    ("distill", {}),
    ("distill", {"task": 0.5}),
    ("distill", {"task": 2.0, "std": "group"}),
    ("reinforce_pp", {}),
    ("reinforce_pp", {"baseline": "group", "gamma": 0.9}),
    ("tree", {}),
    ("tree", {"std": "group"}),
    ("gae", {}),
    ("gae", {"gamma": 0.9, "lam": 0.5, "whiten": False}),
    ("gae", {"lam": 0.0, "whiten": False}),
    ("gae", {"lam": 1.0, "whiten": False}),
    ("gae", {"value_lam": 1.0}),
    ("gae_turn", {}),
    ("gae_turn", {"gamma": 0.9, "lam": 0.5, "whiten": False}),
]


def estimate(name: str, batch: RolloutBatch, given: list[Play], **options: Any) -> Any:
    choice = choose("advantage", name, options, ADVANTAGES, ("batch", "values", "token_rewards"))
    inputs = {"values": column(batch, given, "values"), "token_rewards": column(batch, given, "token_rewards")}
    return choice({"batch": batch, **inputs})


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row])


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@settings(max_examples=12, deadline=None)
@given(given=plays(), whole=st.booleans())
def test_equals_naive_python(name: str, options: dict[str, Any], given: list[Play], whole: bool) -> None:
    batch = to_batch(given, whole)
    found = estimate(name, batch, given, **options)
    expected = getattr(naive, name)(given, **options)
    if isinstance(found, Estimate):
        expected, returns = expected
        torch.testing.assert_close(found.returns[found.value_mask], flat(returns), rtol=1e-5, atol=1e-5)
        found = found.advantages
    torch.testing.assert_close(found[batch.loss_mask], flat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_order_of_sequences_does_not_matter(name: str, options: dict[str, Any]) -> None:
    rng = random.Random(3)
    given = [random_play(rng, g, turns) for g in range(3) for turns in (1, 4, 2)]
    plain = to_batch(given)
    order = rng.sample(range(len(plain)), len(plain))
    inputs = {key: column(plain, given, key) for key in ("values", "token_rewards")}
    for key, value in inputs.items():
        plain.add_column(key, value)
    shuffled = plain.select(order)
    choice = choose("advantage", name, options, ADVANTAGES, ("batch", "values", "token_rewards"))
    expected, got = (choice({"batch": b, **b.columns}) for b in (plain, shuffled))
    pairs = zip(expected, got) if isinstance(expected, Estimate) else [(expected, got)]
    for one, other in pairs:
        torch.testing.assert_close(other, one[plain.flat_index(order)], rtol=1e-5, atol=1e-6)


def rows(*given: tuple[int, float, int]) -> list[Play]:
    """(group, reward, turns) of each episode, every answer another one."""
    made = []
    for number, (group, reward, count) in enumerate(given):
        spoken = [([group + 1] if k == 0 else [5], [10 + number]) for k in range(count)]
        made.append(Play(group, reward, spoken, [[0.0]] * count, [[0.0]] * count))
    return made


def test_an_episode_of_twenty_turns_counts_once() -> None:
    given = rows((0, 1.0, 20), (0, 0.0, 1))
    batch = to_batch(given)
    # Over episodes the mean is 0.5 and the deviation sqrt(0.5); over turns they would be 0.95 and 0.22.
    values = estimate("grpo", batch, given)[batch.loss_mask]
    torch.testing.assert_close(values, torch.tensor([0.5**0.5] * 20 + [-(0.5**0.5)]), atol=1e-5, rtol=0)
    assert estimate("rloo", batch, given)[batch.loss_mask].tolist() == [1.0] * 20 + [-1.0]
    assert estimate("discounted", batch, given, gamma=0.5, std="none")[batch.loss_mask].tolist() == [
        0.5 ** (20 - k) for k in range(20)
    ] + [-0.5]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "discounted", "reinforce_pp", "tree", "gae", "gae_turn"])
def test_equal_rewards_are_neutral(name: str) -> None:
    given = rows((0, 0.25, 1), (0, 0.25, 1), (0, 0.25, 1))
    batch = to_batch(given)
    found = estimate(name, batch, given)
    found = found.advantages if isinstance(found, Estimate) else found
    assert found[batch.loss_mask].abs().max() == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {}),
        ("grpo", {"std": "batch"}),
        ("discounted", {}),
        ("reinforce_pp", {}),
        ("reinforce_pp", {"baseline": "group"}),
        ("tree", {"std": "group"}),
        ("rloo", {}),
    ],
)
def test_rewards_that_are_equal_but_for_rounding_are_neutral(name: str, options: dict[str, Any]) -> None:
    """Sums of parts in float32, far enough from 0 that their differences exceed every eps."""
    totals = [30.3 + 20.4 + 29.4, 80.1, 0.3 + 0.1 + 79.7, float(torch.tensor(35.7) + torch.tensor(44.4))]
    totals = [float(torch.tensor(total)) for total in (*totals, 80.1 + 1.5e-5)]
    assert max(totals) - min(totals) > 1e-5
    given = rows(*((0, total, 1) for total in totals), (1, 3.0, 1), (1, 3.0, 1))
    if name == "reinforce_pp" and not options:  # what it centres is the batch
        given = given[:-2]
    assert estimate(name, to_batch(given), given, **options)[to_batch(given).loss_mask].abs().max() == 0


def test_tree_credits_a_turn_against_its_siblings() -> None:
    """Two ways to begin, and after the first of them two ways to go on: the numbers by hand."""
    begin, other, left, right = [3], [4], [5], [6]
    zeros = [[0.0]] * 2
    given = [
        Play(0, 1.0, [([1], begin), ([2], left)], zeros, zeros),
        Play(0, 0.0, [([1], begin), ([2], right)], zeros, zeros),
        Play(0, 0.0, [([1], other), ([2], left)], zeros, zeros),
        Play(0, 0.0, [([1], other), ([2], left)], zeros, zeros),
    ]
    batch = to_batch(given)
    values = estimate("tree", batch, given)[batch.loss_mask]
    # Beginning well is worth 0.5 where 0.25 is usual, and then "left" 1 where 0.5 is usual. After "other" nobody did
    # anything else, so the second turn shares the credit of the first.
    torch.testing.assert_close(values, torch.tensor([0.25, 0.5, 0.25, -0.5, -0.25, -0.25, -0.25, -0.25]))


def test_tree_without_branches_is_dr_grpo() -> None:
    given = rows((0, 1.0, 3), (0, 0.0, 2), (0, 0.5, 1), (1, 1.0, 2), (1, 0.0, 2))
    batch = to_batch(given)
    expected = estimate("dr_grpo", batch, given)
    torch.testing.assert_close(estimate("tree", batch, given)[batch.loss_mask], expected[batch.loss_mask])


def test_gae_of_the_paper_ends() -> None:
    """lambda 1 is the return minus the value, lambda 0 the one-step error (Schulman et al. 2016, eqs. 17 and 18)."""
    given = [Play(0, 1.0, [([1], [2, 3, 4])], [[0.2, 0.5, 0.7]], [[0.0, 0.0, 0.0]])]
    batch = to_batch(given)
    ones, zeros = (estimate("gae", batch, given, lam=lam, whiten=False).advantages[-3:] for lam in (1.0, 0.0))
    torch.testing.assert_close(ones, torch.tensor([0.8, 0.5, 0.3]))
    torch.testing.assert_close(zeros, torch.tensor([0.3, 0.2, 0.3]))


def test_a_single_trained_token() -> None:
    given = rows((0, 1.0, 1))
    batch = to_batch(given)
    assert estimate("gae", batch, given).advantages[-1] == 0  # centred, not divided by the deviation of one
    assert estimate("gae", batch, given, whiten=False).advantages[-1] == 1
    assert estimate("gae_turn", batch, given, whiten=False).returns[-1] == 1


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_all_tokens_masked(name: str) -> None:
    given = rows((0, 1.0, 2), (0, 0.0, 1))
    batch = to_batch(given)
    batch.loss_mask[:] = False
    zeros = torch.zeros(batch.num_tokens)
    choice = choose("advantage", name, {}, ADVANTAGES, ADVANTAGE_INPUTS)
    found = choice({"batch": batch, **dict.fromkeys(ADVANTAGE_INPUTS[1:], zeros)})
    assert torch.isfinite(found.advantages if isinstance(found, Estimate) else found).all()


def test_episodes_and_turns_of_a_batch() -> None:
    batch = make_batch(groups=2, episodes=3)
    rewards, groups, of_sequence = episodes(batch)
    assert groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert of_sequence.tolist() == batch.episode_ids.tolist()
    torch.testing.assert_close(rewards[of_sequence].float(), batch.rewards)
    found = turns(batch, of_sequence)
    assert found.episode.tolist() == [0, 1, 2, 2, 2, 3, 4, 5, 5, 5]
    assert found.place.tolist() == [0, 0, 0, 1, 2] * 2 and found.of.tolist() == [1, 1, 3, 3, 3] * 2
    assert (found.of_token >= 0).tolist() == batch.loss_mask.tolist()


@pytest.mark.parametrize("name", ["grpo", "rloo", "discounted", "tree"])
def test_groups_of_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torn = rows((0, 1.0, 1), (0, 0.0, 2), (3, 1.0, 5))
    batch = to_batch(torn)
    with caplog.at_level(logging.WARNING):
        values = estimate(name, batch, torn)
    assert values[batch.loss_mask][-5:].abs().max() == 0 and "prompt-3" in caplog.text
    alone = rows((3, 1.0, 5))
    with pytest.raises(BatchError, match=r"group 21 \(prompt 'prompt-3'\) has a single episode.*group_size"):
        estimate(name, to_batch(alone), alone)


def test_turns_of_one_episode_with_different_rewards_are_refused() -> None:
    given = rows((0, 1.0, 2), (0, 0.0, 1))
    batch = to_batch(given)
    batch.rewards[1] = 0.25
    with pytest.raises(BatchError, match=r"rewards: episode 0 \(prompt 'prompt-0'\) has rewards from 0.25 to 1.0"):
        estimate("grpo", batch, given)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"mean": "turn"}, "advantage_options.mean: 'turn', must be one of group, batch, none"),
        ("discounted", {"gamma": 0.0}, "advantage_options.gamma: .*, must be above 0"),
        ("gae", {"lam": 1.5}, "advantage_options.lam: .*, must be between 0 and 1"),
        ("gae_turn", {"gamma": -1.0}, "advantage_options.gamma"),
        ("reinforce_pp", {"baseline": "batch"}, "advantage_options.baseline: 'batch', must be one of none, group"),
        ("tree", {"std": "batch"}, "advantage_options.std"),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any], message: str) -> None:
    given = rows((0, 1.0, 1), (0, 0.0, 1))
    with pytest.raises(ValueError, match=message):
        estimate(name, to_batch(given), given, **options)


@pytest.mark.parametrize("name", ["grpo", "discounted"])
@pytest.mark.parametrize("options", [{"mean": "none"}, {"mean": "batch"}, {"mean": "none", "std": "batch"}])
def test_what_is_not_centred_on_its_scale_is_refused(name: str, options: dict[str, Any]) -> None:
    """A group whose rewards are all 1 would have advantages of 1e6, in silence."""
    given = [random_play(random.Random(k), 0, 1) for k in range(2)]
    with pytest.raises(ValueError, match=r"advantage_options: mean .* advantages reach 1e6; set std to none"):
        estimate(name, to_batch(given), given, **options)
