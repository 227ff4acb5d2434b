"""Dead, failed and missing ranks are named, and end the run where they have to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import watch_jobs as jobs
from tests.distributed.ranks import RankError, RankPool


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks of their own: some die."""
    pool = RankPool(2)
    yield pool
    pool.close()


def test_a_hung_collective_is_named_with_who_is_missing(pair: RankPool) -> None:
    message, printed = pair.run(jobs.one_is_missing)[0]
    for text in (message, printed):
        assert "sum over ranks" in text and "collective 3" in text
        assert "missing: rank 1 (host " in text and "lost_in_thought" in text
    assert message.startswith("rank 0 of 2: sum over ranks failed (collective 3)")
    assert "rank 0 has waited" in printed


def test_a_slow_rank_is_left_alone(pair: RankPool) -> None:
    assert pair.run(jobs.slow_but_alive) == ["2.0", "2.0"]


def test_a_failed_rank_ends_the_others_in_its_own_words(pair: RankPool) -> None:
    name, printed = pair.run(jobs.fail_while_the_other_computes)[0]
    assert name == "KeyboardInterrupt"
    assert "rank 0: this run ends, because rank 1" in printed and "ValueError: the reward of prompt-7 is NaN" in printed


def test_a_dead_rank_is_named_in_the_collective_it_left(pair: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pair.run(jobs.die_while_the_other_waits)
    assert "sum over ranks failed (collective 3)" in caught.value.messages[0]
    assert "rank 1 (host" in caught.value.messages[0] and "when it died" in caught.value.messages[0]


def test_a_dead_rank_ends_a_rank_that_computes(pair: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the process died"):
        pair.run(jobs.die_while_the_other_computes, report=tmp_path / "report", grace=40.0)
    said = (tmp_path / "report").read_text()
    assert said.startswith("KeyboardInterrupt rank 0: this run ends, because rank 1 (host ")
    assert "lost_in_thought) when it died" in said
