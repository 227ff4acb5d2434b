"""Intervals hold what they promise (simulated), tests agree with their tables, and prompts that are said to tell do."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from app.statistics import (
    equal,
    mcnemar,
    mean_interval,
    paired,
    prompts_needed,
    prompts_to_tell,
    share_interval,
    sign_flip_bound,
)

RANDOM = np.random.default_rng(7)


def test_known_values() -> None:
    assert share_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson's, as in textbooks
    assert share_interval(0, 20)[0] == 0.0 and share_interval(20, 20)[1] == 1.0
    assert mcnemar(10, 2) == pytest.approx(2 * (1 + 12 + 66) / 2**12) and mcnemar(0, 0) == 1.0 and mcnemar(3, 3) == 1.0
    assert mcnemar(900, 300) == pytest.approx(4.2e-71, rel=0.1)  # no overflow; normal tail: z = 17.3
    assert prompts_needed(0.25, 0.1) == 197  # (1.96 + 0.84)^2 * 0.25 / 0.01
    assert mean_interval([0.5]) == (-math.inf, math.inf)


def test_rewards_are_equal_to_rounding() -> None:
    assert equal([0.1 + 0.2, 0.3]) and equal([0.3]) and not equal([0.3, 0.3 + 1e-5])
    assert equal([1e5, 1e5 + 0.01]) and not equal([1e5, 1e5 + 1])  # float32 holds the first two as one or as neighbours
    assert equal([0.5, 0.51], tolerance=0.02) and not equal([0.5, 0.53], tolerance=0.02)


def covers(interval: tuple[float, float], truth: float) -> bool:
    return interval[0] <= truth <= interval[1]


@pytest.mark.parametrize(("truth", "n"), [(0.05, 40), (0.5, 60), (0.97, 100)])
def test_intervals_of_shares_cover(truth: float, n: int) -> None:
    counts = RANDOM.binomial(n, truth, 2000)
    assert 0.92 < np.mean([covers(share_interval(int(k), n), truth) for k in counts]) < 0.985


@pytest.mark.parametrize("n", [15, 60])
def test_intervals_of_means_cover(n: int) -> None:
    draws = RANDOM.beta(2, 5, (500, n))
    assert 0.915 < np.mean([covers(mean_interval(list(row)), 2 / 7) for row in draws]) < 0.985


@pytest.mark.parametrize(("a", "b", "samples"), [(0.02, 1, 4), (0.1, 10, 16), (0.3, 0.3, 4)])
@pytest.mark.parametrize("n", [8, 64])
def test_intervals_of_shares_of_samples_cover_near_the_ends_too(n: int, a: float, b: float, samples: int) -> None:
    """Prompts drawn again missed the truth in one of seven validations of 64 prompts, at an accuracy of 0.02."""
    draws = RANDOM.binomial(samples, RANDOM.beta(a, b, (600, n))) / samples
    found = [mean_interval(list(row)) for row in draws]
    assert np.mean([covers(one, a / (a + b)) for one in found]) > 0.9
    assert all(0 <= low <= np.mean(row) <= high <= 1 for (low, high), row in zip(found, draws, strict=True))


@pytest.mark.parametrize("n", [2, 7, 8, 40])
def test_equal_values_are_no_certainty(n: int) -> None:
    """Nothing else was seen, which a few prompts do not rule out."""
    low, high = mean_interval([0.7] * n)
    unseen = 1 - 0.025 ** (1 / n)
    assert (low, high) == pytest.approx((0.7 - 0.7 * unseen, 0.7 + 0.3 * unseen))
    assert mean_interval([1.0] * n)[1] == 1.0 and mean_interval([1.0] * n)[0] < 1.0  # Wilson's
    assert mean_interval([-1.0] * n) == pytest.approx((-1.0, -1.0 + 2 * unseen))
    assert mean_interval([5.0] * n) == pytest.approx((5.0 - 5.0 * unseen, 5.0))


def test_intervals_of_values_that_are_often_equal_cover() -> None:
    """All ten are equal in every third sample."""
    draws = np.where(RANDOM.random((1000, 10)) < 0.1, 0.0, 0.7)
    alike = [row for row in draws if len(set(row)) == 1]
    assert len(alike) > 250 and all(covers(mean_interval(list(row)), 0.63) for row in alike)


@pytest.mark.parametrize(("n", "told"), [(2, False), (5, False), (6, True), (30, True)])
def test_equal_differences_are_told_where_their_signs_tell(n: int, told: bool) -> None:
    before = np.linspace(0.1, 0.8, n)
    for found in (paired(before, before + 0.1), paired(before, before - 0.1)):
        assert found.distinguishable is told and found.low < found.difference < found.high
    same = paired(before, before)
    assert same.low == pytest.approx(-(1 - 0.025 ** (1 / n))) and not same.distinguishable


@pytest.mark.parametrize("n", [2, 3, 7])
def test_few_prompts_seldom_tell_what_is_not_there(n: int) -> None:
    """Values drawn again from so few would differ from 0 in every second pair of prompts."""
    told = [paired(np.zeros(n), row).distinguishable for row in RANDOM.normal(size=(400, n))]
    means = [covers(mean_interval(list(row)), 0.5) for row in RANDOM.uniform(0, 1, (400, n))]
    assert np.mean(told) < 0.1 and np.mean(means) > 0.88


@pytest.mark.parametrize("n", [6, 8, 10, 16])
def test_of_few_prompts_that_are_0_or_1_chance_is_told_once_in_twenty(n: int) -> None:
    """Over all that can happen where both are right equally often: the sum of the chances of what is told."""
    told = []
    for better in range(n + 1):
        for worse in range(n + 1 - better):
            a, b = np.zeros(n), np.zeros(n)
            b[:better], a[better : better + worse] = 1, 1
            if paired(a, b).distinguishable:
                told.append((better, worse, n - better - worse))
    assert told
    for either in (0.2, 0.4, 0.46, 0.5):
        share = (either, either, 1 - 2 * either)
        chances = (
            math.factorial(n) * math.prod(p**count / math.factorial(count) for p, count in zip(share, one, strict=True))
            for one in told
        )
        assert sum(chances) <= 0.05


def test_two_prompts_do_not_make_better() -> None:
    found = paired([0.2, 0.4], [0.3, 0.6])
    assert (found.low, found.high) == pytest.approx((0.15 - 12.706 * 0.05, 0.15 + 12.706 * 0.05))
    assert not found.distinguishable and found.in_words().startswith("not distinguishable; 95% interval -0.485")


@pytest.mark.parametrize(("up", "down", "n"), [(0.1, 0.1, 50), (0.3, 0.05, 80), (0.02, 0.01, 100)])
def test_paired_intervals_of_shares_cover(up: float, down: float, n: int) -> None:
    hits = []
    for kinds in RANDOM.choice(3, (600, n), p=[up, down, 1 - up - down]):
        found = paired((kinds == 1).astype(float), (kinds == 0).astype(float))
        hits.append(covers((found.low, found.high), up - down))
    assert np.mean(hits) > 0.93


def test_paired_intervals_of_degrees_cover() -> None:
    hits = []
    for _ in range(150):
        prompts = RANDOM.uniform(0, 1, 60)
        a, b = (prompts + RANDOM.normal(shift, 0.2, 60) for shift in (0.0, 0.1))
        found = paired(list(a), list(b))
        hits.append(covers((found.low, found.high), 0.1))
    assert np.mean(hits) > 0.88


def test_no_difference_is_seldom_told_and_the_prompts_needed_tell_it() -> None:
    def told(up: float, down: float, n: int, trials: int) -> float:
        draws = RANDOM.choice(3, (trials, n), p=[up, down, 1 - up - down])
        return float(np.mean([paired(k == 1, k == 0).distinguishable for k in draws]))

    assert told(0.1, 0.1, 100, 400) < 0.08
    up, down = 0.15, 0.05
    needed = prompts_needed(up + down - (up - down) ** 2, up - down)
    assert 0.7 < told(up, down, needed, 300) < 0.9


@pytest.mark.parametrize(
    "differences", [[1.0] * 5, [1.0, 1.1, 0.9], [0.5, 0.6, 0.7, 0.4, 0.5], [-0.1, -0.2, -0.15, -0.1]]
)
def test_fewer_prompts_than_any_test_needs_are_not_said_to_tell(differences: list[float]) -> None:
    """Of five that all differ one way p is 2 / 2^5; "about 2 prompts would tell" was said of three that had not."""
    found = paired([0.0] * len(differences), differences)
    assert not found.distinguishable and found.prompts_needed == 6
    assert "about 6 prompts would tell" in found.in_words()
    assert prompts_to_tell(found, 5.0) == 6 and paired([0.0] * 6, [1.0, 1.1, 0.9, 1.2, 0.8, 1.3]).distinguishable


def test_pairs_take_away_what_prompts_differ_in() -> None:
    hard = np.linspace(0, 1, 30)
    found = paired(list(hard), list(hard + 0.05 + 0.01 * np.sin(np.arange(30))))
    assert found.distinguishable and found.better == 30 and found.p < 0.01 and "better; 95%" in found.in_words()


def test_no_smaller_chance_is_told_than_signs_can_show() -> None:
    """p of 30 equal signs is 2 / 2**30; those drawn at random end at 1 / 2001, which is no estimate of it."""
    found = paired([0.0] * 30, [0.5 + i / 100 for i in range(30)])
    assert found.p == pytest.approx(1 / 2001) and "p < 0.001;" in found.in_words()
    assert "p = 0.016;" in paired([0.0] * 40, [1.0] * 7 + [0.0] * 33).in_words()


def test_alike_is_not_told() -> None:
    found = paired([1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0])
    assert not found.distinguishable and found.p == 1.0 and found.prompts_needed is None
    assert found.low < 0 < found.high and "not distinguishable" in found.in_words()
    few = paired([1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0])
    assert not few.distinguishable and few.prompts_needed is not None and "would tell" in few.in_words()


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0]), ([1.0, 0.0], [1.0]), ([], [])])
def test_what_cannot_be_compared(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="two values or more"):
        paired(a, b)


@pytest.mark.parametrize(("up", "down"), [(1, 0), (20, 0), (1000, 0), (10, 3), (102, 25), (600, 400)])
def test_the_bound_of_sign_flips_is_near_the_exact_sign_test(up: int, down: int) -> None:
    exact = sum(math.comb(up + down, k) for k in range(down + 1)) / 2 ** (up + down)
    assert exact <= sign_flip_bound([1.0] * up + [0.0] * 5 + [-1.0] * down) < 20 * exact


def test_the_bound_of_sign_flips_holds_for_any_degrees() -> None:
    for n in range(1, 12):
        values = np.abs(RANDOM.standard_t(2, n))  # some far larger than the others
        sums = np.array(list(itertools.product((1, -1), repeat=n))) @ values
        for observed in RANDOM.integers(0, 2, (20, n)) * 2 - 1:
            found = sign_flip_bound(list(values * observed))
            assert found <= 1.0 and np.mean(sums >= values @ observed - 1e-9) <= found
    assert sign_flip_bound([]) == sign_flip_bound([0.0, 0.0]) == sign_flip_bound([1.0, -1.0]) == 1.0


def test_where_nothing_differed_as_many_prompts_would_tell_as_the_interval_says() -> None:
    """Two are not enough where the interval of twenty-four is wider than what is to be told."""
    same = paired([0.0, 0.25, 0.5] * 8, [0.0, 0.25, 0.5] * 8)
    assert same.low < -0.05 and same.high > 0.05
    needed = prompts_to_tell(same, 0.05)
    assert needed == 72 and paired([0.5] * needed, [0.5] * needed).high <= 0.05 < paired([0.5] * 71, [0.5] * 71).high
    assert prompts_to_tell(same, 2.0) == 6
    found = paired([0.0, 0.5, 0.1, 0.9], [0.2, 0.4, 0.7, 0.8])
    assert prompts_to_tell(found, 0.05) == prompts_needed(found.deviation**2, 0.05)
