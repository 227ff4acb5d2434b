"""A `RolloutBatch`, or values of its tokens, as few bytes: what one rank sends to another instead of flat tensors.

Promises: unpacking, of all sequences or some, gives every tensor back bit for bit, and takes memory and time for those
alone. Shared prefixes travel once (depth-first order: a sequence is a number of tokens of its predecessor and what
follows them); masks, versions and what is equal over a turn travel as runs, log-probabilities only where there are any,
each distinct picture once (its bytes are not copied when sequences are taken), and so rows of experts.
On recorded agent episodes that is below a fiftieth of the flat tensors.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.batch import BatchError, RolloutBatch
from app.pictures import Picture, used
from app.routes import BatchRoutes
from app.tree import PrefixTree

_ALIGNMENT = 8  # bytes; the widest element is int64, and a byte view must start at a multiple of its element size
_OF_SEQUENCES = ("rewards", "temperatures", "group_ids", "episode_ids", "turn_indices")
_PICTURE, _ROUTES, _ROWS = "picture", "routes", "route_table"
Array = npt.NDArray[Any]


def pack(batch: RolloutBatch) -> tuple[bytes, Tensor]:
    """Header and payload (uint8) of a batch.

    Raises:
        BatchError: metadata is not JSON-able.
    """
    payload = _Payload()
    for name, tensor in batch.tensors().items():
        values = tensor.detach().cpu().numpy()
        if name == "tokens":
            _pack_tokens(payload, batch)
        elif name == "cu_seqlens":
            payload.add("lengths", _narrow(np.diff(values)))
        elif name in _OF_SEQUENCES:
            payload.add(name, values)
        elif name == _ROUTES:
            _pack_flat(payload, name, _steps(values, batch.cu_seqlens.numpy()))
        elif name == _ROWS:
            payload.add(name, values.reshape(-1))
        else:
            _pack_flat(payload, name, values)
    for picture in batch.pictures:
        payload.add(_PICTURE, picture.pixels.reshape(-1))
    header = {
        "arrays": payload.entries,
        "rows": None if batch.routes is None else batch.routes.table.shape,
        "pictures": [(one.key.hex(), one.pixels.shape, one.tokens) for one in batch.pictures],
        "prompt_ids": batch.prompt_ids,
        "finish_reasons": batch.finish_reasons,
        "metadata": batch.metadata,
    }
    try:
        return zlib.compress(json.dumps(header).encode(), 1), payload.tensor()
    except TypeError as error:
        raise BatchError(
            f"RolloutBatch.metadata cannot be shipped between ranks: {error}; keep JSON-able values in it"
        ) from error


class PackedBatch:
    """What `pack` made of a batch, as it is: a few bytes a token of its prefix tree, from which sequences are taken."""

    def __init__(self, header: bytes, payload: Tensor) -> None:
        self._fields: dict[str, Any] = json.loads(zlib.decompress(header))
        arrays = list(_arrays(self._fields.pop("arrays"), payload))
        self._arrays = {name: array for name, array in arrays if name != _PICTURE}
        pixels = (array for name, array in arrays if name == _PICTURE)
        self._pictures = [
            Picture(bytes.fromhex(key), next(pixels).reshape(shape), tokens)
            for key, shape, tokens in self._fields.pop("pictures")
        ]
        shape = self._fields.pop("rows")
        self._rows = None if shape is None else torch.from_numpy(self._arrays.pop(_ROWS).reshape(shape))
        self._bounds = np.concatenate([[0], np.cumsum(self._arrays.pop("lengths").astype(np.int64))])

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def select(self, indices: Sequence[int]) -> RolloutBatch:
        """A new batch of the sequences `indices`, ascending, one at least; as `RolloutBatch.select`."""
        own = np.asarray(indices, np.int64)
        tensors = {"tokens": self._tokens(own), "cu_seqlens": _starts(self._bounds, own)}
        for name in {name.split(":")[0] for name in self._arrays} - {"order", "shared", "suffixes"}:
            if name in _OF_SEQUENCES:
                tensors[name] = self._arrays[name][own]
            else:
                tensors[name] = _take_flat(self._arrays, name, self._bounds, own)
        fields = {name: [values[i] for i in own] for name, values in self._fields.items()}
        if _ROUTES in tensors:
            tensors[_ROUTES] = _from_steps(tensors[_ROUTES], tensors["cu_seqlens"])
        named = {name: torch.from_numpy(array) for name, array in tensors.items()}
        if self._rows is not None:
            index = named.pop(_ROUTES)
            routes = BatchRoutes(index, self._rows).pointing(index)
            named |= {} if routes is None else {_ROUTES: routes.index, _ROWS: routes.table}
        images, pictures = used(named.pop("images", None), self._pictures)
        if images is not None:
            named["images"] = images
        return RolloutBatch.from_tensors(named, **fields, pictures=pictures)

    def _tokens(self, own: Array) -> Array:
        order, shared, suffixes = (self._arrays[name] for name in ("order", "shared", "suffixes"))
        lengths, starts = np.diff(self._bounds), _starts(self._bounds, own)
        at = dict(zip(own.tolist(), starts.tolist()))
        tokens = np.empty(starts[-1], np.int64)
        path, taken = np.empty(lengths.max(), np.int64), 0
        for i, prefix in zip(order.tolist(), shared.tolist()):  # depth first: the path of the one before is still there
            length = int(lengths[i])
            path[prefix:length] = suffixes[taken : taken + length - prefix]
            taken += length - prefix
            if i in at:
                tokens[at[i] : at[i] + length] = path[:length]
        return tokens


def unpack(header: bytes, payload: Tensor) -> RolloutBatch:
    """The inverse of `pack`."""
    packed = PackedBatch(header, payload)
    return packed.select(range(len(packed)))


def pack_values(values: Mapping[str, Tensor]) -> tuple[bytes, Tensor]:
    """Header and payload (uint8) of named tensors [M], M of each one's own."""
    payload = _Payload()
    for name, tensor in values.items():
        _pack_flat(payload, name, tensor.detach().cpu().numpy())
    header = {"arrays": payload.entries, "lengths": {name: len(tensor) for name, tensor in values.items()}}
    return json.dumps(header).encode(), payload.tensor()


def unpack_values(header: bytes, payload: Tensor) -> dict[str, Tensor]:
    """The inverse of `pack_values`."""
    fields: dict[str, Any] = json.loads(header)
    arrays = dict(_arrays(fields["arrays"], payload))
    whole = np.zeros(1, np.int64)
    return {
        name: torch.from_numpy(_take_flat(arrays, name, np.array([0, length]), whole))
        for name, length in fields["lengths"].items()
    }


def _arrays(entries: list[tuple[str, str, int]], payload: Tensor) -> Iterator[tuple[str, Array]]:
    """Views of the arrays in the payload, by name."""
    data, offset = payload.numpy(), 0
    for name, dtype, count in entries:
        size = count * np.dtype(dtype).itemsize
        yield name, data[offset : offset + size].view(dtype)
        offset += size + -size % _ALIGNMENT


class _Payload:
    """Named arrays, one after another."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, int]] = []
        self._pieces: list[Array] = []

    def add(self, name: str, values: Array) -> None:
        self.entries.append((name, values.dtype.str, len(values)))
        data = np.ascontiguousarray(values).view(np.uint8)
        self._pieces += [data, np.zeros(-len(data) % _ALIGNMENT, np.uint8)]

    def tensor(self) -> Tensor:
        return torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *self._pieces]))


def _pack_tokens(payload: _Payload, batch: RolloutBatch) -> None:
    tree = PrefixTree.build(batch.sequences())
    order, shared = tree.sorted_sequences, tree.shared_with_previous
    sequences = [sequence.numpy() for sequence in batch.sequences()]
    payload.add("order", _narrow(order))
    payload.add("shared", _narrow(shared))
    suffixes = np.concatenate([sequences[i][s:] for i, s in zip(order.tolist(), shared.tolist())])
    payload.add("suffixes", _narrow(suffixes))


def _pack_flat(payload: _Payload, name: str, values: Array) -> None:
    """One value a token, in the smallest of three forms: as it is, as runs of equal bits (masks, versions, advantages
    of whole turns), or as what stands between stretches of zeros (log-probabilities)."""
    bits = values.view(f"u{values.itemsize}")
    starts = np.flatnonzero(np.concatenate([[True], bits[1:] != bits[:-1]]))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], bits != 0, [False]])))
    runs = len(starts) * (4 + values.itemsize)
    between = len(edges) * 4 + int(np.count_nonzero(bits)) * values.itemsize
    if values.nbytes <= min(runs, between):
        payload.add(name, values)
    elif runs <= between:
        payload.add(f"{name}:starts", _narrow(starts))
        payload.add(f"{name}:runs", values[starts])
    else:
        payload.add(f"{name}:edges", _narrow(edges))
        payload.add(f"{name}:found", values[bits != 0])


def _steps(values: Array, bounds: Array) -> Array:
    """Differences of neighbours, of a sequence's first from 0: rows that follow one another become runs of 1."""
    before = np.concatenate([values[:1] * 0, values[:-1]])
    before[bounds[:-1]] = 0
    return values - before


def _from_steps(steps: Array, bounds: Array) -> Array:
    """The inverse."""
    sums = np.cumsum(steps, dtype=np.int64)
    before = np.concatenate([[0], sums])[bounds[:-1]]
    return (sums - np.repeat(before, np.diff(bounds))).astype(steps.dtype)


def _take_flat(arrays: Mapping[str, Array], name: str, bounds: Array, own: Array) -> Array:
    """What the sequences `own` (ascending; sequence i begins at bounds[i]) have of what `_pack_flat` packed; in storage
    of its own: a view would keep the whole payload alive."""
    starts = _starts(bounds, own)
    if name in arrays:
        values = arrays[name]
        return np.concatenate([values[a:b] for a, b in zip(bounds[own].tolist(), bounds[own + 1].tolist())])
    mine = np.zeros(len(bounds) - 1, bool)
    mine[own] = True
    if f"{name}:edges" in arrays:
        edges, found = arrays[f"{name}:edges"].astype(np.int64), arrays[f"{name}:found"]
        lengths = edges[1::2] - edges[::2]
        at = np.arange(len(found)) + np.repeat(edges[::2] - (np.cumsum(lengths) - lengths), lengths)
        sequence = np.searchsorted(bounds, at, side="right") - 1
        inside = mine[sequence]
        moved = np.zeros(len(mine), np.int64)
        moved[own] = starts[:-1] - bounds[own]
        values = np.zeros(starts[-1], found.dtype)
        values[at[inside] + moved[sequence[inside]]] = found[inside]
        return values
    edges, runs = arrays[f"{name}:starts"].astype(np.int64), arrays[f"{name}:runs"]
    cuts = np.unique(np.concatenate([edges, bounds[:-1]]))
    inside = mine[np.searchsorted(bounds, cuts, side="right") - 1]
    lengths = np.diff(np.concatenate([cuts, bounds[-1:]]))
    return np.repeat(runs[np.searchsorted(edges, cuts, side="right") - 1][inside], lengths[inside])


def _starts(bounds: Array, own: Array) -> Array:
    """int64 [len(own) + 1]: where the sequences `own` begin, one after another, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(np.diff(bounds)[own])])


def _narrow(values: Array) -> Array:
    """Non-negative integers in 4 bytes where they fit."""
    return values.astype(np.int32) if not len(values) or values.max() < 2**31 else values
