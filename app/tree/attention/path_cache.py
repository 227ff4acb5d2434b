"""Keys and values of the live path (or whatever else layers read of it), per layer, and the gradients that reach them.

Promises: sized for one plan's longest path, never for a configured maximum (on CUDA devices up to a multiple of 2,048
tokens, so that the allocator gives pass after pass the same blocks again); a token on the path is written once and read
in place; gradients are held in the accumulation dtype.
Depth d of the path is row d of every buffer: keys and values [1, Hk, capacity, d], one pair a layer; of indexers,
which have no gradients, keys alone. Where a key is made of several tokens in a row, buffers have one row for so many.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

KeyValue = tuple[Tensor, Tensor]

_CUDA_ROUND = 2048
_NO_RATES: Mapping[int, int] = MappingProxyType({})


class PathCache:
    """The live path of one pass. Buffers of a layer are allocated when its first keys arrive."""

    def __init__(self, capacity: int, with_grads: bool, rates: Mapping[int, int] = _NO_RATES) -> None:
        """`rates`: of the layers whose keys are made of several tokens each, of how many."""
        self.capacity = capacity
        self.with_grads = with_grads
        self.rates = rates
        self._values: dict[int, tuple[Tensor, ...]] = {}
        self._grads: dict[int, KeyValue] = {}

    def push(self, layer: int, start: int, *rows: Tensor) -> None:
        """Writes rows [1, Hk, n, d], keys and values, at depths [start, start + n); a key of several tokens is in the
        row of the last."""
        rate = self.rates.get(layer, 1)
        if layer not in self._values:
            self._values[layer] = tuple(self._buffer(new, new.dtype, rate) for new in rows)
            if self.with_grads:
                keys, values = rows
                dtype = torch.promote_types(torch.float32, keys.dtype)
                self._grads[layer] = (
                    self._buffer(keys, dtype, rate).zero_(),
                    self._buffer(values, dtype, rate).zero_(),
                )
        for buffer, new in zip(self._values[layer], rows, strict=True):
            buffer[:, :, start // rate : (start + new.shape[2]) // rate].copy_(new[:, :, -(start + 1) % rate :: rate])

    def pop(self, start: int, stop: int) -> dict[int, KeyValue]:
        """The gradients that reached depths [start, stop), by layer, which are zero again afterwards."""
        popped: dict[int, KeyValue] = {}
        for layer, buffers in self._grads.items():
            rate = self.rates.get(layer, 1)
            views = [buffer[:, :, start // rate : stop // rate] for buffer in buffers]
            popped[layer] = (views[0].clone(), views[1].clone())
            for view in views:
                view.zero_()
        return popped

    def read(self, layer: int, length: int) -> tuple[Tensor, ...]:
        """Views of keys and values at depths [0, length)."""
        return tuple(buffer[:, :, :length] for buffer in self._values[layer])

    def grads(self, layer: int, length: int) -> KeyValue:
        """Views of the gradients of depths [0, length), in the accumulation dtype, to be added to."""
        keys, values = self._grads[layer]
        return keys[:, :, :length], values[:, :, :length]

    def add_grads(self, layer: int, keys: Tensor, values: Tensor, start: int = 0) -> None:
        """Adds gradients [1, Hk, n, d] of depths [start, start + n)."""
        for buffer, grad in zip(self._grads[layer], (keys, values), strict=True):
            buffer[:, :, start : start + grad.shape[2]] += grad

    def _buffer(self, like: Tensor, dtype: torch.dtype, rate: int) -> Tensor:
        shape = (*like.shape[:2], rows(self.capacity // rate, like.device), like.shape[3])
        return torch.empty(shape, dtype=dtype, device=like.device)


def rows(tokens: int, device: torch.device) -> int:
    """Rows of a buffer for a path of so many tokens."""
    return tokens if device.type != "cuda" else -(-tokens // _CUDA_ROUND) * _CUDA_ROUND
