"""Keys and values of the running requests, and the attention that reads them.

A slot is one row of a [rows x width] grid of tokens, request r owning row r; the grid is laid over one buffer per
layer whose size in tokens is configured, so memory is bounded whatever arrives. Models of transformers reach it
through the attention interface (`ATTENTION` is a registered name): tokens of many requests are packed in one
sequence [1, T], the linear layers never see padding, and only the attention unfolds requests.

Promises: any decoder that calls transformers' attention interface works; an argument of that interface which would
change the result and is not honoured here raises. Placeholders of a picture that see each other do so in the layers in
which they do, where a step has all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from app.tree import STATES_ARGUMENT, Places, among, chosen_in, section_of

ATTENTION = "arborist_slots"
# Arguments that describe what `step` already says, or that change nothing in a forward without gradient.
_IMPLIED = frozenset(
    {
        *("position_ids", "cache_position", "use_cache", "layer_idx"),
        *("output_attentions", "output_router_logits", STATES_ARGUMENT),
        "logits_to_keep",  # of the head, which some hand on to their layers
    }
)
_SCORES = 2**24
"""Most scores at a time where attention is written out."""


_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def any_length(device: torch.device) -> AbstractContextManager[None]:
    """Forwards inside use kernels of torch that serve every length at once: cuDNN's, torch's choice on Hopper, would
    build a plan, tens of milliseconds, for every number of requests and of keys, hence at each decoded token."""
    return sdpa_kernel(_ANY_LENGTH) if device.type == "cuda" else nullcontext()


class Sight(NamedTuple):
    """How far a layer's tokens see: so many tokens, themselves included, or those of their section of so many
    positions; None: as far as there are any."""

    window: int | None = None
    section: int | None = None

    def among(self, seen: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Of what is seen, bool, what is in sight of queries at these positions."""
        if self.window is not None:
            seen = seen & (keys > queries - self.window)
        return seen if self.section is None else seen & (keys >= queries // self.section * self.section)


class PromptStep:
    """Whole prompts, nothing of them in the grid yet: causal attention of each over itself.

    Attributes:
        lengths: tokens of each prompt; T = their sum.
        positions: int64 [T], position of each packed token in its request.
        write: int64 [T], grid cell of each packed token.
        depths: the positions, in memory of the host.
        runs: int64 [count, longest], see `show`; None: no token sees any after it.
    """

    runs: Tensor | None = None

    def __init__(self, rows: list[int], lengths: list[int], width: int, device: torch.device) -> None:
        self.longest = max(lengths)
        self.count = len(lengths)
        length = torch.tensor(lengths)
        ends = length.cumsum(0)
        total = int(ends[-1])
        starts = (ends - length).repeat_interleave(length)
        self.depths = positions = torch.arange(total) - starts
        self.positions = positions.to(device)
        self.write = (torch.tensor(rows).repeat_interleave(length) * width + positions).to(device)
        self.ragged = min(lengths) != self.longest
        if self.ragged:  # cell of each token in the padded [count x longest] grid, and the way back
            owner = torch.arange(self.count).repeat_interleave(length)
            self.unpad = (owner * self.longest + positions).to(device)
            pad = torch.zeros(self.count * self.longest, dtype=torch.int64, device=device)
            self.pad = pad.index_copy_(0, self.unpad, torch.arange(total, device=device))

    def completing(self, rate: int) -> Tensor:
        """int64 [E]: packed tokens that are the last of `rate` in a row of their request, counted from its first."""
        return _completing(self.depths, rate).to(self.write.device)

    def unfold(self, packed: Tensor) -> Tensor:
        """[1, H, T, D] -> [count, H, longest, D]; the padding repeats some token, no valid query sees it."""
        rows = packed[0].transpose(0, 1)
        rows = rows[self.pad] if self.ragged else rows
        return rows.view(self.count, self.longest, *rows.shape[1:]).transpose(1, 2)

    def fold(self, output: Tensor) -> Tensor:
        """[count, H, longest, D] -> [1, T, H, D]."""
        rows = output.transpose(1, 2).reshape(-1, output.shape[1], output.shape[3])
        return (rows[self.unpad] if self.ragged else rows).unsqueeze(0)

    def show(self, runs: Sequence[npt.NDArray[np.int64]]) -> None:
        """Of each prompt int64 [length]: tokens of equal numbers from 0 on see each other, in layers where they do."""
        padded = [np.pad(own, (0, self.longest - len(own)), constant_values=-1) for own in runs]
        self.runs = torch.from_numpy(np.stack(padded)).to(self.write.device)

    def mask(self, sight: Sight, ahead: bool = False, chosen: Tensor | None = None) -> Tensor | None:
        """bool [count or 1, 1, longest, longest] of what is visible, among `chosen` where there is one; None when plain
        causal attention says it. `ahead`: in a layer in which `runs` see each other."""
        plain = chosen is None and not (ahead and self.runs is not None)
        if plain and all(one is None or one >= self.longest for one in sight):
            return None
        visible = self.visible(sight, ahead)
        return visible if chosen is None else visible & chosen

    def visible(self, sight: Sight, ahead: bool = False) -> Tensor:
        """bool [count or 1, 1, longest, longest]."""
        at = torch.arange(self.longest, device=self.write.device)
        seen = (at[None, :] <= at[:, None])[None, None]
        if ahead and self.runs is not None:
            seen = seen | _together(self.runs, self.runs)
        return sight.among(seen, at[:, None], at[None, :])

    def seen(self, queries: slice) -> Tensor:
        """bool [1, queries, queries.stop]: the keys that such queries of a prompt see."""
        at = torch.arange(queries.stop, device=self.write.device)
        return (at[None, :] <= at[queries, None])[None]


class CachedStep:
    """`queries` next tokens for each of the rows `first .. first + count - 1`, attending to the grid.

    Attributes:
        positions, write, depths: int64 [T], T = count * queries, as in `PromptStep`.
        keys: tokens of each row that are read; beyond a row's own position they are masked.
        runs: int64 [1, queries], as in `PromptStep`.
    """

    runs: Tensor | None = None

    def __init__(self, first: int, starts: list[int], queries: int, width: int, device: torch.device) -> None:
        self.first, self.count, self.queries = first, len(starts), queries
        self.keys = max(starts) + queries
        positions = torch.tensor(starts)[:, None] + torch.arange(queries)
        rows = torch.arange(first, first + self.count)[:, None]
        self.write = (rows * width + positions).view(-1).to(device)
        self.depths = positions.view(-1)
        self.positions = self.depths.to(device)
        self._masks: dict[tuple[Sight, torch.dtype, bool], Tensor] = {}

    def show(self, runs: Sequence[npt.NDArray[np.int64]]) -> None:
        """As `PromptStep.show`, of the next tokens of one request; those before them are in none of their runs."""
        (own,) = runs
        self.runs = torch.from_numpy(own)[None].to(self.write.device)

    def bias(self, sight: Sight, dtype: torch.dtype, ahead: bool = False) -> Tensor:
        """[count, 1, queries, keys] of `dtype`: 0 where visible, -inf elsewhere; made once a step and kind of layer."""
        key = (sight, dtype, ahead and self.runs is not None)
        if key not in self._masks:
            at = torch.arange(self.keys, device=self.write.device)
            position = self.positions.view(self.count, 1, self.queries, 1)
            visible = at <= position
            if ahead and self.runs is not None:
                before = self.runs.new_full((1, self.keys - self.queries), -1)
                visible = visible | _together(self.runs, torch.cat([before, self.runs], 1))
            self._masks[key] = _bias(sight.among(visible, position, at), dtype)
        return self._masks[key]

    def completing(self, rate: int) -> Tensor:
        """As of `PromptStep`."""
        return _completing(self.depths, rate).to(self.write.device)

    def unfold(self, packed: Tensor) -> Tensor:
        """[1, H, T, D] -> [count, H, queries, D]."""
        return packed.view(packed.shape[1], self.count, self.queries, -1).transpose(0, 1)

    def seen(self, queries: slice) -> Tensor:
        """bool [count, queries, keys]: the keys that such queries of each row see."""
        at = torch.arange(self.keys, device=self.write.device)
        return at <= self.positions.view(self.count, self.queries, 1)[:, queries]


class StaticStep(CachedStep):
    """One next token for each of the grid's first rows, at positions int64 [count], below `keys`, that only the device
    reads: shapes and strides are those of `count`, `keys` and `width` alone."""

    def __init__(self, positions: Tensor, keys: int, width: int) -> None:
        self.first, self.count, self.queries, self.keys = 0, len(positions), 1, keys
        self.write = torch.arange(self.count, device=positions.device) * width + positions
        self.positions = positions
        self._masks = {}

    def completing(self, rate: int) -> Tensor:
        """All tokens: which of them do, only the device knows."""
        return torch.arange(self.count, device=self.positions.device)


def _completing(depths: Tensor, rate: int) -> Tensor:
    return ((depths + 1) % rate == 0).nonzero()[:, 0]


def _together(queries: Tensor, keys: Tensor) -> Tensor:
    """bool [n, 1, Q, K]: which tokens of runs [n, Q] and [n, K] are in the same."""
    return ((queries[:, :, None] == keys[:, None, :]) & (queries[:, :, None] >= 0))[:, None]


class KVSlots:
    """The grid of every layer.

    Attributes:
        capacity: tokens of a layer's buffer.
        width: tokens of a row; `capacity // width` rows.
        step: what the forward pass in progress computes; to be set before each.
        stand_in: for its mask, in models whose layers choose what they attend to (`index_slots`, which keeps its keys
            here as well: in layers below 0).
        ahead: layers in which placeholders of a picture see each other.
        entries: by layer, keys beside the tokens' own that queries of the step attend to (`entry_slots`), [n, 1, E, D],
            which are values too, and bool [n, 1, Q, E], which of them each query sees.
    """

    def __init__(self, capacity: int, ahead: frozenset[int] = frozenset()) -> None:
        self.capacity, self.ahead = capacity, ahead
        self.width = 1
        self._step: PromptStep | CachedStep | None = None
        self._written: set[int] = set()
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self.stand_in: Tensor | None = None
        self.entries: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def step(self) -> PromptStep | CachedStep:
        assert self._step is not None, "set before the model runs"
        return self._step

    @step.setter
    def step(self, step: PromptStep | CachedStep) -> None:
        self._step = step
        self._written.clear()

    @property
    def layers_written(self) -> int:
        """Layers that stored their keys and values since `step` was set."""
        return sum(layer >= 0 for layer in self._written)

    @property
    def bytes(self) -> int:
        """Bytes held after the first forward: 2 * capacity * heads * head_dim * itemsize of each layer."""
        return sum(buffer.nbytes for pair in self._layers.values() for buffer in pair)

    def write(self, layer: int, cells: Tensor, *rows: Tensor) -> None:
        """Stores rows [1, H, T, D], keys and values, in the grid cells int64 [T]."""
        if layer not in self._layers:  # head counts and sizes are the layer's own business
            # Zeros: a masked cell has weight 0, but 0 x NaN of unwritten memory would still be NaN.
            self._layers[layer] = tuple(x.new_zeros(self.capacity, x.shape[1], x.shape[3]) for x in rows)
        self._written.add(layer)
        for buffer, new in zip(self._layers[layer], rows, strict=True):
            buffer.index_copy_(0, cells, new[0].transpose(0, 1))

    def read(self, layer: int, first: int, count: int, keys: int) -> tuple[Tensor, ...]:
        """Views [count, H, keys, D] of keys and values; nothing is copied."""
        return tuple(grid[first : first + count, :keys].transpose(1, 2) for grid in self._grids(layer, self.width))

    def copy_rows(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copies the first `length` tokens of rows `sources` to rows `targets`, in all layers."""
        for layer in self._layers:
            for grid in self._grids(layer, self.width):
                grid[targets, :length] = grid[sources, :length]

    def resize(self, width: int, rows: int, length: int) -> None:
        """Lays the grid out anew, `width` tokens a row, keeping `length` tokens of each of the first `rows` rows."""
        for layer in self._layers:
            old, new = self._grids(layer, self.width), self._grids(layer, width)
            for before, after in zip(old, new):
                after[:rows, :length] = before[:rows, :length].clone()
        self.width = width

    def _grids(self, layer: int, width: int) -> list[Tensor]:
        rows = self.capacity // width
        return [buffer[: rows * width].view(rows, width, *buffer.shape[1:]) for buffer in self._layers[layer]]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slots: KVSlots,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **extra: object,
) -> tuple[Tensor, None]:
    """The attention function transformers calls: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D];
    `softcap` of the scores, `s_aux` [Hq] attention sinks, `indices` what an indexer chose (`index_slots`),
    `block_indices` the same of one that chooses blocks."""
    unknown = sorted(name for name, given in extra.items() if given is not None and name not in _IMPLIED)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):  # as transformers' own read it
        unknown.append("is_causal=False")
    attention_mask, indices = chosen_in(attention_mask, indices, slots.stand_in)
    if attention_mask is not (None if indices is None else slots.stand_in):
        unknown.append("attention_mask")
    if sliding_window is not None or slots.stand_in is None:
        choices = {"indices": indices, "block_indices": block_indices}
        unknown += [name for name, given in choices.items() if given is not None]
    if unknown or dropout:
        names = unknown or ["dropout"]
        raise NotImplementedError(
            f"the embedded engine's attention does not honour {', '.join(names)} of {type(module).__name__}"
        )
    step = slots.step
    layer = cast(int, module.layer_idx)
    ahead = layer in slots.ahead
    slots.write(layer, step.write, key, value)
    sight = Sight(sliding_window, section_of(module))
    if (scaled := Places.of(module)) is not None:
        query = scaled.scale(query, step.positions)
    keys = step.longest if isinstance(step, PromptStep) else step.keys
    if block_indices is None:
        chosen = _chosen(indices, keys)
    else:
        chosen = _in_blocks(block_indices, cast(int, cast(torch.nn.Module, module.indexer).block_size), keys)
        chosen = None if chosen is None else chosen.repeat_interleave(query.shape[1] // chosen.shape[1], 1)
    if isinstance(step, PromptStep):
        q, k, v = step.unfold(query), step.unfold(key), step.unfold(value)
        mask = step.mask(sight, ahead, chosen)
        if softcap is not None or s_aux is not None:
            bias = _bias(step.visible(Sight(), ahead) if mask is None else mask, torch.float32)
            k, v, bias = _beside(slots, layer, k, v, bias)
            return step.fold(_written_out(q, k, v, bias, scaling, softcap, s_aux)), None
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] > k.shape[1]
        )
        return step.fold(out), None
    k, v = slots.read(layer, step.first, step.count, step.keys)
    q, bias = step.unfold(query), step.bias(sight, query.dtype, ahead)
    if chosen is not None:
        bias = bias + _bias(chosen, bias.dtype)
    k, v, bias = _beside(slots, layer, k, v, bias)
    if softcap is not None or s_aux is not None:
        out = _written_out(q, k, v, bias, scaling, softcap, s_aux)
    else:
        out = _masked(q, k, v, bias, scaling)
    return out.transpose(1, 2).reshape(1, step.count * step.queries, query.shape[1], -1), None


def _beside(slots: KVSlots, layer: int, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and what is visible of them, with the entries that a layer attends to as well."""
    if layer not in slots.entries:
        return k, v, bias
    entries, seen = slots.entries.pop(layer)
    bias = torch.cat([bias.expand(len(seen), -1, -1, -1), _bias(seen, bias.dtype)], -1)
    return torch.cat([k, entries], 2), torch.cat([v, entries], 2), bias


def _chosen(indices: Tensor | None, keys: int) -> Tensor | None:
    """bool [n, 1, Q, keys] of the positions in int32 [n, Q, k], -1 for none; None where all are chosen."""
    if indices is None or indices.shape[-1] == keys:
        return None
    at = torch.where(indices < 0, keys, indices).long()  # a column of its own for none
    chosen = torch.zeros(*indices.shape[:2], keys + 1, dtype=torch.bool, device=indices.device)
    return chosen.scatter_(-1, at, True)[..., :keys].unsqueeze(1)


def _in_blocks(indices: Tensor, size: int, keys: int) -> Tensor | None:
    """bool [n, H, Q, keys] of the positions in blocks int32 [n, H, Q, k] of `size`; None where all are chosen."""
    if indices.shape[-1] * size >= keys:
        return None
    return among(indices, torch.arange(keys, device=indices.device) // size, -(-keys // size))


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, -inf elsewhere."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)


def _masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaling: float | None) -> Tensor:
    """Attention under an additive mask, query heads sharing key heads: [n, Hq, Q, D] -> [n, Hq, Q, Dv]."""
    groups = q.shape[1] // k.shape[1]
    if groups == 1 or q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, bias, scale=scaling, enable_gqa=groups > 1)
    # No fused CUDA kernel takes a mask and shared key heads. One query: its heads stand as rows of queries instead.
    if q.shape[2] == 1:
        rows = q.reshape(q.shape[0], k.shape[1], groups, -1)
        if bias.shape[1] > 1:  # a query head's own
            bias = bias.view(*rows.shape[:3], -1)
        return F.scaled_dot_product_attention(rows, k, v, bias, scale=scaling).reshape(*q.shape[:3], -1)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, bias, scale=scaling)


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaling: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """As `_masked`, with what no kernel of torch has: soft-capped scores, and sinks, which have a share of a query's
    weights and no value. Scores are float32, a block of queries at a time."""
    count, heads, queries, width = q.shape
    shared, keys = k.shape[1:3]
    groups = heads // shared
    scale = width**-0.5 if scaling is None else scaling
    rows = max(1, _SCORES // (count * heads * keys))
    found = []
    for first in range(0, queries, rows):
        block = slice(first, min(first + rows, queries))
        # Query heads of a key head stand as rows: broadcast, each would have a copy of the keys.
        own = q[:, :, block].reshape(count, shared, -1, width)
        scores = (own @ k.transpose(-1, -2)).float().view(count, shared, groups, -1, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores += bias[:, :, block].unsqueeze(1)
        if sinks is not None:
            sink = sinks.float().view(1, shared, groups, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., :keys].to(v.dtype).flatten(2, 3)
        found.append((weights @ v).view(count, heads, -1, v.shape[-1]))
    return torch.cat(found, 2)


AttentionInterface.register(ATTENTION, attend)
