"""Parts of attention that make one key of many tokens in a row (DeepSeek-V4), found by what they are made of.

Every `rate` tokens of a sequence, counted from its first, a compressor makes one *entry* of their projections (and of
those of the `rate` tokens before them, where windows overlap), weighted by a softmax over each channel. In a tree an
entry belongs to the token that completes it, its last: it is seen by the tokens that see that one.

Promises: projections, norm and rotation are the module's own; a window that begins in another piece, or before the
forward, reaches it by the states of `PieceStates`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from app.tree.states.lookback import instead
from app.tree.states.piece_states import PieceStates, StateKey

_PARTS = ("kv_proj", "gate_proj", "position_bias", "kv_norm", "rotary_emb")


@dataclass(frozen=True, eq=False)
class Compressor:
    """What makes entries in one layer.

    Attributes:
        attention: the module that attends to them, as well as to the tokens in its window.
        module: makes them. indexer: chooses among them, by entries of its own; None: all are attended to.
        layer: its index.
    """

    attention: nn.Module
    module: Any
    indexer: Any | None
    layer: int

    @property
    def rate(self) -> int:
        """Tokens an entry."""
        return cast(int, self.module.compress_rate)

    @property
    def keys(self) -> list[StateKey]:
        """Of their states: the last projections of each."""
        return [(self.layer, kind) for kind, part in (("entries", self.module), ("index", self.indexer)) if part]

    def entries(self, states: PieceStates, hidden: Tensor, ends: Tensor, depths: Tensor) -> Tensor:
        """Those that rows `ends` int64 [E] of hidden states [1, n, H] complete, which are at `depths` int64 [E]:
        [1, E, D], with gradient."""
        return _pooled(self.module, states, self.keys[0], hidden, ends, depths)

    @torch.no_grad()
    def index_entries(self, states: PieceStates, hidden: Tensor, ends: Tensor, depths: Tensor) -> Tensor:
        """As `entries`, the indexer's own."""
        return _pooled(self.indexer, states, self.keys[1], hidden, ends, depths)


def compressors_of(model: nn.Module) -> list[Compressor]:
    """Those of a model, first to last; none in most.

    Raises:
        ValueError: an adapter (PEFT's `modules_to_save`) trains a copy of one, or of a part of it.
    """
    found = list[Compressor]()
    for name, attention in model.named_modules():
        layer = getattr(attention, "layer_idx", None)
        for part, module in attention.named_children() if isinstance(layer, int) else ():
            if _compresses(module):
                if any("modules_to_save" in inside for inside, _ in module.named_modules()):
                    raise ValueError(f"modules_to_save names a part of '{name}.{part}', which makes keys; leave it out")
                indexer = getattr(module, "indexer", None)
                found.append(Compressor(attention, module, indexer, cast(int, layer)))
    return found


class CompressorCall(NamedTuple):
    """One forward of a compressor.

    Attributes:
        around: arguments of the attention module's forward, by name.
        hidden: [1, n, H]. residual: the low rank that queries are made of, [1, n, R]. positions: int64 [1, n].
    """

    around: dict[str, Any]
    hidden: Tensor
    residual: Tensor
    positions: Tensor


@contextmanager
def made_by(compressors: Sequence[Compressor], make: Callable[[Compressor, CompressorCall], Tensor]) -> Iterator[None]:
    """Inside, `make` is called in the place of compressors' forwards. Their attention modules get none of the entries
    [1, E, D] that it makes: it tells whoever computes attention."""
    around = dict[int, dict[str, Any]]()

    def note(layer: int, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        around[layer] = kwargs

    def run(one: Compressor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        given = _signature(type(one.module).forward).bind(one.module, *args, **kwargs).arguments
        named = (given[name] for name in ("hidden_states", "q_residual", "position_ids"))
        return make(one, CompressorCall(around[one.layer], *named))[:, None, :0], None

    with ExitStack() as stack:
        for one in compressors:
            hook = one.attention.register_forward_pre_hook(partial(note, one.layer), with_kwargs=True)
            stack.callback(hook.remove)
            stack.enter_context(instead(one.module, "forward", partial(run, one)))
        yield


@cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def entry_scores(indexer: Any, hidden: Tensor, residual: Tensor, positions: Tensor, entries: Tensor) -> Tensor:
    """Scores [B, n, T] of `entries` [B, T, D] for queries made of `residual` [B, n, R], the low rank they are made of,
    at `positions` [B, n], by an indexer's own code; `hidden`: [B, n, H]."""
    batch, rows = hidden.shape[:2]
    cos, sin = indexer.rotary_emb(hidden, position_ids=positions, layer_type=indexer.rope_layer_type)
    queries = indexer.q_b_proj(residual).view(batch, rows, -1, indexer.head_dim).transpose(1, 2)
    return cast(Tensor, indexer.scorer(_rotated(indexer, queries, cos, sin).transpose(1, 2), entries, hidden))


def _compresses(module: Any) -> bool:
    known = all(hasattr(module, part) for part in _PARTS) and isinstance(getattr(module, "compress_rate", None), int)
    indexer = getattr(module, "indexer", None)
    return known and (indexer is None or all(hasattr(indexer, part) for part in (*_PARTS, "q_b_proj", "scorer")))


def _pooled(module: Any, states: PieceStates, key: StateKey, hidden: Tensor, ends: Tensor, depths: Tensor) -> Tensor:
    rate, width = module.compress_rate, module.head_dim
    projected = torch.cat([module.kv_proj(hidden), module.gate_proj(hidden)], -1)[0]
    if states.shares is not None:  # every rank makes all entries, for its own heads of queries
        projected = states.shares.to_heads(projected[None, None])[0][0, 0]
    overlaps = projected.shape[-1] == 4 * width
    rows, at = states.behind(key, projected, (2 if overlaps else 1) * rate - 1, ends)
    values, gates = rows.chunk(2, -1)
    bias = module.position_bias
    if overlaps:  # the first half of the channels is the next window's
        before, own = (slice(None), slice(0, width)), (slice(None), slice(width, None))
        values = torch.cat([values[before][at[:, :rate]], values[own][at[:, rate:]]], 1)
        earlier = gates[before][at[:, :rate]] + bias[before]
        earlier = earlier.masked_fill((depths < 2 * rate - 1).view(-1, 1, 1), float("-inf"))
        gates = torch.cat([earlier, gates[own][at[:, rate:]] + bias[own]], 1)
    else:
        values, gates = values[at], gates[at] + bias
    weights = gates.softmax(1, dtype=torch.promote_types(torch.float32, gates.dtype)).to(values.dtype)
    pooled = module.kv_norm((values * weights).sum(1))[None]
    first = (depths - rate + 1)[None]
    cos, sin = module.rotary_emb(pooled, position_ids=first, layer_type=module.rope_layer_type)
    # Of the projections' dtype, as keys are: on some devices autocast adds up in float32.
    return _rotated(module, pooled.unsqueeze(1), cos, sin).squeeze(1).to(projected.dtype)


def _rotated(module: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return cast(Tensor, sys.modules[type(module).__module__].apply_rotary_pos_emb(x, cos, sin))
