"""Index keys of the running requests, for models whose layers attend to what an indexer chose.

They lie beside the key-value grid, as a layer of its own, and move with it. Promises: indexers run by their own code,
each request's tokens choosing among that request's alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.tree import (
    Groups,
    Indexers,
    IndexKeys,
    chooses_blocks,
    chooses_groups,
    pools,
    run_block_indexer,
    run_group_indexer,
    run_indexer,
)
from datamodules.inference.embedded.kv_slots import CachedStep, KVSlots, PromptStep


class IndexSlots:
    """Index keys in the grid of `slots`; nothing for models that have none."""

    def __init__(self, model: PreTrainedModel, slots: KVSlots) -> None:
        self.indexers, self.slots = Indexers.of(model), slots

    @contextmanager
    def chosen(self, tokens: Tensor) -> Iterator[dict[str, Any]]:
        """Inside, indexers choose for the slots' step of packed `tokens` [1, T]; gives arguments of its forward."""
        if not self.indexers:
            yield {}
            return
        self.slots.stand_in, masks = self.indexers.masks(tokens.shape[1], tokens.device)
        with self.indexers.run_by(self._choose):
            yield masks

    def _choose(self, layer: int, forward: Any, arguments: dict[str, Any]) -> Tensor:
        """int32 [requests, queries, k]: positions in each request's row of the grid; or, of an indexer that chooses
        blocks, [requests, heads, queries, k]."""
        step = self.slots.step
        given = {name: _unfolded(value, step) for name, value in arguments.items()}
        if isinstance(step, PromptStep):
            made = _PromptKeys()
            found = _run(forward, given, step, step.longest, step.longest, made)
            assert made.all is not None, "an indexer asks for its keys"
            self.slots.write(_place(layer), step.write, step.fold(made.all.unsqueeze(1)).transpose(1, 2))
            return found
        if not pools(forward.__self__):
            return _run(forward, given, step, step.queries, step.keys, _CachedKeys(self.slots, step))
        keys = _RightAligned(self.slots, step)
        found = _run(forward, given, step, step.queries, step.keys, keys)
        return torch.where(found < 0, found, found - keys.shift[:, None, None]).to(found.dtype)


def _run(
    forward: Any, given: dict[str, Any], step: PromptStep | CachedStep, queries: int, total: int, keys: IndexKeys
) -> Tensor:
    if chooses_groups(forward.__self__):
        in_order = torch.arange(queries, device=step.write.device)[None]
        places = in_order if isinstance(step, PromptStep) else step.positions.view(-1, queries)
        groups = Groups.of_sequences(places, total, forward.__self__.compress_ratio)
        return run_group_indexer(forward.__self__, given, groups, total, keys)
    if chooses_blocks(forward.__self__):
        return run_block_indexer(forward, given, queries, total, keys)
    return run_indexer(forward, given, queries, total, keys, step.seen)


def _place(layer: int) -> int:
    """Where its keys are in the grid: below the layers that attend."""
    return -1 - layer


def _unfolded(value: Any, step: PromptStep | CachedStep) -> Any:
    """An argument of packed tokens [1, T, ...], a request a row."""
    if isinstance(value, tuple):
        return tuple(_unfolded(one, step) for one in value)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != len(step.write):
        return value
    rows = step.unfold(value.reshape(1, 1, len(step.write), -1))  # [requests, 1, queries, D]
    return rows.reshape(rows.shape[0], rows.shape[2], *value.shape[2:])


class _PromptKeys:
    """Of prompts of which nothing is in the grid yet."""

    def __init__(self) -> None:
        self.all: Tensor | None = None

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        self.all = keys if self.all is None else torch.cat([self.all, keys], 1)
        return self.all


class _CachedKeys:
    """Of next tokens, which go into the grid behind those that are there."""

    def __init__(self, slots: KVSlots, step: CachedStep) -> None:
        self.slots, self.step, self.filled = slots, step, 0

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        step, stop = self.step, self.filled + keys.shape[1]
        cells = step.write.view(step.count, step.queries)[:, self.filled : stop].reshape(-1)
        self.slots.write(_place(layer), cells, keys.reshape(1, 1, len(cells), -1))
        self.filled = stop
        return self.slots.read(_place(layer), step.first, step.count, step.keys)[0][:, 0]


class _RightAligned(_CachedKeys):
    """The same for indexers that pool, which take sequences: those of all requests end with the next tokens, and what
    is before a sequence's first says so (0) where a row says that it is a token, in its last place."""

    def __init__(self, slots: KVSlots, step: CachedStep) -> None:
        super().__init__(slots, step)
        last = step.positions.view(step.count, step.queries)[:, -1]
        self.shift = step.keys - 1 - last

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        everything = super().update_indexer(keys, layer)
        length = self.step.keys - self.step.queries + self.filled
        at = torch.arange(length, device=keys.device) - self.shift[:, None]
        aligned = everything.gather(1, at.clamp_min(0).unsqueeze(2).expand(-1, -1, keys.shape[2]))
        aligned[..., -1] *= at >= 0
        return aligned
