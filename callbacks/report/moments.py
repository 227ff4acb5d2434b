"""What the report shows of a batch: its prefix tree with credit and text, and the transcripts worth reading.

Promises: plain data that JSON can hold, small whatever the batch (whole groups up to `MOST_TOKENS` tokens of their
trees, of a long text its beginning and its end, and pictures as thumbnails); what is left out is counted. Text is
decoded for reading only.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from app.batch import RolloutBatch
from app.pictures import Picture, whole
from app.statistics import ROUNDING
from app.tree import PrefixTree
from modules.episodes import call_rewards, differ, earned, episodes

MOST_TOKENS = 100_000  # of the trees of the groups that are shown
MOST_TEXT = 3000  # characters of a node or of a run of a transcript
MOST_PICTURES = 100  # of a tree or of a transcript, as thumbnails
THUMBNAIL = 96  # pixels of its longer side
Run = tuple[str, bool | None]  # text, and whether the policy wrote it; None: the text is a picture, as a data URI


def batch_moment(batch: RolloutBatch, tokenizer: Any) -> dict[str, Any]:
    """The tree and the transcripts of a batch.

    Args:
        batch: with the column `advantages` where there are any; else the reward less its group's mean takes its place.
        tokenizer: decodes; None shows token ids.

    Returns:
        `version` (of the newest trained token), `credit` (what colours the tree), `groups`, `groups_shown`,
        `sequences`, `tree`: lists over its nodes in depth-first order (see `_tree`), `pictures` of the tree and the
        `thumbnails` of the first of them (data URIs), and `transcripts`: the episodes
        "best", "worst" (of equal rewards the one farther from its group's) and "surprising" (the reward farthest from
        its group's mean, in the group's standard deviations; of several the reply that the sampler found least likely).
    """
    credit = batch.columns.get("advantages")
    name = "advantage" if credit is not None else "reward less its group's mean"
    if credit is None:
        credit = _above_the_group(batch)[0][episodes(batch)[2]].float().repeat_interleave(batch.lengths())
    shown = shown_groups(batch)
    newest = batch.versions[batch.loss_mask]
    chosen = _of_groups(batch, shown)
    own = batch.select(chosen)
    return {
        "version": int(newest.max()) if len(newest) else -1,
        "credit": name,
        "groups": len(batch.group_ids.unique()),
        "groups_shown": len(shown),
        "sequences": len(batch),
        "tree": _tree(own, credit[batch.flat_index(chosen)], tokenizer),
        "pictures": len(own.pictures),
        "thumbnails": [thumbnail(one) for one in own.pictures[:MOST_PICTURES]],
        "transcripts": _transcripts(batch, tokenizer),
    }


def shown_groups(batch: RolloutBatch) -> list[int]:
    """Ids of the first groups that have at most `MOST_TOKENS` tokens as trees; of one at least."""
    shown: list[int] = []
    room = MOST_TOKENS
    for group in dict.fromkeys(batch.group_ids.tolist()):
        room -= trained_tree(batch.select(_of_groups(batch, [group]))).num_tokens
        if room < 0 and shown:
            break
        shown.append(group)
    return shown


def transcript(batch: RolloutBatch, index: int, tokenizer: Any) -> list[Run]:
    """Sequence `index` as runs of text, each written by the policy or not, and the pictures between them."""
    here = slice(int(batch.cu_seqlens[index]), int(batch.cu_seqlens[index + 1]))
    tokens, mask = batch.tokens[here].numpy(), batch.loss_mask[here].numpy()
    images = np.full(len(mask), -1)
    if batch.images is not None:
        images = whole(batch.images[here], batch.pictures).numpy()
    runs: list[Run] = []
    for begin, end in _runs_of(mask, images):
        picture = images[begin]
        if picture < 0:
            runs.append((_read(tokens[begin:end], images[begin:end], tokenizer), bool(mask[begin])))
        elif sum(said is None for _, said in runs) < MOST_PICTURES:
            runs.append((thumbnail(batch.pictures[picture]), None))
        else:
            runs.append((f"[picture {picture + 1}]", False))
    return runs


def thumbnail(picture: Picture) -> str:
    """A small copy, as the data URI of a JPEG."""
    small = Image.fromarray(picture.pixels)
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _runs_of(*keys: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Where each run of tokens with equal keys (each [T]) begins and ends."""
    changes = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(keys[0])])


def _tree(own: RolloutBatch, credit: torch.Tensor, tokenizer: Any) -> dict[str, list[Any]]:
    """Over nodes: `parent` (-1 for roots), `start` (position of its first token), `length`, `row`, `rows` (leaves above
    it, and of its own), `sequences` that share it, `trained` tokens (of all of them), their mean `credit` (None
    without any), mean `reward`, `text`, and the `pictures` in it: index, first token within the node, tokens."""
    tree = trained_tree(own)
    every = np.arange(tree.num_sequences)
    of_token = tree.sequence_tokens(every)
    ids = np.empty(tree.num_tokens, np.int64)
    ids[of_token] = own.tokens.numpy()  # the tree's own tell pictures apart, and no tokenizer knows them
    images = np.full(tree.num_tokens, -1)
    if own.images is not None:
        images[of_token] = torch.cat([whole(one, own.pictures) for one in own.split(own.images)]).numpy()
    segment = np.searchsorted(tree.segment_offset, of_token, side="right") - 1
    mask, count = own.loss_mask.numpy(), tree.num_segments
    trained = np.bincount(segment[mask], minlength=count)
    credits = np.bincount(segment[mask], credit.double().numpy()[mask], minlength=count)
    episode_rewards, _, of_sequence = earned(own, call_rewards(own))
    every_reward = episode_rewards[of_sequence].repeat_interleave(own.lengths()).numpy()
    rewards = np.bincount(segment, every_reward, minlength=count) / np.bincount(segment, minlength=count)
    leaf = tree.segment_end == np.arange(1, count + 1)
    before = np.concatenate([[0], np.cumsum(leaf)])
    nodes = [slice(a, a + n) for a, n in zip(tree.segment_offset.tolist(), tree.segment_length.tolist(), strict=True)]
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
        "text": [_read(ids[node], images[node], tokenizer) for node in nodes],
        "pictures": [
            [[int(images[node][a]), a, b - a] for a, b in _runs_of(images[node]) if images[node][a] >= 0]
            for node in nodes
        ],
    }


def trained_tree(batch: RolloutBatch) -> PrefixTree:
    """The tree that is trained: only equal temperatures share, and placeholders where they show the same picture."""
    _, keys = np.unique(batch.temperatures.numpy(), return_inverse=True)
    images = None if batch.images is None else batch.split(batch.images)
    return PrefixTree.build(batch.sequences(), keys=keys, images=images, pictures=batch.pictures)


def _transcripts(batch: RolloutBatch, tokenizer: Any) -> dict[str, dict[str, Any]]:
    rewards, _, of_sequence = earned(batch, call_rewards(batch))
    above, deviation = _above_the_group(batch)
    sums = torch.zeros(len(rewards), dtype=torch.float64)
    counts = torch.zeros(len(rewards), dtype=torch.float64)
    of_episode = of_sequence.repeat_interleave(batch.lengths())
    sums.index_add_(0, of_episode, torch.where(batch.loss_mask, batch.behavior_logprobs, 0.0).double())
    counts.index_add_(0, of_episode, batch.loss_mask.double())
    surprise = -sums / counts.clamp(min=1)
    spread = deviation > ROUNDING * rewards.abs().clamp(min=1)  # else they are one reward, summed in another order
    strange = torch.where(spread, above.abs() / deviation.clamp(min=1e-12), 0.0)
    rank = torch.round(strange * 1e6) + surprise / (1 + surprise)  # ties of rounding go to the least likely
    # Of equal rewards the one that is farther from its group's: where others failed, or did not.
    best, worst = (
        torch.where(differ(rewards, end), -torch.inf, sign * above)
        for end, sign in ((rewards.max(), 1), (rewards.min(), -1))
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
    """float64 [E] each: what an episode earned less the mean of its group, and the group's standard deviation."""
    rewards, groups, _ = earned(batch, call_rewards(batch))
    _, group, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    means = torch.zeros(len(counts), dtype=torch.float64).index_add(0, group, rewards) / counts
    above = rewards - means[group]
    squares = torch.zeros(len(counts), dtype=torch.float64).index_add(0, group, above**2) / counts
    return above, squares.sqrt()[group]


def _of_groups(batch: RolloutBatch, groups: Sequence[int]) -> list[int]:
    return torch.isin(batch.group_ids, torch.tensor(list(groups))).nonzero().flatten().tolist()


def _read(ids: npt.NDArray[Any], images: npt.NDArray[Any], tokenizer: Any) -> str:
    """The text of tokens; pictures by their number, for their placeholders say nothing."""
    said = []
    for begin, end in _runs_of(images):
        part = ids[begin:end].tolist()
        text = tokenizer.decode(part) if tokenizer is not None else " ".join(map(str, part))
        said.append(text if images[begin] < 0 else f"[picture {images[begin] + 1}]")
    text = ("" if tokenizer is not None else " ").join(said)
    if len(text) <= MOST_TEXT:
        return text
    end = MOST_TEXT // 3
    return f"{text[: MOST_TEXT - end]}\n[... {len(text) - MOST_TEXT:,} characters left out ...]\n{text[-end:]}"
