"""How sure a number is: intervals of means and shares, paired comparisons, how many prompts would tell, and when
rewards are equal.

Promises: numpy alone; the prompt is the unit, since episodes of one prompt are alike; where values are 0 or 1 the
intervals hold at the ends of the scale too, where a resampled one has no width; nor has one of equal values, of which
it counts how many others may be unseen. Imports nothing of the project.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Z95 = 1.959963984540054  # of a two-sided 95% interval
Z80 = 0.8416212335729143  # of 80% power
RESAMPLES = 2000
ROUNDING = 1e-6
"""Of rewards: they are sums of parts, and float32 in a batch, so that 0.1 + 0.2 and 0.3 are one reward. Relative to
rewards above 1."""
_LEVEL = 0.05
"""Of tests: what is told where there is nothing, at most."""
_MISSED = 0.025
"""Chance at which a share is taken for unseen."""
_FEWEST = 6
"""Prompts that tell anything: of five, all of which differ one way, either test finds p = 2 / 2^5 = 0.0625."""
_STUDENT95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447}
"""Values -> Student's two-sided 95% quantile. A mean of so few drawn again never leaves their range, however often."""


def share_interval(count: float, of: float) -> tuple[float, float]:
    """Wilson's 95% interval of a share (Wilson 1927). `of` above 0."""
    share, more = count / of, Z95 * Z95 / of
    middle = (share + more / 2) / (1 + more)
    width = Z95 * math.sqrt(share * (1 - share) / of + more / (4 * of)) / (1 + more)
    return max(0.0, middle - width), min(1.0, middle + width)


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a solved one (Chen et al. 2021, eq. 1).
    k <= samples."""
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of independent values, one a prompt.

    Wilson's where all are 0 or 1. Where they lie between (shares of a prompt's samples, degrees), Wilson's of as many
    values of 0 and 1 as would vary so, fewer by Student's quantile (Korn and Graubard 1998): means near 0 and 1 are
    missed by prompts drawn again, one in seven. Of other values Student's of two to seven, and of more from prompts
    drawn again. A single value tells nothing: the interval is infinite.

    Of n values that are all the same, a share of up to 1 - 0.025^(1 / n) of all prompts may have others, which are
    taken to lie between 0 and 1 (or as far out as the values): the interval is what the mean may then be.
    """
    array = np.asarray(values, float)
    if _binary(array):
        return share_interval(float(array.sum()), len(array))
    if len(array) < 2:
        return -math.inf, math.inf
    if _equal(array):
        mean, unseen = float(array.mean()), _unseen(len(array))
        return mean + unseen * (min(0.0, mean) - mean), mean + unseen * (max(1.0, mean) - mean)
    if array.min() >= 0 and array.max() <= 1:
        mean = float(array.mean())
        alike = len(array) * mean * (1 - mean) / float(array.var(ddof=1)) * (Z95 / student95(len(array))) ** 2
        return share_interval(mean * alike, alike)
    return _interval(array)


def student95(n: int) -> float:
    """Student's two-sided 95% quantile for the mean of `n` values, two or more; of many by Fisher's expansion."""
    if n in _STUDENT95:
        return _STUDENT95[n]
    z, v = Z95, n - 1
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)


@dataclass(frozen=True)
class Paired:
    """B against A on the same prompts.

    Attributes:
        prompts: how many. difference: mean of B - A. low, high: its 95% interval. p: chance of a difference so large,
            in either direction, were there none.
        better, worse: prompts on which B is above A, below A. deviation: of B - A over prompts, standard.
        prompts_needed: that would tell this difference from none in four of five trials; None where it is 0.
    """

    prompts: int
    difference: float
    low: float
    high: float
    p: float
    better: int
    worse: int
    deviation: float
    prompts_needed: int | None

    @property
    def distinguishable(self) -> bool:
        """Whether the interval leaves 0 out and the test agrees. Of few prompts that are 0 or 1 the interval, which is
        approximate, alone finds a difference by chance in up to one of eight comparisons; the test is exact."""
        return (self.low > 0 or self.high < 0) and self.p <= _LEVEL

    def in_words(self) -> str:
        """What follows, in a sentence."""
        interval = f"95% interval {self.low:+.3f} to {self.high:+.3f}"
        counts = f"{self.better:,} prompts better, {self.worse:,} worse"
        if self.distinguishable:
            p = f"p = {self.p:.2g}" if self.p >= 0.001 else "p < 0.001"  # flipped signs show no less than 0.0005
            return f"{'better' if self.difference > 0 else 'worse'}; {interval}, {p}; {counts}"
        more = (
            f"; about {self.prompts_needed:,} prompts would tell a difference of this size"
            if self.prompts_needed
            else ""
        )
        return f"not distinguishable; {interval}, p = {self.p:.2g}; {counts}{more}"


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Compares two policies by their means on each prompt.

    Where all are 0 or 1: the interval of Bonett and Price (2012), which adds one prompt to either side, and McNemar's
    exact test. Else Student's interval of two to seven prompts, and of more from prompts drawn again; the test flips
    signs of differences. Where all differences are the same, the interval allows for as many prompts as may be unseen
    (`mean_interval`) that differ as much the other way, and tells them from 0 where that test would, from six prompts;
    where all are 0, for unseen ones that differ by the range of the values, 1 at least.

    Args:
        a, b: [n], n >= 2, entry i of both is prompt i.

    Raises:
        ValueError: not so.
    """
    first, second = np.asarray(a, float), np.asarray(b, float)
    if first.shape != second.shape or first.ndim != 1 or len(first) < 2:
        raise ValueError(
            f"paired: needs two values or more on each side, as many, got {first.shape} and {second.shape}"
        )
    each = second - first
    n, difference = len(each), float(each.mean())
    better, worse = int((each > 0).sum()), int((each < 0).sum())
    if _binary(first) and _binary(second):
        up, down = (better + 1) / (n + 2), (worse + 1) / (n + 2)
        variance = up + down - (up - down) ** 2
        half = Z95 * math.sqrt(variance / (n + 2))
        low, high = max(-1.0, up - down - half), min(1.0, up - down + half)
        p = mcnemar(better, worse)
    else:
        variance = float(each.var(ddof=1))
        low, high = _interval(each)
        if _equal(each):
            values = np.concatenate([first, second])
            apart = 2 * abs(difference) if each.any() else max(1.0, float(np.ptp(values)))
            low, high = difference - _unseen(n) * apart, difference + _unseen(n) * apart
        p = _sign_flips(each)
    needed = prompts_needed(variance, difference) if difference else None
    return Paired(n, difference, low, high, p, better, worse, math.sqrt(variance), needed)


def prompts_to_tell(found: Paired, least: float) -> int:
    """Prompts like those of `found`, on which `least` would differ from 0 as of `prompts_needed`. Where all differed
    alike, their number is what is unknown: so many that as few may be unseen as `paired` allows for within `least`."""
    if found.deviation > ROUNDING:
        return prompts_needed(found.deviation**2, least)
    apart = (found.high - found.low) / 2 / _unseen(found.prompts)
    return _FEWEST if least >= apart else max(_FEWEST, math.ceil(math.log(_MISSED) / math.log1p(-least / apart)))


def prompts_needed(variance: float, difference: float) -> int:
    """Prompts on which a mean difference of this size, which varies so over prompts, differs from 0 at the 5% level in
    four of five trials (normal approximation); six at least, of fewer no test tells. `difference` not 0."""
    return max(_FEWEST, math.ceil((Z95 + Z80) ** 2 * variance / difference**2))


def mcnemar(better: int, worse: int) -> float:
    """Exact two-sided p of McNemar (1947): whether prompts on which two policies differ fall to either side alike."""
    n, least = better + worse, min(better, worse)
    if n == 0:
        return 1.0
    logs = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2) for k in range(least + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def sign_flip_bound(differences: Sequence[float]) -> float:
    """Upper bound of the one-sided p of the test that flips signs: chance of so large a sum of `differences` [n], were
    each as likely with the other sign. Chernoff's bound, min over l >= 0 of E exp(l sum) / exp(l observed), so that a p
    far below what flips drawn at random can show costs a few passes. Of values -1, 0 and 1, where this is the exact
    sign test, it is within a factor of twenty of it. 1.0 where the sum is not above 0."""
    values = np.asarray(differences, float)
    values = values[values != 0]
    if values.sum() <= 0:
        return 1.0
    values /= math.sqrt(float(np.mean(values**2)))
    total, sizes, at = float(values.sum()), np.abs(values), 0.0
    for _ in range(8):  # Newton's steps, which come to the least from the left; any l is a bound
        slopes = np.tanh(at * sizes)
        at += (total - float(sizes @ slopes)) / float(sizes**2 @ (1 - slopes**2))
    log_cosh = np.logaddexp(at * sizes, -at * sizes) - math.log(2)
    return math.exp(min(0.0, float(log_cosh.sum()) - at * total))


def equal(rewards: Iterable[float], tolerance: float = 0.0) -> bool:
    """Whether the largest exceeds the smallest by `tolerance` or by rounding at most. One reward at least."""
    values = list(rewards)
    least, most = min(values), max(values)
    return most - least <= max(tolerance, ROUNDING * max(1.0, abs(least), abs(most)))


def _binary(values: npt.NDArray[np.float64]) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all()) and len(values) > 0


def _equal(values: npt.NDArray[np.float64]) -> bool:
    """But for rounding: 0.3 - 0.2 is not quite 0.6 - 0.5."""
    return bool(np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())))


def _unseen(n: int) -> float:
    """Largest share of a population that n draws all miss in one of forty trials (Clopper and Pearson 1934)."""
    return 1.0 - _MISSED ** (1 / n)


def _interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """95% interval of a mean; n >= 2. Of values that are all the same it would have no width."""
    if len(values) not in _STUDENT95:
        return _bootstrap(values)
    mean, half = float(values.mean()), student95(len(values)) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def _bootstrap(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """95% interval of a mean by percentiles of means of values drawn again, expanded for few values as by Hesterberg
    (2015, section 5.3); n >= 8. The same values have the same interval."""
    n, random = len(values), np.random.default_rng(0)
    at_a_time = max(1, 4_000_000 // n)
    parts = [
        values[random.integers(0, n, (min(at_a_time, RESAMPLES - done), n))].mean(1)
        for done in range(0, RESAMPLES, at_a_time)
    ]
    tail = 0.5 * math.erfc(math.sqrt(n / (n - 1)) * student95(n) / math.sqrt(2))
    low, high = np.quantile(np.concatenate(parts), [tail, 1 - tail])
    return float(low), float(high)


def _sign_flips(differences: npt.NDArray[np.float64]) -> float:
    """p of a permutation test; at least 1 / (RESAMPLES + 1)."""
    random, n = np.random.default_rng(0), len(differences)
    observed, seen = abs(differences.sum()) * (1 - 1e-12), 0
    at_a_time = max(1, 4_000_000 // n)
    for done in range(0, RESAMPLES, at_a_time):
        signs = random.integers(0, 2, (min(at_a_time, RESAMPLES - done), n)) * 2 - 1
        seen += int((np.abs(signs @ differences) >= observed).sum())
    return (seen + 1) / (RESAMPLES + 1)
