"""Keys made of many tokens each, of the running requests, for models that attend to such (DeepSeek-V4).

They lie beside the key-value grid, in layers of their own, and move with it; each is in the cell of the token that
completes it. Promises: made by the model's own code, over each request's tokens alone; a decoded token that completes
none leaves something that nobody reads, so that steps have the same shapes whatever their positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from app.tree import STATES_ARGUMENT, Compressor, CompressorCall, among, choose_entries, entry_places, made_by
from datamodules.inference.embedded.kv_slots import CachedStep, KVSlots


class EntrySlots:
    """Entries in the grid of `slots`; nothing for models that have none."""

    def __init__(self, compressors: Sequence[Compressor], slots: KVSlots) -> None:
        self.compressors, self.slots = compressors, slots

    @contextmanager
    def made(self) -> Iterator[None]:
        """Inside, entries are made of, and chosen for, the tokens of the slots' step."""
        with made_by(self.compressors, self._make):
            yield
        self.slots.entries.clear()

    def _make(self, one: Compressor, call: CompressorCall) -> Tensor:
        """The entries that the step's tokens complete; the slots know what is attended to."""
        states, step, device = call.around[STATES_ARGUMENT], self.slots.step, call.hidden.device
        ends = step.completing(one.rate)
        depths = step.positions[ends]
        made = one.entries(states, call.hidden, ends, depths)
        place, index_place = entry_places(one.layer)
        entries = self._known(place, made, ends, one.rate)
        queries = self._by_request(step.positions[None, :, None])[..., 0]  # [requests, n]
        last = torch.arange(1, entries.shape[1] + 1, device=device) * one.rate - 1
        seen = last <= queries[..., None]
        if one.indexer is not None:
            own = one.index_entries(states, call.hidden, ends, depths)
            known = self._known(index_place, own, ends, one.rate)
            rows, residual = self._by_request(call.hidden), self._by_request(call.residual)
            picks = choose_entries(one.indexer, rows, residual, queries, known, lambda block: seen[:, block])
            if picks is not None:
                seen = among(picks, torch.arange(known.shape[1], device=device), known.shape[1])
        self.slots.entries[one.layer] = entries.unsqueeze(1), seen.unsqueeze(1)
        return made

    def _known(self, place: int, made: Tensor, ends: Tensor, rate: int) -> Tensor:
        """Keeps entries [1, E, D] that packed tokens int64 [E] complete; all there are, [requests, entries, D]."""
        step = self.slots.step
        self.slots.write(place, step.write[ends], made.unsqueeze(1))
        if isinstance(step, CachedStep):
            grid = self.slots.read(place, step.first, step.count, step.keys)[0]
        else:
            packed = made.new_zeros(1, len(step.write), made.shape[2]).index_copy_(1, ends, made)
            grid = step.unfold(packed.unsqueeze(1))
        return grid[:, 0, rate - 1 :: rate]

    def _by_request(self, packed: Tensor) -> Tensor:
        """[1, T, D] -> [requests, n, D]."""
        return self.slots.step.unfold(packed.unsqueeze(1))[:, 0]
