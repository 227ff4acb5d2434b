"""A `RolloutBatch` as few bytes: what one rank sends to another instead of flat tensors.

Promises: unpacking gives every tensor back bit for bit. Shared prefixes travel once (depth-first order: a sequence
is a number of tokens of its predecessor and what follows them); masks, versions and what is equal over a turn travel as
runs, log-probabilities only where there are any. On recorded agent episodes that is below a fiftieth of the flat
tensors.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.batch import BatchError, RolloutBatch
from app.tree import PrefixTree

_ALIGNMENT = 8  # bytes; the widest element is int64, and a byte view must start at a multiple of its element size
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
        elif len(values) == batch.num_tokens:
            _pack_flat(payload, name, values)
        else:
            payload.add(name, values)
    header = {
        "arrays": payload.entries,
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


def unpack(header: bytes, payload: Tensor) -> RolloutBatch:
    """The inverse of `pack`."""
    fields: dict[str, Any] = json.loads(zlib.decompress(header))
    arrays: dict[str, Array] = {}
    data, offset = payload.numpy(), 0
    for name, dtype, count in fields.pop("arrays"):
        size = count * np.dtype(dtype).itemsize
        arrays[name] = data[offset : offset + size].view(dtype)
        offset += size + -size % _ALIGNMENT
    lengths = arrays.pop("lengths").astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    tensors = {"tokens": _unpack_tokens(arrays, lengths, bounds), "cu_seqlens": bounds}
    for name in [name for name in arrays if ":" not in name]:
        tensors[name] = arrays[name].copy()  # own storage: a view would keep the whole payload alive
    for name in {name.split(":")[0] for name in arrays if ":" in name}:
        tensors[name] = _unpack_flat(arrays, name, int(bounds[-1]))
    return RolloutBatch.from_tensors({name: torch.from_numpy(array) for name, array in tensors.items()}, **fields)


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
        return torch.from_numpy(np.concatenate(self._pieces))


def _pack_tokens(payload: _Payload, batch: RolloutBatch) -> None:
    tree = PrefixTree.build(batch.sequences())
    order, shared = tree.sorted_sequences, tree.shared_with_previous
    sequences = [sequence.numpy() for sequence in batch.sequences()]
    payload.add("order", _narrow(order))
    payload.add("shared", _narrow(shared))
    suffixes = np.concatenate([sequences[i][s:] for i, s in zip(order.tolist(), shared.tolist())])
    payload.add("suffixes", _narrow(suffixes))


def _unpack_tokens(arrays: dict[str, Array], lengths: Array, bounds: Array) -> Array:
    order, shared, suffixes = (arrays.pop(name) for name in ("order", "shared", "suffixes"))
    tokens = np.empty(bounds[-1], np.int64)
    taken, before = 0, 0
    for i, prefix in zip(order.tolist(), shared.tolist()):
        start, own = int(bounds[i]), int(lengths[i]) - prefix
        tokens[start : start + prefix] = tokens[before : before + prefix]
        tokens[start + prefix : start + prefix + own] = suffixes[taken : taken + own]
        taken, before = taken + own, start
    return tokens


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


def _unpack_flat(arrays: dict[str, Array], name: str, total: int) -> Array:
    if f"{name}:edges" in arrays:
        edges, found = arrays[f"{name}:edges"].astype(np.int64), arrays[f"{name}:found"]
        inside = np.zeros(total + 1, np.int8)
        inside[edges[::2]] = 1
        inside[edges[1::2]] -= 1
        values = np.zeros(total, found.dtype)
        values[np.cumsum(inside[:-1], dtype=np.int8) != 0] = found
        return values
    starts, runs = arrays[f"{name}:starts"].astype(np.int64), arrays[f"{name}:runs"]
    return np.repeat(runs, np.diff(np.concatenate([starts, [total]])))


def _narrow(values: Array) -> Array:
    """Non-negative integers in 4 bytes where they fit."""
    return values.astype(np.int32) if not len(values) or values.max() < 2**31 else values
