"""One rank of a real run with parameters in shards is killed at a random moment: named, ended, gone on with, nothing
differs."""

from __future__ import annotations

import random

import pytest

from tests.faults.soak_ranks import soak


@pytest.mark.slow
def test_a_rank_with_shards_is_killed() -> None:
    found = soak("shards", steps=6, kills=1, choice=random.SystemRandom())
    assert found["passed"], found
