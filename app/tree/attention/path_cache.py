"""Keys and values of the live path (or whatever else layers read of it), per layer, and the gradients that reach them.

Promises: sized for one plan's longest path, never for a configured maximum (on CUDA devices up to a multiple of 2,048
tokens, so that the allocator gives pass after pass the same blocks again); a token on the path is written once and read
in place; gradients are held in the accumulation dtype.
Buffers of a layer are keys and values [1, Hk, rows, d]; of indexers, which have no gradients, keys alone. Depth d of
the path is row d. Where a key is made of several tokens in a row, there is one row for so many. Of a layer with a
window, each piece of the path leaves as many of its last tokens as whatever hangs below it can see: what is in sight at
the path's end is in the last rows always, in one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

KeyValue = tuple[Tensor, Tensor]

_CUDA_ROUND = 2048
_NO_RATES: Mapping[int, int] = MappingProxyType({})


class PathCache:
    """The live path of one pass. Buffers of a layer are allocated when its first keys arrive.

    Args:
        capacity: tokens of the longest path.
        rates: of the layers whose keys are made of several tokens each, of how many.
        rows_of: rows of the longest path where of each of its pieces so many tokens at most are kept; None keeps all.
    """

    def __init__(
        self,
        capacity: int,
        with_grads: bool,
        rates: Mapping[int, int] = _NO_RATES,
        rows_of: Callable[[int], int] | None = None,
    ) -> None:
        self.capacity = capacity
        self.with_grads = with_grads
        self.rates = rates
        self.rows_of = rows_of
        self._pieces: list[int] = []  # tokens of each on the path
        self._length = 0
        self._kept: dict[int, int] = {}  # layer -> most tokens of a piece that are
        self._missing: dict[int, int] = {}  # most tokens of a piece -> depths of the path without a row
        self._values: dict[int, tuple[Tensor, ...]] = {}
        self._grads: dict[int, KeyValue] = {}

    def limit(self, layer: int, window: int | None) -> None:
        """Tells, before its first keys come, how many tokens each of a layer's tokens sees, itself included."""
        if window is not None and self.rows_of is not None and layer not in self._values:
            self._kept[layer] = max(1, window - 1)

    def push(self, held: Mapping[int, tuple[Tensor, ...]], rows: slice) -> None:
        """Puts a piece at the path's end: keys and values [1, Hk, n, d] by layer, of which it is these `rows`. A key of
        several tokens is in the row of the last."""
        start, stop = self._length, self._length + rows.stop - rows.start
        self._pieces.append(stop - start)
        self._moved(stop, stop - start, 1)
        for layer, tensors in held.items():
            rate = self.rates.get(layer, 1)
            if layer not in self._values:
                self._allocate(layer, tensors, rate)
            first, missing = self._first(layer, start, stop), self._without_row(layer)
            behind = rows.start + first - start
            for buffer, x in zip(self._values[layer], tensors, strict=True):
                new = x[:, :, behind : rows.stop]
                here = slice((first - missing) // rate, (stop - missing) // rate)
                buffer[:, :, here].copy_(new[:, :, -(first + 1) % rate :: rate])

    def pop(self) -> dict[int, KeyValue]:
        """Takes the last piece off the path. The gradients that reached its keys, by layer, which are zero again
        afterwards: where not all tokens are kept, of the last ones."""
        popped: dict[int, KeyValue] = {}
        stop, start = self._length, self._length - self._pieces[-1]
        for layer, buffers in self._grads.items():
            rate, first, missing = self.rates.get(layer, 1), self._first(layer, start, stop), self._without_row(layer)
            views = [buffer[:, :, (first - missing) // rate : (stop - missing) // rate] for buffer in buffers]
            popped[layer] = (views[0].clone(), views[1].clone())
            for view in views:
                view.zero_()
        self._moved(start, self._pieces.pop(), -1)
        return popped

    def begins(self, layer: int) -> int:
        """The first depth in a layer's sight from the path's end on."""
        return max(0, self._length - self._kept.get(layer, self._length))

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, ...]:
        """Views of keys and values at depths [start, stop), all of them in sight from the path's end."""
        return tuple(buffer[:, :, self._rows(layer, start, stop)] for buffer in self._values[layer])

    def grads(self, layer: int, start: int, stop: int) -> KeyValue:
        """Views of the gradients of these depths, in the accumulation dtype, to be added to."""
        keys, values = (buffer[:, :, self._rows(layer, start, stop)] for buffer in self._grads[layer])
        return keys, values

    def add_grads(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        """Adds gradients [1, Hk, n, d] of depths [start, start + n)."""
        for view, grad in zip(self.grads(layer, start, start + keys.shape[2]), (keys, values), strict=True):
            view += grad

    def _moved(self, length: int, tokens: int, more: int) -> None:
        """The path is so long now, by a piece of so many tokens more or less."""
        self._length = length
        for most in self._missing:
            self._missing[most] += more * max(0, tokens - most)

    def _first(self, layer: int, start: int, stop: int) -> int:
        """The first depth of the piece [start, stop) that has a row."""
        return max(start, stop - self._kept.get(layer, stop))

    def _rows(self, layer: int, start: int, stop: int) -> slice:
        missing = self._without_row(layer)
        return slice(start - missing, stop - missing)

    def _without_row(self, layer: int) -> int:
        """How many depths of the path have none: those in sight from its end are so many rows further up."""
        most = self._kept.get(layer)
        if most is None:
            return 0
        if most not in self._missing:
            self._missing[most] = sum(max(0, tokens - most) for tokens in self._pieces)
        return self._missing[most]

    def _allocate(self, layer: int, tensors: tuple[Tensor, ...], rate: int) -> None:
        most, capacity = self._kept.get(layer), self.capacity // rate
        if most is not None and self.rows_of is not None:
            capacity = self.rows_of(most)

        def buffer(like: Tensor, dtype: torch.dtype) -> Tensor:
            shape = (*like.shape[:2], rows(capacity, like.device), like.shape[3])
            return torch.empty(shape, dtype=dtype, device=like.device)

        self._values[layer] = tuple(buffer(new, new.dtype) for new in tensors)
        if self.with_grads:
            keys, values = tensors
            dtype = torch.promote_types(torch.float32, keys.dtype)
            self._grads[layer] = (buffer(keys, dtype).zero_(), buffer(values, dtype).zero_())


def rows(tokens: int, device: torch.device) -> int:
    """Rows of a buffer for a path of so many tokens."""
    return tokens if device.type != "cuda" else -(-tokens // _CUDA_ROUND) * _CUDA_ROUND
