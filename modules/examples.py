"""The smallest rollout batch there is to try a function on."""

from __future__ import annotations

import torch

from app.batch import RolloutBatch, Trajectory


def example_batch() -> RolloutBatch:
    """One group of two episodes of one turn, two tokens each, rewards 0 and 1."""
    return RolloutBatch.from_trajectories(
        Trajectory(
            tokens=torch.tensor([1, 2 + episode]),
            loss_mask=torch.tensor([False, True]),
            behavior_logprobs=torch.tensor([0.0, -1.0], dtype=torch.float32),
            versions=torch.tensor([-1, 0]),
            reward=float(episode),
            group_id=0,
            episode_id=episode,
            prompt_id="example",
        )
        for episode in range(2)
    )
