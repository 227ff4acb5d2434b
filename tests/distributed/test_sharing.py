"""Batches travel from rank 0 to all ranks bit for bit, and errors travel too."""

from __future__ import annotations

import pytest
import torch

from app.batch import RolloutBatch, Trajectory
from tests.distributed import jobs
from tests.distributed.ranks import RankError, RankPool


def _batch() -> RolloutBatch:
    generator = torch.Generator().manual_seed(3)
    trajectories = [
        Trajectory(
            tokens=torch.randint(0, 2**31, (length,), generator=generator),
            loss_mask=torch.arange(length) % 2 == 1,
            behavior_logprobs=torch.randn(length, generator=generator),
            versions=torch.full((length,), i - 1),
            reward=0.1 * i,
            group_id=i // 2,
            episode_id=i,
            prompt_id=f"prompt-{i}-é",
            finish_reason="length",
            temperature=0.7,
            metadata={"answer": [i, None], "text": "naïve"},
        )
        for i, length in enumerate((3, 1, 8))
    ]
    batch = RolloutBatch.from_trajectories(trajectories)
    batch.add_column("advantages", torch.randn(12, generator=generator))
    return batch


def test_round_trip(two_ranks: RankPool) -> None:
    batch = _batch()
    for received in two_ranks.run(jobs.share, batches={0: batch}):
        expected = batch.tensors()
        assert received.tensors().keys() == expected.keys()
        for name, tensor in received.tensors().items():
            assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
        assert received.prompt_ids == batch.prompt_ids
        assert received.finish_reasons == batch.finish_reasons
        assert received.metadata == batch.metadata


def test_one_process_keeps_its_own_object() -> None:
    batch = _batch()
    assert jobs.share({0: batch}) is batch


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (None, "the reward of prompt-7 is NaN", "ValueError: the reward of prompt-7 is NaN"),
        (None, None, "rank 0 owns the stream of batches but was given None"),
        ("unshippable", None, "RolloutBatch.metadata cannot be shipped"),
    ],
)
def test_rank_zero_errors_reach_every_rank(
    two_ranks: RankPool, batch: str | None, error: str | None, message: str
) -> None:
    shipped = None
    if batch is not None:
        shipped = _batch()
        shipped.metadata[1]["when"] = {1, 2}
    with pytest.raises(RankError) as caught:
        two_ranks.run(jobs.share, batches={0: shipped}, error=error)
    assert set(caught.value.messages) == {0, 1}
    assert all(message in text for text in caught.value.messages.values())
    assert "RankZeroError" in caught.value.messages[1]


def test_sum_leaves_its_argument_alone(two_ranks: RankPool) -> None:
    for rank, (mine, total) in enumerate(two_ranks.run(jobs.sum_tensor)):
        assert mine.tolist() == [rank + 1, 10]
        assert total.tolist() == [3, 20] and total.dtype == torch.int64


def test_a_dead_rank_is_an_error_that_says_who_waits_for_what(two_ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        two_ranks.run(jobs.die_in_collective)
    assert "rank 0 of 2: sum over ranks failed" in caught.value.messages[0]
