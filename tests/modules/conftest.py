"""Two ranks for all tests here: starting processes costs more than the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import RankPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()
