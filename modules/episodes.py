"""Sequences, episodes and turns of flat tensors: what sums and statistics are over, and where credit goes.

Promises: an episode of 20 turns counts once, beside one of a single turn; a turn is a maximal run of trained tokens, so
a conversation in one sequence and the same conversation as a sequence a turn have the same turns. No Python loop
over tokens; sums over sequences do not wait for the device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from app.batch import CALL_REWARD, LARGEST_REWARD, LEFT_OUT, BatchError, RolloutBatch
from app.statistics import ROUNDING

_log = logging.getLogger(__name__)


def episodes(batch: RolloutBatch) -> tuple[Tensor, Tensor, Tensor]:
    """The episodes of a batch.

    Returns:
        rewards: float64 [E]. groups: int64 [E], group id of each episode. of_sequence: int64 [N], the episode of each
        sequence.

    Raises:
        BatchError: sequences of one episode that carry different rewards.
    """
    pairs = torch.stack([batch.group_ids, batch.episode_ids], dim=1)
    unique, of_sequence = torch.unique(pairs, dim=0, return_inverse=True)
    rewards = batch.rewards.to(torch.float64)
    ends = [
        torch.zeros(len(unique), dtype=torch.float64).scatter_reduce(0, of_sequence, rewards, how, include_self=False)
        for how in ("amin", "amax")
    ]
    differ = (ends[0] != ends[1])[of_sequence]
    if bool(differ.any()):
        i = int(differ.nonzero()[0])
        episode = of_sequence[i]
        raise BatchError(
            f"RolloutBatch.rewards: episode {int(batch.episode_ids[i])} (prompt '{batch.prompt_ids[i]}') has rewards"
            f" from {float(ends[0][episode])} to {float(ends[1][episode])}; an episode has one: give all its turns the"
            " same"
        )
    return ends[0], unique[:, 0], of_sequence


def taking_part(batch: RolloutBatch, sequences: list[int], comparing: str) -> list[int]:
    """Those of `sequences` whose episodes are not left out of training (`app.batch.LEFT_OUT`); none where no token of
    theirs is trained, which is a step without sequences.

    Args:
        comparing: the objective, where it compares the episodes of a group; "" where it does not.

    Raises:
        BatchError: it compares them, and some are left out.
    """
    found = [i for i in sequences if LEFT_OUT not in batch.metadata[i]]
    if comparing and len(found) < len(sequences):
        i = next(i for i in sequences if LEFT_OUT in batch.metadata[i])
        raise BatchError(
            f"RolloutBatch.metadata: an episode of prompt '{batch.prompt_ids[i]}' is left out of training"
            f" ({batch.metadata[i][LEFT_OUT]}), and objective={comparing} compares all episodes of a group; take"
            " another objective or, for rollouts, a data.filter that leaves out whole groups (TooManyTruncated)"
        )
    return found if found and bool(batch.loss_mask[batch.flat_index(found)].any()) else []


def call_rewards(batch: RolloutBatch) -> Tensor:
    """Rewards that sequences have of their own (`app.batch.CALL_REWARD`), float32 [T], at their last trained token.

    Raises:
        BatchError: one that is no number within the range of rewards, or of a sequence without a trained token.
    """
    found = torch.zeros(batch.num_tokens, dtype=torch.float32)
    for i, metadata in enumerate(batch.metadata):
        if CALL_REWARD not in metadata:
            continue
        value, begin = metadata[CALL_REWARD], int(batch.cu_seqlens[i])
        trained = batch.loss_mask[begin : int(batch.cu_seqlens[i + 1])].nonzero()
        if type(value) not in (int, float) or not abs(value) <= LARGEST_REWARD or not len(trained):
            raise BatchError(
                f"RolloutBatch.metadata: {CALL_REWARD} of a sequence of prompt '{batch.prompt_ids[i]}' is"
                f" {str(value)[:40]} for {len(trained)} trained tokens; it must be a finite number within"
                f" {LARGEST_REWARD:g}, of a sequence with a trained token"
            )
        found[begin + int(trained[-1])] = value
    return found


def earned(batch: RolloutBatch, token_rewards: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `episodes`, whose rewards include those of their tokens, `token_rewards` [T]."""
    rewards, groups, of_sequence = episodes(batch)
    of_token = of_sequence.repeat_interleave(batch.lengths())
    return rewards.index_add(0, of_token, token_rewards.double()), groups, of_sequence


def episode_prompts(batch: RolloutBatch, of_sequence: Tensor) -> list[str]:
    """The prompt id of each episode, [E]; `of_sequence` of `episodes`."""
    prompts = dict(zip(of_sequence.tolist(), batch.prompt_ids, strict=True))
    return [prompts[episode] for episode in range(len(prompts))]


def group_sizes(batch: RolloutBatch, groups: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Numbers the groups and counts their episodes, for estimators and objectives that compare the episodes of a
    group.

    Args:
        groups: int64 [E], group id of each episode.
        name: of the function, for messages.

    Returns:
        of_episode: int64 [E], from 0. sizes: int64 [G]. A group that has one episode left (others were dropped) is
        logged; comparing it with itself gives it an advantage, or a loss, of 0.

    Raises:
        BatchError: no group has two episodes, so that there is nothing to learn from.
    """
    names, of_episode, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    alone = names[sizes < 2]
    if len(alone):
        prompt = batch.prompt_ids[int((batch.group_ids == alone[0]).nonzero()[0])]
        if len(alone) == len(names):
            raise BatchError(
                f"group {int(alone[0])} (prompt '{prompt}') has a single episode, as all others: {name} compares the"
                " episodes of a group and needs data.group_size of at least 2 (recorded data: trials)"
            )
        _log.warning("%d groups have a single episode left, so they teach nothing (prompt '%s')", len(alone), prompt)
    return of_episode, sizes


def spread_episodes(batch: RolloutBatch, of_sequence: Tensor, per_episode: Tensor) -> Tensor:
    """One number an episode [E] -> float32 [T], the same for all its tokens."""
    return per_episode[of_sequence].float().repeat_interleave(batch.lengths())


@dataclass(frozen=True, eq=False)
class Turns:
    """The U turns of a batch, ordered by episode and by their place in it.

    Attributes:
        of_token: int64 [T], the turn of each trained token, -1 elsewhere.
        episode: int64 [U], numbered as by `episodes`.
        place: int64 [U], from 0 in every episode. of: int64 [U], how many turns its episode has.
        first, last: int64 [U], positions of its first and last trained token in the flat tensors.
    """

    of_token: Tensor
    episode: Tensor
    place: Tensor
    of: Tensor
    first: Tensor
    last: Tensor

    def __len__(self) -> int:
        return len(self.episode)


def turns(batch: RolloutBatch, of_sequence: Tensor) -> Turns:
    """The turns of a batch; `of_sequence` as returned by `episodes`."""
    mask = batch.loss_mask
    before = torch.cat([mask.new_zeros(1), mask[:-1]])
    after = torch.cat([mask[1:], mask.new_zeros(1)])
    before[batch.cu_seqlens[:-1]] = False
    after[batch.cu_seqlens[1:] - 1] = False
    first, last = (mask & ~before).nonzero()[:, 0], (mask & ~after).nonzero()[:, 0]
    sequence = torch.searchsorted(batch.cu_seqlens, first, right=True) - 1
    keys = (first.numpy(), batch.turn_indices[sequence].numpy(), of_sequence[sequence].numpy())
    order = torch.from_numpy(np.lexsort(keys))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    of_token = torch.full(mask.shape, -1, dtype=torch.int64)
    run = (mask & ~before).cumsum(0) - 1
    of_token[mask] = rank[run[mask]]
    episode = of_sequence[sequence][order]
    counts = torch.bincount(episode, minlength=int(of_sequence.max()) + 1)
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(order)) - starts[episode]
    return Turns(of_token, episode, place, counts[episode], first[order], last[order])


def of_token(cu_seqlens: Tensor, total: int) -> Tensor:
    """int64 [T]: which sequence each token belongs to. `cu_seqlens` int64 [n + 1], on the device of the result."""
    sequences = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    return sequences.repeat_interleave(cu_seqlens.diff(), output_size=total)


def sequence_sums(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [n]: sums over the masked tokens of each sequence."""
    chosen = torch.where(mask, values, torch.zeros_like(values))
    zeros = values.new_zeros(len(cu_seqlens) - 1)
    return zeros.index_add(0, of_token(cu_seqlens, len(values)), chosen)


def sequence_means(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] -> [n]: means over the masked tokens of each sequence; 0 for sequences without any."""
    counts = sequence_sums(torch.ones_like(values), mask, cu_seqlens)
    return sequence_sums(values, mask, cu_seqlens) / counts.clamp(min=1)


def spread_sequences(per_sequence: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """[n] -> [T]: each token gets its sequence's number."""
    return per_sequence[of_token(cu_seqlens, total)]


def differ(first: Tensor, second: Tensor) -> Tensor:
    """Where rewards are apart by more than rounding, bool of their common shape: `app.statistics.equal`, by entry."""
    return (first - second).abs() > ROUNDING * torch.maximum(first.abs(), second.abs()).clamp(min=1)
