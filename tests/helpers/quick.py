"""Which cases of a test `make test` runs: some of each kind. `make test-all` runs all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters of a test (of several arguments: tuples), those that are not among `quick` marked slow."""
    values = list(values)
    strange = [one for one in quick if one not in values]
    assert not strange, f"{strange} are no cases of this test: nothing of them would run"
    marks = {True: [], False: pytest.mark.slow}
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=marks[one in quick]) for one in values]
