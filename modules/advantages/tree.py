"""Tree advantages: the prefix tree of a group's episodes tells turn by turn what led to more reward."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from app import checks
from app.batch import RolloutBatch
from app.tree import PrefixTree
from modules.advantages.statistics import centred_over, std_over
from modules.episodes import episodes, group_sizes, turns


def tree(batch: RolloutBatch, std: Literal["none", "group"] = "none", eps: float = 1e-6) -> Tensor:
    """A = V(after the turn) - V(the last fork before its end), V being the mean reward of the episodes below.

    A fork is a state (everything an episode has seen when a turn begins) that more episodes of the group went
    through than through the turn's end; so a turn is credited against its siblings, the turns others took in the same
    state. A turn without siblings gets the credit of the branch it is in, before the first fork 0. Counted once a fork,
    an episode's credits add up to its reward minus the group's mean, as long as turns alone tell episodes apart: no
    environment answered equal turns differently, and no episode ends where others come through or end as well.

    Where episodes have nothing but the prompt in common this is `dr_grpo`. Only turns with trained tokens are counted
    among those that went through a state, and a reply that goes on where another one ends is not below its end.
    (Process rewards from the rewards below as in TreeRL, Hou et al. 2025, section 3.3, with the nearest fork in the
    place of the parent node.)

    Args:
        std: "group" divides by the standard deviation of the group's rewards.

    Returns:
        float32 [T], one value for all tokens of a turn, in units of reward; 0 on tokens that are not trained.

    Raises:
        BatchError: no group has two episodes.
    """
    checks.one_of("advantage_options.std", std, ("none", "group"))
    rewards, groups, of_sequence = episodes(batch)
    of_episode, _ = group_sizes(batch, groups, "tree")
    rewards = centred_over(rewards, of_episode, "group")  # credits are differences, and those of rounding are none
    turn = turns(batch, of_sequence)
    # Tree tokens name states: two sequences of a group have the same tokens up to a position, or another tree token.
    prefixes = PrefixTree.build(
        batch.sequences(),
        keys=batch.group_ids.unique(return_inverse=True)[1].numpy(),
        images=None if batch.images is None else batch.split(batch.images),
        pictures=batch.pictures,
    )
    token = torch.from_numpy(prefixes.sequence_tokens(range(len(batch))))
    before, count_before = _values(token[turn.first - 1], turn.episode, rewards)
    after, count_after = _values(token[turn.last], turn.episode, rewards)
    credit = torch.zeros(len(turn), dtype=torch.float64)
    open_ = torch.ones(len(turn), dtype=torch.bool)
    for back in range(int(turn.of.max()) if len(turn) else 0):  # over the turns of the longest episode
        candidate = torch.arange(len(turn)) - back
        fork = open_ & (turn.place >= back)
        fork &= count_before[candidate.clamp(min=0)] > count_after
        credit = torch.where(fork, after - before[candidate.clamp(min=0)], credit)
        open_ &= ~fork
    if std == "group":
        credit = credit / (std_over(rewards, of_episode, "group") + eps)[turn.episode]
    trained = batch.loss_mask
    advantages = torch.zeros(batch.num_tokens, dtype=torch.float32)
    advantages[trained] = credit[turn.of_token[trained]].float()
    return advantages


def _values(states: Tensor, episode: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """For each turn's state: mean reward of the episodes that were in it, and their number; [U], [U]."""
    names, state = states.unique(return_inverse=True)
    pairs = torch.stack([state, episode], dim=1).unique(dim=0)  # an episode may be in a state twice
    count = torch.bincount(pairs[:, 0], minlength=len(names))
    total = torch.zeros(len(names), dtype=torch.float64).index_add(0, pairs[:, 0], rewards[pairs[:, 1]])
    return (total / count)[state], count[state]
