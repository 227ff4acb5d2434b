"""Recorded conversations chosen by their reward, for supervised training on those that went well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datamodules import RecordedDataModule
from datamodules.conversations.tokens import RecordedDataError, load_npz, save_npz
from tests.datamodules.test_recorded import conversation, module, npz


def test_conversations_below_a_reward_are_left_out(tmp_path: Path) -> None:
    path = npz(tmp_path / "x.npz")  # five tasks, three trials of each, reward 1 where task + trial is odd
    batch = module(path, min_reward=1.0, tasks_per_batch=5, workload="whole").batch(0)
    assert set(batch.rewards.tolist()) == {1.0} and len(batch) == 7
    assert sorted(batch.prompt_ids) == ["t0", "t1", "t1", "t2", "t3", "t3", "t4"]
    assert len(module(path, min_reward=0.0, tasks_per_batch=5, workload="whole").batch(0)) == 15
    with pytest.raises(RecordedDataError, match=r"min_reward: 2, but the best conversation of .*x\.npz has 1"):
        module(path, min_reward=2.0)


def test_a_reward_is_compared_as_it_is_recorded(tmp_path: Path) -> None:
    """0.9 of float32 is less than 0.9."""
    path = npz(tmp_path / "x.npz")
    with np.load(path) as file:
        arrays = dict(file)
    (name,) = (name for name in arrays if "reward" in name)
    arrays[name] = (arrays[name] * 0.9).astype(np.float32)
    np.savez(path, **arrays)
    assert len(module(path, min_reward=0.9, tasks_per_batch=5, workload="whole").batch(0)) == 7


def test_rewards_come_back_exactly(tmp_path: Path) -> None:
    save_npz(tmp_path / "x.npz", [conversation(f"{reward}", reward=reward) for reward in (0.1, 1 / 3)])
    assert [one.reward for one in load_npz(tmp_path / "x.npz")] == [0.1, 1 / 3]


def test_rewards_that_differ_by_rounding_are_no_pair(tmp_path: Path) -> None:
    """As a batch holds them they are one reward, so that neither conversation is the better one."""
    rewards = {"sums": (0.1 + 0.2, 0.3), "other": (1.0, 0.0)}
    made = [conversation(task, k, own[k]) for task, own in rewards.items() for k in range(2)]
    save_npz(tmp_path / "x.npz", made)
    batch = module(tmp_path / "x.npz", pairs=True, workload="whole").batch(0)
    assert (batch.prompt_ids, batch.rewards.tolist()) == (["other"] * 2, [1.0, 0.0])


@pytest.mark.parametrize("option", [{"pairs": True}, {"min_reward": 0.5}])
def test_sessions_without_a_reward_are_none_to_compare(option: dict[str, Any]) -> None:
    key = next(iter(option))
    with pytest.raises(ValueError, match=f"unrewarded: keep, but {key} goes by rewards, and those sessions have none"):
        RecordedDataModule("recorded", unrewarded="keep", **option)
