"""Attention to the tokens in a window and, of all before, to entries that were made of many tokens each (DeepSeek-V4).

A chunk's entries are more keys of it, and those of its path are kept, `rate` times fewer than tokens; an entry is seen
by the rows that see the token which completes it, or by those of them whose indexer chose it (`states.compressors`).

Promises: exact, forward and backward: one softmax over both, gradients of the path's entries add up in the path cache
as those of its keys do, and reach the chunk that made them. Scores of an indexer and masks exist for a block of queries
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.tree.attention.chosen.group_indexer import query_blocks
from app.tree.attention.chosen.selected import ChosenKernel, mask_blocks, picked
from app.tree.attention.chunk_attention import ChunkAttention, LayerCall
from app.tree.attention.kernels import Kernel
from app.tree.attention.part_attention import PartBackend
from app.tree.attention.path_cache import PathCache
from app.tree.planning.layout import Part
from app.tree.prefix_tree import Ints
from app.tree.states.compressors import Compressor, CompressorCall, entry_scores, made_by
from app.tree.states.functions import STATES_ARGUMENT
from app.tree.transfer import on_device


@dataclass(frozen=True, eq=False)
class ChunkEntries:
    """Which rows of a chunk complete an entry of `rate` tokens.

    Attributes:
        rows: int64 [E], ascending. depths: int64 [E], of these. path: entries of the path.
        before: int64 [n + 1], entries that rows before each complete.
    """

    rate: int
    rows: Ints
    depths: Ints
    path: int
    before: Ints

    @classmethod
    def of(cls, chunk: ChunkAttention, rate: int) -> ChunkEntries:
        """Made for the first layer that asks."""
        key = ("entries", rate)
        if key not in chunk.kept:
            completes = (chunk.depths + 1) % rate == 0
            rows, before = np.flatnonzero(completes), np.concatenate([[0], np.cumsum(completes)])
            chunk.kept[key] = cls(rate, rows, chunk.depths[rows], chunk.path_tokens // rate, before)
        found: ChunkEntries = chunk.kept[key]
        return found


@dataclass(frozen=True, eq=False)
class _EntryPart(Part):
    """Its keys are entries: with `path` those of the path, else places in [rows of the chunk | its entries]."""


class EntriesBackend(PartBackend):
    """Attention by parts over [window of path and chunk | entries of the path | entries of the chunk].

    Args:
        place: where the path's entries are in the cache.
        made: those of the chunk, [1, 1, E, D].
        picks: int32 [1, n, k], entries in [path | chunk] that each row attends to, -1 for none; None: all it sees.
    """

    def __init__(self, entries: ChunkEntries, place: int, made: Tensor, picks: Tensor | None) -> None:
        self.entries, self.place, self.made, self.picks = entries, place, made, picks

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, chunk: ChunkAttention, call: LayerCall
    ) -> Tensor:
        return super().attend(q, torch.cat([k, self.made], 2), torch.cat([v, self.made], 2), sinks, chunk, call)

    def parts(self, chunk: ChunkAttention, call: LayerCall) -> Iterator[Part]:
        yield from chunk.parts(call)
        entries, count = self.entries, len(chunk.layout.tokens)
        for start, stop in mask_blocks(count, max(entries.path, len(entries.rows))):
            if entries.path:
                yield _EntryPart(start, stop, 0, entries.path, path=True)
            made = int(entries.before[stop])  # those after them no row of the block sees
            if made:
                yield _EntryPart(start, stop, count, count + made)

    def place_of(self, part: Part, call: LayerCall) -> int:
        return self.place if isinstance(part, _EntryPart) else call.layer

    def mask(self, q: Tensor, part: Part, chunk: ChunkAttention) -> Tensor | None:
        if not isinstance(part, _EntryPart):
            return super().mask(q, part, chunk)
        if part.path and self.picks is None:
            return None
        width = part.k_stop - part.k_start
        seen = None if part.path else visible_entries(chunk, self.entries, part.q_start, part.q_stop, width, q.device)
        if self.picks is not None:
            first = 0 if part.path else self.entries.path
            chosen = picked(self.picks[0, part.q_start : part.q_stop], first, width)
            seen = chosen if seen is None else seen & chosen
        assert seen is not None
        return torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, float("-inf"))

    def kernel(self, q: Tensor, mask: Tensor | None, part: Part, chunk: ChunkAttention, call: LayerCall) -> Kernel:
        own = super().kernel(q, mask, part, chunk, call)
        return ChosenKernel(own) if isinstance(part, _EntryPart) and mask is not None else own

    def add_returned(self, chunk: ChunkAttention, call: LayerCall, grad_k: Tensor, grad_v: Tensor) -> None:
        super().add_returned(chunk, call, grad_k, grad_v)
        count = len(chunk.layout.tokens)
        for stop, by_place in chunk.returned_grads:
            end = count + int(self.entries.before[stop])
            for grad, below in zip((grad_k, grad_v), by_place[self.place], strict=True):
                grad[:, :, end - below.shape[2] : end] += below


def visible_entries(
    chunk: ChunkAttention, entries: ChunkEntries, start: int, stop: int, count: int, device: torch.device
) -> Tensor:
    """bool [stop - start, count]: which of the chunk's first entries rows [start, stop) see."""
    rows, _, ends = (x[None, :count] for x in _on_device(chunk, entries, device))
    query = torch.arange(start, stop, device=device)[:, None]
    return (rows <= query) & (query < ends)


def entry_places(layer: int) -> tuple[int, int]:
    """Where a layer's entries are in a cache, and its indexer's: below the layers."""
    return -1 - 2 * layer, -2 - 2 * layer


class CompressedAttention:
    """The compressors of one model, over trees.

    Attributes:
        rates: of the places in caches that hold entries, how many tokens there are for one.
    """

    def __init__(self, compressors: Sequence[Compressor]) -> None:
        self.compressors = compressors
        self.rates = {place: one.rate for one in compressors for place in entry_places(one.layer)}

    def over_trees(self, index_cache: PathCache) -> AbstractContextManager[None]:
        """Inside, entries are made of, and chosen for, the rows of a chunk and its path. `index_cache`: for entries of
        indexers on the path."""
        return made_by(self.compressors, partial(_make, index_cache))


def _make(index_cache: PathCache, one: Compressor, call: CompressorCall) -> Tensor:
    """The entries that a chunk's rows complete; how they are attended to is said to the chunk."""
    if "tree_chunk" not in call.around:
        raise ValueError(
            f"layer {one.layer} ({type(one.attention).__name__}): runs without the tree inside of a TreeEngine's pass,"
            " as when a loss calls the model itself; ask an engine for its outputs, or the model before the pass"
        )
    chunk, states = call.around["tree_chunk"], call.around[STATES_ARGUMENT]
    entries, count = ChunkEntries.of(chunk, one.rate), len(chunk.layout.tokens)
    ends, depths, _ = _on_device(chunk, entries, call.hidden.device)
    made, picks = one.entries(states, call.hidden, ends, depths), None
    place, index_place = entry_places(one.layer)
    if one.indexer is not None:
        own = one.index_entries(states, call.hidden, ends, depths)
        if chunk.store:
            chunk.index_keys[index_place] = (_in_rows(own, ends, count),)
        before = index_cache.read(index_place, 0, entries.path)[0][0] if entries.path else None
        picks = _choose(one.indexer, call, own, chunk, entries, before)
    if chunk.store:
        kept = _in_rows(made.detach(), ends, count)
        chunk.keys_values[place] = kept, kept
    chunk.backends[one.layer] = EntriesBackend(entries, place, made.unsqueeze(1), picks)
    return made


def _on_device(chunk: ChunkAttention, entries: ChunkEntries, device: torch.device) -> list[Tensor]:
    """Rows that complete an entry, their depths, and the rows behind their last descendants, int64 [E] each; made for
    the first layer that asks."""
    key = ("entries", entries.rate, device)
    if key not in chunk.kept:
        known = entries.rows, entries.depths, chunk.layout.ends[entries.rows]
        chunk.kept[key] = [on_device(x, device) for x in known]
    found: list[Tensor] = chunk.kept[key]
    return found


def _in_rows(entries: Tensor, rows: Tensor, count: int) -> Tensor:
    """[1, E, D] -> [1, 1, n, D], each in the row that completes it."""
    return entries.new_zeros(1, count, entries.shape[2]).index_copy_(1, rows, entries).unsqueeze(1)


@torch.no_grad()
def choose_entries(
    indexer: Any,
    hidden: Tensor,
    residual: Tensor,
    positions: Tensor,
    entries: Tensor,
    visible: Callable[[slice], Tensor],
) -> Tensor | None:
    """What an indexer chooses of its own `entries` [B, T, D] for queries made of `hidden` [B, n, H], `residual`
    [B, n, R] and `positions` int64 [B, n].

    Args:
        visible: bool [B or 1, rows of the block, T] of a block of rows: the entries that they see.

    Returns:
        int32 [B, n, k], places among `entries`, -1 where there were fewer; None where all that can be seen are chosen.
    """
    if entries.shape[1] <= indexer.index_topk:
        return None
    found = list[Tensor]()
    for block in query_blocks(hidden.shape[1], len(hidden) * indexer.num_heads * entries.shape[1]):
        scores = entry_scores(indexer, hidden[:, block], residual[:, block], positions[:, block], entries)
        values, at = scores.masked_fill(~visible(block), float("-inf")).topk(indexer.index_topk, -1)
        found.append(at.masked_fill_(values.isneginf(), -1).int())
    return torch.cat(found, 1)


def _choose(
    indexer: Any,
    call: CompressorCall,
    own: Tensor,
    chunk: ChunkAttention,
    entries: ChunkEntries,
    before: Tensor | None,
) -> Tensor | None:
    """int32 [1, n, k] of all rows, as `EntriesBackend` takes; `own`: the chunk's entries of the indexer [1, E, D],
    `before`: those of its path."""
    known, shares = own if before is None else torch.cat([before, own], 1), chunk.shares
    first = 0 if shares is None else shares.run.start  # of the rows that are run here

    def visible(block: slice) -> Tensor:
        rows = first + block.start, first + block.stop
        seen = visible_entries(chunk, entries, *rows, own.shape[1], call.hidden.device)
        return torch.nn.functional.pad(seen, (entries.path, 0), value=True)[None]

    picks = choose_entries(indexer, call.hidden, call.residual, call.positions, known, visible)
    return picks if picks is None or shares is None else shares.everyones(picks)
