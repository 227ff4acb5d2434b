"""Over a group like NCCL's, whose operations are enqueued: a rank that is missing is named, and nothing but gradients
and weights travels there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.strategies.ranks import watch
from app.strategies.ranks.watch import Progress
from tests.app.strategies import toy_module
from tests.app.strategies.ranks import late_jobs as jobs
from tests.app.strategies.ranks.watch_jobs import becomes
from tests.helpers.rank_pool import RankPool
from tests.modules.ranks.training_jobs import train

START = 170.0  # seconds: processes import everything the first time


def test_a_collective_that_is_only_enqueued_is_not_left() -> None:
    progress, finished = Progress(), set[int]()
    for number in (1, 2):
        progress.enter(f"reduce-scatter {number}")
        progress.enqueue(lambda number=number: number in finished)
        progress.leave()
    progress.enter("sum")
    waiting = progress.current
    assert waiting is not None and (waiting.number, waiting.what) == (1, "reduce-scatter 1")
    finished.add(1)
    waiting = progress.current
    assert waiting is not None and (waiting.number, waiting.what) == (2, "reduce-scatter 2")
    finished.add(2)
    assert progress.unfinished is None
    waiting = progress.current
    assert waiting is not None and (waiting.number, waiting.what) == (3, "sum")
    progress.leave()
    assert progress.current is None and progress.count == 3


def test_a_rank_missing_from_a_gradient_exchange_is_named(two_ranks: RankPool, tmp_path: Path) -> None:
    places, message, printed = two_ranks.run(jobs.miss_a_gradient_exchange, START, over=tmp_path / "over")[0]
    assert places == [None, "3: reduce-scatter of gradients (bucket 1)"]
    assert message.startswith(
        "rank 0 of 2: reduce-scatter of gradients (bucket 1) failed (collective 3): not done after"
    )
    assert "rank 0 has waited" in printed and "in reduce-scatter of gradients (bucket 1) (collective 3)" in printed
    for text in (message, printed):
        assert "missing: rank 1 (host " in text and "lost_in_thought" in text


def test_it_is_named_while_the_thread_is_kept_by_its_device(two_ranks: RankPool, tmp_path: Path) -> None:
    printed = two_ranks.run(jobs.hang_in_the_device, START, over=tmp_path / "over")[0]
    assert "in reduce-scatter of gradients (collective 2)" in printed and "missing: rank 1 (host " in printed


def test_a_thread_that_its_device_keeps_for_good_is_ended_by_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "GRACE", 0.0)
    progress = Progress()
    mine = watch.RankWatch(0, 2, "127.0.0.1", progress, 0.2, 0.6)
    mine.close()  # its thread would end these tests
    mine.start(mine.invitation())
    progress.enter("all-gather of parameters")
    assert mine._overdue() is None
    progress.enqueue(lambda: False)
    progress.leave()
    assert becomes(lambda: mine._overdue() is not None)
    mine._publish()
    said = mine._overdue()
    assert said is not None and said.startswith("rank 0 (host ")
    assert "waits in collective 1, all-gather of parameters, for" in said and "longer than it may" in said


def test_nothing_else_travels_there(two_ranks: RankPool, tmp_path: Path) -> None:
    """A whole fit with validation, checkpoints and logging; the same parameters as over gloo alone."""
    expected = two_ranks.run(toy_module.fit, START, directory=tmp_path / "gloo", devices=2, steps=3, data_steps=3)[0]
    for parameters, operations in two_ranks.run(jobs.fit, START, directory=tmp_path / "late", module="toy"):
        assert all(torch.equal(parameters[name], value) for name, value in expected["parameters"].items())
        assert set(operations) == {"broadcast", "reduce-scatter", "all-gather"}


def test_nothing_of_a_policy_travels_there(two_ranks: RankPool, tmp_path: Path) -> None:
    parameters, _, validation = two_ranks.run(train, START, devices=2, kind="two", minibatches=2)[0]
    for found, operations in two_ranks.run(jobs.fit, START, directory=tmp_path, module="policy"):
        for name, value in parameters.items():
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)
        assert {name: found[name] for name in validation} == pytest.approx(validation, rel=1e-5)
        assert set(operations) == {"broadcast", "reduce-scatter", "all-gather"}
