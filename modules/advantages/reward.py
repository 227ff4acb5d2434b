"""The reward itself as advantage."""

from __future__ import annotations

from torch import Tensor

from app.batch import RolloutBatch
from modules.episodes import episodes, spread_episodes


def reward(batch: RolloutBatch) -> Tensor:
    """r: no baseline at all (REINFORCE, Williams 1992, with a baseline of 0); unbiased, of large variance.

    Returns:
        float32 [T], one value for all tokens of an episode, in units of reward.
    """
    rewards, _, of_sequence = episodes(batch)
    return spread_episodes(batch, of_sequence, rewards)
