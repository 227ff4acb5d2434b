"""Pictures in prompts of running requests: what tells prompts apart, where tokens stand, the features of a forward.

Promises: two prompts are equal where their text and their pictures are, never by placeholder ids alone; positions are
those that the trainer counts (`app.tree.picture_positions`); a picture's features are made once for as long as the
tower's weights stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.pictures import Picture
from app.tree import Tower, picture_positions, refuse_pictures
from datamodules.inference.protocol import GenerationRequest


class PromptImages:
    """The pictures of one request.

    Attributes:
        pictures: as in the request.
        owner, row: int64 [P], for each token of the prompt its picture or -1, and which row of its features.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.pictures = request.pictures
        self.owner = np.array(request.images if request.pictures else [], np.int64)
        self.row = np.zeros_like(self.owner)
        for k, picture in enumerate(self.pictures):
            here = np.flatnonzero(self.owner == k)
            self.row[here] = np.arange(len(here)) % picture.tokens
        self._positions: np.ndarray | None = None  # [3, P]

    def identity(self, tokens: Sequence[int]) -> tuple[int | bytes, ...]:
        """See `Sequence.identity`."""
        if not self.pictures:
            return tuple(tokens)
        keys = [None if k < 0 else self.pictures[k].key for k in self.owner.tolist()]
        return (*(token if key is None else key for token, key in zip(tokens, keys)), *tokens[len(keys) :])

    def uncut(self, end: int) -> int:
        """The last place up to `end` that is not among placeholders next to each other."""
        while 0 < end < len(self.owner) and self.owner[end - 1] >= 0 and self.owner[end] >= 0:
            end -= 1
        return end

    @property
    def longest(self) -> int:
        """Most placeholders next to each other."""
        runs = runs_of([(self, 0)], [len(self.owner)])[0]
        return int(np.bincount(runs[runs >= 0], minlength=1).max())

    def positions(self, model: PreTrainedModel, start: int, count: int) -> np.ndarray:
        """int64 [3, count]: of the tokens of the request from `start` on, in a model that counts pictures."""
        if not self.pictures:
            return np.broadcast_to(np.arange(start, start + count), (3, count))
        if self._positions is None:
            self._positions = picture_positions(model, self.owner, self.pictures)
            assert self._positions is not None, "the model counts pictures"
        known = self._positions[:, start : start + count]
        prompt = len(self.owner)
        after = np.arange(max(start, prompt), start + count) - prompt + self._positions[:, -1].max() + 1
        return np.concatenate([known, np.broadcast_to(after, (3, len(after)))], axis=1)


Spans = Sequence[tuple[PromptImages, int]]
"""The requests of a forward, and the first token of each that it computes."""


def runs_of(spans: Spans, lengths: Sequence[int]) -> list[np.ndarray]:
    """int64 [n] of each request of a forward: placeholders next to each other by numbers from 0 on, -1 for others."""
    found = []
    for (images, start), n in zip(spans, lengths):
        here = np.zeros(n, bool)
        known = images.owner[start : start + n] >= 0
        here[: len(known)] = known
        found.append(np.where(here, np.cumsum(np.diff(here, prepend=False) & here) - 1, -1))
    return found


def unseeing(model: PreTrainedModel, processor: Any | None) -> str:
    """Why the model can be shown no pictures here, where features are made once and tokens see those before them, and
    placeholders those of their picture; "" where it can."""
    if processor is not None:
        try:
            refuse_pictures(model, processor)
        except ValueError as error:
            return str(error)
    return ""


def placed(tower: Tower, spans: Spans, lengths: Sequence[int], counted: Tensor) -> Tensor:
    """Positions of a forward's packed tokens, `lengths` of each request: [3, 1, T] in a model that counts pictures,
    else `counted`, [1, T]."""
    if tower.positions is None:
        return counted
    return torch.from_numpy(placed_next(tower, spans, lengths)).to(counted.device).unsqueeze(1)


def placed_next(tower: Tower, spans: Spans, lengths: Sequence[int]) -> np.ndarray:
    """The same as int64 [3, T], of a model that counts pictures."""
    return np.concatenate([images.positions(tower.model, start, n) for (images, start), n in zip(spans, lengths)], 1)


def featured(tower: Tower, spans: Spans, lengths: Sequence[int]) -> dict[str, Any]:
    """The model's argument with the features of a forward's tokens; empty where none of them is a picture's."""
    runs: list[tuple[Picture, np.ndarray]] = []  # of tokens of one picture, and their rows of its features
    for (images, start), n in zip(spans, lengths):
        owners, rows = images.owner[start : start + n], images.row[start : start + n]
        edges = np.flatnonzero(np.diff(owners, prepend=-2, append=-2))
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist()):
            if owners[first] >= 0:
                runs.append((images.pictures[owners[first]], rows[first:last]))
    if not runs:
        return {}
    parts = [
        [table[torch.from_numpy(rows).to(table.device)] for table in tables]
        for (_, rows), tables in zip(runs, tower.features([picture for picture, _ in runs]))
    ]
    return tower.wrapped([torch.cat(column) for column in zip(*parts)])
