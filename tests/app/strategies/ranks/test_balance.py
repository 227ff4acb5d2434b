"""The partition follows the times of this run, on all ranks alike, and only where they say something."""

from __future__ import annotations

import math

import numpy as np
import pytest

from app.strategies.ranks.balance import DEFAULT_RATIO, fit
from tests.app.strategies import zero1_jobs as jobs
from tests.helpers.rank_pool import RankPool

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1_000, 60_000, 40).astype(float)
PAIRS = TOKENS * RNG.uniform(500, 12_000, 40)


def _observations(a: float, b: float, noise: float = 0.0) -> list[tuple[float, float, float]]:
    times = (a * TOKENS + b * PAIRS) * (1 + noise * RNG.standard_normal(40))
    return list(zip(TOKENS.tolist(), PAIRS.tolist(), times.tolist()))


def test_exact_times_give_their_coefficients() -> None:
    seconds, ratio = fit([*_observations(2e-5, 6e-9), (0.0, 0.0, 0.0), (math.nan,) * 3], DEFAULT_RATIO)
    assert seconds == pytest.approx(2e-5) and ratio == pytest.approx(3e-4)


def test_noisy_times_come_close() -> None:
    assert fit(_observations(2e-5, 6e-9, noise=0.1), DEFAULT_RATIO)[1] == pytest.approx(3e-4, rel=0.3)


@pytest.mark.parametrize(
    "observations",
    [
        [],
        [(100.0, 5e5, 0.1), (200.0, 1e6, 0.2)],  # too few
        [(n, 5000.0 * n, 1e-5 * n) for n in TOKENS],  # one depth: tokens and pairs cannot be told apart
        _observations(2e-5, 0.0),  # no sign of attention at all
    ],
)
def test_times_that_say_nothing_change_nothing(observations: list[tuple[float, float, float]]) -> None:
    assert fit(observations, 1e-4)[1] == 1e-4


def test_ranks_agree_and_measure_their_imbalance(two_ranks: RankPool) -> None:
    results = two_ranks.run(jobs.calibrate, enabled=True)
    (ratios, imbalances), (others, _) = results
    assert ratios == others
    assert ratios[:9] == [DEFAULT_RATIO] * 9 and ratios[-1] == pytest.approx(3e-4)
    assert imbalances[-1] == pytest.approx(4 / 3)  # one rank takes twice as long as the other
    assert two_ranks.run(jobs.calibrate, enabled=False)[0][0] == [DEFAULT_RATIO] * 30
