"""Group-relative advantages: the reward against the other episodes of the prompt."""

from __future__ import annotations

from torch import Tensor

from app.batch import RolloutBatch
from modules.advantages.statistics import Over, centred_over, check_over, std_over
from modules.episodes import episodes, group_sizes, spread_episodes


def grpo(batch: RolloutBatch, mean: Over = "group", std: Over = "group", eps: float = 1e-6) -> Tensor:
    """(r - mean) / (std + eps) over the episodes of a group (GRPO, Shao et al. 2024, section 4.1.2).

    Args:
        mean: what is subtracted: the mean over the episodes of the "group" or of the "batch"; "none" for nothing.
        std: what it is divided by, n - 1 in its denominator. "none": groups weigh in by how much their rewards differ
            (Dr.GRPO); "batch": they share one scale, which groups of nearly equal rewards cannot blow up (Lite PPO,
            Liu et al. 2025, "Tricks or traps?", section 4.1).
        eps: added to the deviation; without effect on std "none". Groups whose rewards are equal, but for rounding, are
            at 0 whatever it is.

    Returns:
        float32 [T], one value for all tokens of an episode; in standard deviations, or units of reward for std "none".

    Raises:
        ValueError: a mean that is wider than the std, or none: where rewards are equal, that divides them by eps.
        BatchError: with mean or std "group", a batch in which no group has two episodes.
    """
    check_over("mean", mean)
    check_over("std", std)
    if std != "none" and mean not in ("group", std):
        raise ValueError(
            f"advantage_options: mean {mean} with std {std} divides by a {std}'s deviation what is not centred on its"
            " mean: where its rewards are all (nearly) equal, advantages reach 1e6; set std to none, or mean to group"
            f" or {std}"
        )
    rewards, groups, of_sequence = episodes(batch)
    of_episode = groups.unique(return_inverse=True)[1]
    if "group" in (mean, std):
        of_episode, _ = group_sizes(batch, groups, "grpo")
    centred = centred_over(rewards, of_episode, mean)
    if std != "none":
        centred = centred / (std_over(rewards, of_episode, std) + eps)
    return spread_episodes(batch, of_sequence, centred)


def dr_grpo(batch: RolloutBatch) -> Tensor:
    """r - mean over the episodes of a group: no division, which favours prompts that are nearly always or never solved
    (Dr.GRPO, Liu et al. 2025, section 3.2). The paper goes with aggregation "constant".

    Returns:
        float32 [T], one value for all tokens of an episode, in units of reward.
    """
    return grpo(batch, std="none")
