"""Trajectories and rollout batches: what is refused, in one line that names the field, and what is taken as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from app.batch import BatchError, RolloutBatch, Trajectory


def trajectory(**fields: Any) -> Trajectory:
    given: dict[str, Any] = {
        "tokens": [1, 2, 3],
        "loss_mask": [False, True, True],
        "behavior_logprobs": [0.0, -3.3712345, -10.123456],
        "versions": [-1, 4, 4],
        "reward": 0.5,
        "group_id": 7,
        "episode_id": 70,
        "prompt_id": "p",
    }
    return Trajectory(**{**given, **fields})


def refused(message: str, **fields: Any) -> None:
    with pytest.raises(BatchError, match=message) as caught:
        RolloutBatch.from_trajectories([trajectory(), trajectory(**fields)])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "values",
    [
        [0.0, -3.3712345, -10.123456],
        np.array([0.0, -3.3712345, -10.123456]),
        torch.tensor([0.0, -3.3712345, -10.123456], dtype=torch.float64),
    ],
)
def test_log_probabilities_are_float32_whatever_the_default_dtype_is(values: Any) -> None:
    expected = torch.tensor([0.0, -3.3712345, -10.123456], dtype=torch.float32)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        batch = RolloutBatch.from_trajectories([trajectory(behavior_logprobs=values)])
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(batch.behavior_logprobs, expected)
    assert batch.rewards.dtype == batch.temperatures.dtype == torch.float32


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, np.float16])
def test_log_probabilities_that_were_rounded_are_refused(narrow: Any) -> None:
    values = [0.0, -1.0, -2.0]
    given = torch.tensor(values, dtype=narrow) if isinstance(narrow, torch.dtype) else np.array(values, dtype=narrow)
    refused(r"Trajectory.behavior_logprobs of p: torch.b?float16 has lost digits.*float32", behavior_logprobs=given)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": "text"}, "Trajectory.tokens of p: expected numbers, got <U4"),
        ({"tokens": ["a", "b", "c"]}, "Trajectory.tokens of p: expected numbers"),
        ({"tokens": None}, "Trajectory.tokens of p: expected numbers"),
        ({"tokens": [[1, 2], [3]]}, "Trajectory.tokens of p: expected one number a token"),
        ({"tokens": [1.0, 2.0, 3.0]}, "Trajectory.tokens of p: expected integers, got torch.float64"),
        ({"tokens": [True, True, False]}, "Trajectory.tokens of p: expected integers, got torch.bool"),
        ({"tokens": [2**70, 1, 2]}, "Trajectory.tokens of p: expected numbers, got object"),
        ({"tokens": []}, "Trajectory.tokens of p is empty"),
        ({"tokens": 3}, "Trajectory.tokens of p: expected a 1-D tensor"),
        ({"tokens": [1, 2]}, "Trajectory.loss_mask of p has 3 entries but tokens has 2"),
        ({"versions": [-1.0, 0.5, 1.0]}, "Trajectory.versions of p: expected integers"),
        ({"loss_mask": [0.0, 0.5, 1.0]}, "Trajectory.loss_mask of p: expected True or False"),
        ({"loss_mask": torch.tensor([0, 2, 1])}, "Trajectory.loss_mask of p: expected True or False"),
        ({"behavior_logprobs": [0j, 1j, 2j]}, "Trajectory.behavior_logprobs of p: expected numbers, got complex128"),
        ({"reward": None}, "Trajectory.reward of p: expected a number, got 'None'"),
        ({"reward": "high"}, "Trajectory.reward of p: expected a number, got 'high'"),
        ({"reward": np.complex64(1j)}, "Trajectory.reward of p: expected a number"),
        ({"reward": 10**400}, "Trajectory.reward of p: expected a number"),
        ({"reward": torch.zeros(2)}, "Trajectory.reward of p: expected a number"),
        ({"reward": float("nan")}, r"RolloutBatch.rewards: nan for sequence 1 \(prompt 'p'\): drop the group"),
        ({"reward": 3e38}, "RolloutBatch.rewards: 3.*e.38 for sequence 1.*within 1e.09: scale it down"),
        ({"group_id": "g"}, "Trajectory.group_id of p: expected an integer, got 'g'"),
        ({"temperature": None}, "Trajectory.temperature of p: expected a number"),
        ({"temperature": float("inf")}, "RolloutBatch.temperatures: inf for sequence 1.*between 0.001 and 1000"),
        ({"temperature": float("nan")}, "RolloutBatch.temperatures: nan"),
        ({"temperature": 1e-320}, "RolloutBatch.temperatures: 0.0"),
        ({"temperature": 1e-30}, "RolloutBatch.temperatures: 1"),
        ({"temperature": 0}, "RolloutBatch.temperatures: 0"),
        ({"behavior_logprobs": [0.0, 0.9, 0.1]}, "behavior_logprobs: 0.8999.* at position 1 .*not probabilities"),
        ({"behavior_logprobs": [0.0, -1.0, -3e38]}, "behavior_logprobs: -3.*no sampler draws a token so unlikely"),
        ({"behavior_logprobs": [0.0, -1.0, -float("inf")]}, "behavior_logprobs: -inf.*needs a finite"),
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    refused(message, **fields)


def test_what_means_the_same_is_taken() -> None:
    given = trajectory(
        tokens=np.array([1, 2, 3], dtype=np.int32),
        loss_mask=[0.0, 1, True],
        behavior_logprobs=[-5, 5e-4, 0],  # rounding above 0, and whatever a token holds that is not trained
        versions=torch.tensor([-1, 4, 4], dtype=torch.int16),
        reward=np.float32(0.25),
        group_id=np.int64(3),
        temperature=torch.tensor(0.5),
    )
    batch = RolloutBatch.from_trajectories([given, replace(given, reward=True)])
    assert batch.loss_mask.tolist() == [False, True, True] * 2
    assert (batch.tokens.dtype, batch.versions.dtype) == (torch.int64, torch.int64)
    assert (batch.rewards.tolist(), batch.group_ids.tolist()) == ([0.25, 1.0], [3, 3])
    assert batch.temperatures.tolist() == [0.5, 0.5]


def test_a_reward_that_is_set_late_is_checked_too() -> None:
    late: Any = trajectory()
    late.reward = None
    with pytest.raises(BatchError, match="expected a number, got 'None'"):
        RolloutBatch.from_trajectories([late])


def _pair() -> RolloutBatch:
    batch = RolloutBatch.from_trajectories(trajectory(episode_id=i, metadata={"i": i}) for i in range(2))
    batch.add_column("advantages", torch.ones(batch.num_tokens))
    return batch


def test_views_copy_no_tensor_and_leave_the_batch_as_it_was() -> None:
    batch = _pair()
    bare, other = batch.without("columns", "metadata"), batch.with_columns({"values": torch.zeros(batch.num_tokens)})
    assert bare.tokens is batch.tokens and other.versions is batch.versions
    assert (bare.columns, bare.metadata) == ({}, [{}, {}]) and other.metadata == batch.metadata
    assert list(other.columns) == ["values"] and list(batch.columns) == ["advantages"] and batch.metadata[1] == {"i": 1}
    kept = batch.without("metadata")
    kept.add_column("values", torch.zeros(batch.num_tokens))
    assert list(batch.columns) == ["advantages"] and kept.columns["advantages"] is batch.columns["advantages"]
    assert batch.with_rewards(torch.tensor([3.0, 4.0])).rewards.tolist() == [3.0, 4.0] != batch.rewards.tolist()


def test_views_are_checked() -> None:
    batch = _pair()
    with pytest.raises(BatchError, match=r"column 'values' has shape \(1,\)"):
        batch.with_columns({"values": torch.zeros(1)})
    with pytest.raises(BatchError, match=r"RolloutBatch\.rewards: nan for sequence 1"):
        batch.with_rewards(torch.tensor([0.0, float("nan")]))
    with pytest.raises(ValueError, match=r"RolloutBatch\.without: 'rewards' is not one of columns, metadata"):
        batch.without("rewards")  # type: ignore[arg-type]
