"""Parts travel from rank 0 bit for bit, each to its rank and no other; answers come back, errors reach everybody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from app.batch import RolloutBatch, Trajectory
from tests.distributed import jobs
from tests.distributed import sharing_jobs as sharing
from tests.distributed.ranks import RankError, RankPool

START = 170.0  # seconds: four processes import everything the first time


def _batch(lengths: tuple[int, ...] = (3, 1, 8), seed: int = 3) -> RolloutBatch:
    generator = torch.Generator().manual_seed(seed)
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
        for i, length in enumerate(lengths)
    ]
    batch = RolloutBatch.from_trajectories(trajectories)
    batch.add_column("advantages", torch.randn(sum(lengths), generator=generator))
    return batch


def _assert_equal(got: RolloutBatch | None, batch: RolloutBatch | None) -> None:
    if got is None or batch is None:
        assert got is batch
        return
    expected = batch.tensors()
    assert got.tensors().keys() == expected.keys()
    for name, tensor in got.tensors().items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    assert (got.prompt_ids, got.finish_reasons, got.metadata) == (
        batch.prompt_ids,
        batch.finish_reasons,
        batch.metadata,
    )


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_its_part_and_answers(size: int, two_ranks: RankPool, four_ranks: RankPool) -> None:
    """Twice in one exchange; parts may be empty, all of them too."""
    batch = _batch((3, 1, 8, 5))
    shares = [[0, 2], [3], [], [1]] if size == 4 else [[0, 1, 2, 3], []]
    first = [batch.select(own) if own else None for own in shares]
    asked = [({"policy": ["logprobs"]}, first), ("nothing", [None] * size)]
    results = {2: two_ranks, 4: four_ranks}[size].run(sharing.exchange, START, asked=asked, given=first[::-1])
    for rank, seen in enumerate(results):
        assert [words for words, _ in seen.served] == ["nothing" if k else {"policy": ["logprobs"]} for k in (0, 1)]
        _assert_equal(seen.served[0][1], first[rank])
        assert seen.served[1][1] is None
        _assert_equal(seen.part, first[::-1][rank])
        assert seen.answers == [] or rank == 0
    for found, part in zip(results[0].answers[0], first, strict=True):
        assert torch.equal(found, 2 * part.behavior_logprobs if part is not None else torch.zeros(0))
    assert [len(found) for found in results[0].answers[1]] == [0] * size


def test_bytes_follow_the_part(four_ranks: RankPool) -> None:
    """Sequences that share nothing: a rank receives its own, and the sum is what rank 0 counted."""
    batch = _batch((4000, 4000, 4000, 4000, 1000))
    parts = [batch.select(own) for own in ([0], [1], [2, 3], [4])]
    results = four_ranks.run(sharing.exchange, asked=[("x", parts)], given=None)
    # Tokens, log-probabilities and a column of noise, 4 bytes each; a mask that changes at every token.
    everything = batch.num_tokens * (4 + 4 + 4 + 1)
    for seen, share in zip(results[1:], (4 / 17, 8 / 17, 1 / 17)):
        assert share * everything < seen.received[0] < share * everything + 3000
        assert seen.received[1] < 100
    assert results[0].bytes_sent == sum(sum(seen.received) for seen in results[1:])
    assert sum(results[0].received) == 0 and results[1].bytes_sent == 0


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
    batch = _batch()
    batch.metadata[1]["when"] = {1, 2}
    with pytest.raises(RankError) as caught:
        two_ranks.run(sharing.fail_at_rank_zero, error="", after=1, given=[None, batch])
    assert set(caught.value.messages) == {0, 1}
    assert all("RolloutBatch.metadata cannot be shipped" in text for text in caught.value.messages.values())


@pytest.mark.parametrize("failing", [(0,), (1,), (1, 3), (0, 2)])
def test_a_failed_forward_pass_ends_all_ranks_at_once(failing: tuple[int, ...], four_ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        four_ranks.run(sharing.fail_while_serving, failing=failing)
    messages = caught.value.messages
    assert set(messages) == {0, 1, 2, 3}
    for rank, message in messages.items():
        assert f"MemoryError: rank {rank if rank in failing else failing[0]} has no memory left" in message
        assert ("RankZeroError" in message) == (rank not in (0, *failing))
    if 0 not in failing:
        assert f"2 failed on rank {failing[0]}" in messages[0] and f"(ranks: {list(failing)})" in messages[0]


def test_after_an_error_nothing_is_left_on_the_way(four_ranks: RankPool) -> None:
    assert four_ranks.run(sharing.fail_while_serving, failing=(1,), then_go_on=True) == [(None, [4.0])] * 4


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


def test_a_rank_that_never_fetches_its_part_is_named_in_time(pair: RankPool) -> None:
    message = pair.run(sharing.lose_a_rank, START)[0]
    assert message.startswith("rank 0 of 2: ") and "parts of a batch, from rank 0" in message
    assert "missing: rank 1 (host " in message and "lost_in_thought" in message


def test_a_rank_that_dies_serving_is_named(pair: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pair.run(sharing.die_while_serving, START)
    assert "answers to rank 0" in caught.value.messages[0] and "rank 1 (host" in caught.value.messages[0]
    assert "when it died" in caught.value.messages[0]
