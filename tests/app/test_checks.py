"""Checks of options: each names the option, its value and what would do; what is not set passes, NaN does not."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest

from app import checks


@pytest.mark.parametrize("value", [math.nan, -1.0])
@pytest.mark.parametrize(
    "check",
    [
        lambda v: checks.at_least(1, {"a": 1, "key": v}),
        lambda v: checks.at_most(1, {"a": 1, "key": v if math.isnan(v) else 2}),
        lambda v: checks.positive({"a": 1, "key": v}),
        lambda v: checks.fraction({"a": 1, "key": v}),
        lambda v: checks.deadline({"a": 1, "key": v}),
        lambda v: checks.temperature("key", v),
        lambda v: checks.one_of("key", str(v), ("warn", "stop")),
    ],
)
def test_what_is_out_of_range_is_named_with_its_value(check: Callable[[float], None], value: float) -> None:
    with pytest.raises(ValueError, match=r"^key: '?(nan|-1\.0|2)'?, must be "):
        check(value)


def test_what_is_not_set_passes() -> None:
    for check in (lambda o: checks.at_least(1, o), lambda o: checks.at_most(1, o), checks.positive, checks.fraction):
        check({"key": None, "other": 1})
    checks.deadline({"key": None, "other": checks.LONGEST_S})
    checks.no_effect("without reward", {"key": None})


def test_zero_is_greedy_where_that_may_be() -> None:
    checks.temperature("key", 0.0)
    with pytest.raises(ValueError, match=r"key: 0\.0, must be between 0\.001 and 1000; why"):
        checks.temperature("key", 0.0, greedy=False, remedy="; why")


def test_what_would_be_ignored_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^key has no effect without reward; remove it or set reward$"):
        checks.no_effect("without reward", {"a": None, "key": False}, "remove it or set reward")


def test_importing_it_costs_no_torch() -> None:
    subprocess.run([sys.executable, "-c", "import app.checks, sys; assert 'torch' not in sys.modules"], check=True)
