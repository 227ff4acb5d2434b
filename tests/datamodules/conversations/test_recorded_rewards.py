"""Recorded conversations chosen by their reward, for supervised training on those that went well."""

from __future__ import annotations

from pathlib import Path

import pytest

from datamodules.conversations.tokens import RecordedDataError
from tests.datamodules.test_recorded import module, npz


def test_conversations_below_a_reward_are_left_out(tmp_path: Path) -> None:
    path = npz(tmp_path / "x.npz")  # five tasks, three trials of each, reward 1 where task + trial is odd
    batch = module(path, min_reward=1.0, tasks_per_batch=5, workload="whole").batch(0)
    assert set(batch.rewards.tolist()) == {1.0} and len(batch) == 7
    assert sorted(batch.prompt_ids) == ["t0", "t1", "t1", "t2", "t3", "t3", "t4"]
    assert len(module(path, min_reward=0.0, tasks_per_batch=5, workload="whole").batch(0)) == 15
    with pytest.raises(RecordedDataError, match=r"min_reward: 2, but the best conversation of .*x\.npz has 1"):
        module(path, min_reward=2.0)
