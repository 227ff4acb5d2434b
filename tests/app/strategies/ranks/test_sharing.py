"""What rank 0 says travels bit for bit, a batch once; answers come back, errors reach everybody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from app.batch import RolloutBatch, Trajectory
from tests.app.strategies import zero1_jobs as jobs
from tests.app.strategies.ranks import sharing_jobs as sharing
from tests.helpers.pictured import picture, pictured_batch
from tests.helpers.rank_pool import RankError, RankPool

START = 170.0  # seconds: four processes import everything the first time


def _batch(lengths: tuple[int, ...] = (3, 1, 8), seed: int = 3) -> RolloutBatch:
    generator = torch.Generator().manual_seed(seed)
    trajectories = [
        Trajectory(
            tokens=torch.randint(0, 2**31, (length,), generator=generator),
            loss_mask=torch.arange(length) % 2 == 1,
            behavior_logprobs=-torch.rand(length, generator=generator),
            versions=torch.full((length,), i - 1),
            reward=0.1 * i,
            group_id=i // 2,
            episode_id=i,
            prompt_id=f"prompt-{i}-é",
            finish_reason="length",
            temperature=0.7,
            metadata={"answer": [i, None], "text": "naïve"},
        )
        for i, length in enumerate(lengths)
    ]
    batch = RolloutBatch.from_trajectories(trajectories)
    batch.add_column("advantages", torch.randn(sum(lengths), generator=generator))
    return batch


def _assert_equal(got: RolloutBatch | None, batch: RolloutBatch | None, bare: bool) -> None:
    """`bare`: without columns and metadata."""
    if got is None or batch is None:
        assert got is batch
        return
    expected = {name: tensor for name, tensor in batch.tensors().items() if not (bare and "columns" in name)}
    assert got.tensors().keys() == expected.keys()
    for name, tensor in got.tensors().items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    assert [(one.key, one.pixels.tobytes()) for one in got.pictures] == [
        (one.key, one.pixels.tobytes()) for one in batch.pictures
    ]
    metadata = [{}] * len(batch) if bare else batch.metadata
    assert (got.prompt_ids, got.finish_reasons, got.metadata) == (batch.prompt_ids, batch.finish_reasons, metadata)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_rank_hears_and_answers(size: int, two_ranks: RankPool, four_ranks: RankPool) -> None:
    """Of two batches, of one again, and of none; only the first time that one is named it travels."""
    batches = [_batch((3, 1, 8, 5)), _batch((2, 40), seed=4)]
    values = {"a": torch.randn(17), "runs": torch.ones(1000), "none": torch.zeros(0), "flags": torch.tensor([True])}
    asked: list[Any] = [([2, "é"], 0), ([3], 0), ([1], None), ([4], 1)]
    pool = {2: two_ranks, 4: four_ranks}[size]
    results = pool.run(sharing.exchange, START, asked=asked, batches=batches, said=([[0], []], 1, values))
    for rank, seen in enumerate(results):
        assert [words for words, _ in seen.served] == [words for words, _ in asked]
        for (_, batch), (_, number) in zip(seen.served, asked, strict=True):
            _assert_equal(batch, None if number is None else batches[number], bare=rank > 0)
        assert seen.said[0] == [[0], []]
        _assert_equal(seen.said[1], batches[1], bare=rank > 0)
        assert seen.said[2].keys() == values.keys()
        assert all(torch.equal(seen.said[2][name], value) for name, value in values.items())
        assert seen.said[2]["flags"].dtype == torch.bool
        assert seen.received == results[0].received
    first, again, nothing, other, said = results[0].received
    assert again < first / 2 and nothing < first / 2 and other > 2 * again and said < 1500
    assert [seen.bytes_sent for seen in results] == [sum(results[0].received)] + [0] * (size - 1)
    for (words, number), answers in zip(asked, results[0].answers, strict=True):
        expected = torch.zeros(0) if number is None else words[0] * batches[number].behavior_logprobs
        assert len(answers) == size and all(torch.equal(answer, expected) for answer in answers)


def test_pictures_travel_once_with_their_batch(two_ranks: RankPool) -> None:
    batch = pictured_batch()
    large = picture(9, height=200, width=200)
    batch.pictures = (large, batch.pictures[1])
    results = two_ranks.run(sharing.exchange, START, asked=[([1], 0), ([2], 0)], batches=[batch], said=(None, 0, {}))
    for rank, seen in enumerate(results):
        for _, served in seen.served:
            _assert_equal(served, batch, bare=rank > 0)
        _assert_equal(seen.said[1], batch, bare=rank > 0)
    first, *later = results[0].received
    assert large.pixels.nbytes < first < large.pixels.nbytes * 1.1 and sum(later) < large.pixels.nbytes / 20


def test_a_batch_is_forgotten_on_demand(two_ranks: RankPool) -> None:
    first, again, anew = two_ranks.run(sharing.forgets, START, batch=_batch())[0]
    assert again < first / 2 and anew == first


def test_one_process_keeps_its_own_object() -> None:
    assert sharing.keeps_its_object(_batch())


@pytest.mark.parametrize("after", [0, 2])
def test_rank_zero_errors_reach_every_rank(two_ranks: RankPool, after: int) -> None:
    with pytest.raises(RankError) as caught:
        two_ranks.run(sharing.fail_at_rank_zero, error="the reward of prompt-7 is NaN", after=after)
    assert set(caught.value.messages) == {0, 1}
    assert all("ValueError: the reward of prompt-7 is NaN" in text for text in caught.value.messages.values())
    assert "RankZeroError" in caught.value.messages[1]


def test_what_cannot_be_sent_is_such_an_error(two_ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        two_ranks.run(sharing.fail_at_rank_zero, error="", after=1, said={1, 2})
    assert set(caught.value.messages) == {0, 1}
    assert all("set is not JSON serializable" in text for text in caught.value.messages.values())


@pytest.mark.parametrize("failing", [(0,), (1,), (1, 3), (0, 2)])
@pytest.mark.slow  # four processes import everything
def test_a_failed_forward_pass_ends_all_ranks_at_once(failing: tuple[int, ...], four_ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        four_ranks.run(sharing.fail_while_serving, failing=failing)
    messages = caught.value.messages
    assert set(messages) == {0, 1, 2, 3}
    for rank, message in messages.items():
        assert f"MemoryError: rank {rank if rank in failing else failing[0]} has no memory left" in message
        assert ("RankZeroError" in message) == (rank not in (0, *failing))
    if 0 not in failing:
        assert f"failed on rank {failing[0]}" in messages[0] and f"(ranks: {list(failing)})" in messages[0]


@pytest.mark.slow  # four processes import everything
def test_after_an_error_nothing_is_left_on_the_way(four_ranks: RankPool) -> None:
    assert four_ranks.run(sharing.fail_while_serving, failing=(1,), then_go_on=True) == [(sharing.NOTHING, [4.0])] * 4


def test_sum_leaves_its_argument_alone(two_ranks: RankPool) -> None:
    for rank, (mine, total) in enumerate(two_ranks.run(jobs.sum_tensor)):
        assert mine.tolist() == [rank + 1, 10]
        assert total.tolist() == [3, 20] and total.dtype == torch.int64


def test_a_dead_rank_is_an_error_that_says_who_waits_for_what(two_ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        two_ranks.run(jobs.die_in_collective)
    assert "rank 0 of 2: sum over ranks failed" in caught.value.messages[0]


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks of their own: they are left in the middle of something."""
    pool = RankPool(2)
    yield pool
    pool.close()


def test_a_rank_that_never_hears_is_named_in_time(pair: RankPool, tmp_path: Path) -> None:
    message = pair.run(sharing.lose_a_rank, START, over=tmp_path / "over")[0]
    assert message.startswith("rank 0 of 2: ") and "a message of rank 0" in message
    assert "missing: rank 1 (host " in message and "lost_in_thought" in message


def test_a_rank_that_dies_serving_is_named(pair: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pair.run(sharing.die_while_serving, START)
    assert "answers to rank 0" in caught.value.messages[0] and "rank 1 (host" in caught.value.messages[0]
    assert "when it died" in caught.value.messages[0]
