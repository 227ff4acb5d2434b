"""What the report shows of a batch: its prefix tree with credit and text, and the transcripts worth reading.

Promises: plain data that JSON can hold, small whatever the batch (whole groups up to `MOST_TOKENS` tokens of their
trees, and of a long text its beginning and its end); what is left out is counted. Text is decoded for reading only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from app.batch import RolloutBatch
from app.tree import PrefixTree
from modules.episodes import episodes

MOST_TOKENS = 100_000  # of the trees of the groups that are shown
MOST_TEXT = 3000  # characters of a node or of a run of a transcript
Run = tuple[str, bool]  # text, and whether the policy wrote it


def batch_moment(batch: RolloutBatch, tokenizer: Any) -> dict[str, Any]:
    """The tree and the transcripts of a batch.

    Args:
        batch: with the column `advantages` where there are any; else the reward less its group's mean takes its place.
        tokenizer: decodes; None shows token ids.

    Returns:
        `version` (of the newest trained token), `credit` (what colours the tree), `groups`, `groups_shown`,
        `sequences`, `tree`: lists over its nodes in depth-first order (see `_tree`), and `transcripts`: the episodes
        "best", "worst" (of equal rewards the one farther from its group's) and "surprising" (the reward farthest from
        its group's mean, in the group's standard deviations; of several the reply that the sampler found least likely).
    """
    credit = batch.columns.get("advantages")
    name = "advantage" if credit is not None else "reward less its group's mean"
    if credit is None:
        credit = _above_the_group(batch)[0][episodes(batch)[2]].float().repeat_interleave(batch.lengths())
    shown = shown_groups(batch)
    newest = batch.versions[batch.loss_mask]
    return {
        "version": int(newest.max()) if len(newest) else -1,
        "credit": name,
        "groups": len(batch.group_ids.unique()),
        "groups_shown": len(shown),
        "sequences": len(batch),
        "tree": _tree(batch, credit, _of_groups(batch, shown), tokenizer),
        "transcripts": _transcripts(batch, tokenizer),
    }


def shown_groups(batch: RolloutBatch) -> list[int]:
    """Ids of the first groups that have at most `MOST_TOKENS` tokens as trees; of one at least."""
    shown: list[int] = []
    room = MOST_TOKENS
    for group in dict.fromkeys(batch.group_ids.tolist()):
        room -= _built(batch.select(_of_groups(batch, [group]))).num_tokens
        if room < 0 and shown:
            break
        shown.append(group)
    return shown


def transcript(batch: RolloutBatch, index: int, tokenizer: Any) -> list[Run]:
    """Sequence `index` as runs of text, each written by the policy or not."""
    here = slice(int(batch.cu_seqlens[index]), int(batch.cu_seqlens[index + 1]))
    tokens, mask = batch.tokens[here], batch.loss_mask[here]
    edges = [0, *((mask[1:] != mask[:-1]).nonzero().flatten() + 1).tolist(), len(mask)]
    return [(_read(tokens[begin:end].tolist(), tokenizer), bool(mask[begin])) for begin, end in pairwise(edges)]


def _tree(batch: RolloutBatch, credit: torch.Tensor, chosen: list[int], tokenizer: Any) -> dict[str, list[Any]]:
    """Over nodes: `parent` (-1 for roots), `start` (position of its first token), `length`, `row`, `rows` (leaves above
    it, and of its own), `sequences` that share it, `trained` tokens (of all of them), their mean `credit` (None
    without any), mean `reward`, `text`."""
    own = batch.select(chosen)
    flat = batch.flat_index(chosen)
    _, keys = np.unique(own.temperatures.numpy(), return_inverse=True)
    tree = _built(own, keys)
    every = np.arange(tree.num_sequences)
    of_token = tree.sequence_tokens(every)
    ids = np.empty(tree.num_tokens, np.int64)
    ids[of_token] = own.tokens.numpy()  # the tree's own tell pictures apart, and no tokenizer knows them
    segment = np.searchsorted(tree.segment_offset, of_token, side="right") - 1
    mask, count = own.loss_mask.numpy(), tree.num_segments
    trained = np.bincount(segment[mask], minlength=count)
    credits = np.bincount(segment[mask], credit[flat].double().numpy()[mask], minlength=count)
    every_reward = own.rewards.double().repeat_interleave(own.lengths()).numpy()
    rewards = np.bincount(segment, every_reward, minlength=count) / np.bincount(segment, minlength=count)
    leaf = tree.segment_end == np.arange(1, count + 1)
    before = np.concatenate([[0], np.cumsum(leaf)])
    ends = tree.segment_offset + tree.segment_length
    return {
        "parent": tree.segment_parent.tolist(),
        "start": tree.segment_start.tolist(),
        "length": tree.segment_length.tolist(),
        "row": before[:-1].tolist(),
        "rows": (before[tree.segment_end] - before[:-1]).tolist(),
        "sequences": tree.segment_sequences.tolist(),
        "trained": trained.tolist(),
        "credit": [round(float(c / n), 5) if n else None for c, n in zip(credits, trained, strict=True)],
        "reward": [round(float(one), 5) for one in rewards],
        "text": [_read(ids[a:b].tolist(), tokenizer) for a, b in zip(tree.segment_offset, ends, strict=True)],
    }


def _built(batch: RolloutBatch, keys: np.ndarray | None = None) -> PrefixTree:
    """The tree that is trained: placeholders are shared where they show the same picture."""
    images = None if batch.images is None else batch.split(batch.images)
    return PrefixTree.build(batch.sequences(), keys=keys, images=images, pictures=batch.pictures)


def _transcripts(batch: RolloutBatch, tokenizer: Any) -> dict[str, dict[str, Any]]:
    rewards, _, of_sequence = episodes(batch)
    above, deviation = _above_the_group(batch)
    sums = torch.zeros(len(rewards), dtype=torch.float64)
    counts = torch.zeros(len(rewards), dtype=torch.float64)
    of_episode = of_sequence.repeat_interleave(batch.lengths())
    sums.index_add_(0, of_episode, torch.where(batch.loss_mask, batch.behavior_logprobs, 0.0).double())
    counts.index_add_(0, of_episode, batch.loss_mask.double())
    surprise = -sums / counts.clamp(min=1)
    strange = torch.where(deviation > 0, above.abs() / deviation.clamp(min=1e-12), 0.0)
    rank = torch.round(strange * 1e6) + surprise / (1 + surprise)  # ties of rounding go to the least likely
    # Of equal rewards the one that is farther from its group's: where others failed, or did not.
    best, worst = (
        torch.where(rewards == end, sign * above, -torch.inf) for end, sign in ((rewards.max(), 1), (rewards.min(), -1))
    )
    chosen = {"best": int(best.argmax()), "worst": int(worst.argmax()), "surprising": int(rank.argmax())}
    found = {}
    for name, episode in chosen.items():
        own = (of_sequence == episode).nonzero().flatten()
        last = int(own[batch.turn_indices[own].argmax()])
        found[name] = {
            "prompt_id": batch.prompt_ids[last],
            "reward": float(rewards[episode]),
            "above": float(above[episode]),
            "surprise": round(float(surprise[episode]), 4),
            "finish": batch.finish_reasons[last],
            "turns": len(own),
            "runs": transcript(batch, last, tokenizer),
        }
    return found


def _above_the_group(batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [E] each: an episode's reward less the mean of its group, and the group's standard deviation."""
    rewards, groups, _ = episodes(batch)
    _, group, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    means = torch.zeros(len(counts), dtype=torch.float64).index_add(0, group, rewards) / counts
    above = rewards - means[group]
    squares = torch.zeros(len(counts), dtype=torch.float64).index_add(0, group, above**2) / counts
    return above, squares.sqrt()[group]


def _of_groups(batch: RolloutBatch, groups: Sequence[int]) -> list[int]:
    return torch.isin(batch.group_ids, torch.tensor(list(groups))).nonzero().flatten().tolist()


def _read(ids: list[int], tokenizer: Any) -> str:
    text = tokenizer.decode(ids) if tokenizer is not None else " ".join(map(str, ids))
    if len(text) <= MOST_TEXT:
        return text
    end = MOST_TEXT // 3
    return f"{text[: MOST_TEXT - end]}\n[... {len(text) - MOST_TEXT:,} characters left out ...]\n{text[-end:]}"
