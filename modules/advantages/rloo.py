"""Leave-one-out advantages."""

from __future__ import annotations

from torch import Tensor

from app.batch import RolloutBatch
from modules.advantages.statistics import centred_over
from modules.episodes import episodes, group_sizes, spread_episodes


def rloo(batch: RolloutBatch) -> Tensor:
    """r - mean of the *other* episodes of the group: an unbiased baseline (RLOO, Ahmadian et al. 2024, eq. 5).

    Returns:
        float32 [T], one value for all tokens of an episode, in units of reward; 0 for the only episode of a group.

    Raises:
        BatchError: no group has two episodes.
    """
    rewards, groups, of_sequence = episodes(batch)
    of_episode, sizes = group_sizes(batch, groups, "rloo")
    size = sizes[of_episode].to(rewards.dtype)
    # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
    centred = centred_over(rewards, of_episode, "group")
    return spread_episodes(batch, of_sequence, centred * size / (size - 1).clamp(min=1))
