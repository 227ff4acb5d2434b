"""What an attention backend is, and what it gets to know about the chunk that is running and the layer that calls.

Promises: a backend computes exact attention of the chunk's queries over [path | chunk]; inside its own backward it adds
the gradients of the path's keys and values to the path cache, and what came back from chunks below to those of the
chunk's own (so activation checkpointing inside a chunk is harmless). What it cannot do it says in `refusal`, before
anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from app.tree.attention.groups import RowShares
from app.tree.attention.path_cache import KeyValue, PathCache
from app.tree.planning.layout import Layout, Part
from app.tree.planning.uncut import Ahead
from app.tree.planning.windows import layer_parts
from app.tree.planning.work import Calls
from app.tree.prefix_tree import Bools, Ints
from app.tree.transfer import on_device


@dataclass(frozen=True)
class LayerCall:
    """What one layer asks for.

    Attributes:
        layer: its index.
        scale: factor of the scores.
        window: tokens a query sees, itself included; None: all.
        section: tokens of a section, where a query sees those of its own alone; None: of all. Never beside a window.
        softcap: scores become softcap * tanh(scores / softcap); None: as they are.
    """

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    section: int | None = None


class Backend(Calls, Protocol):
    """One way to compute tree attention."""

    name: str

    def refusal(self, q: Tensor, call: LayerCall) -> str | None:
        """Why queries q [1, Hq, n, d] of this layer cannot be computed, with the remedy; None when they can."""
        ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, chunk: ChunkAttention, call: LayerCall
    ) -> Tensor:
        """q [1, Hq, n, d], k and v [1, Hk, n, d] of the chunk's rows -> [1, Hq, n, d] in q's dtype. `sinks` [Hq]: a
        score per head that takes part in the softmax and has no value."""
        ...


@dataclass(eq=False)
class ChunkAttention:
    """The chunk that is running.

    Attributes:
        layout: its rows; depths: int64 [n], the depth of each.
        path_tokens: length of the path, read from `cache`.
        backend: what computes attention.
        store: whether `keys_values` is filled by the run: detached, by layer.
        shares: which rows each rank of a group runs; None: this process runs all.
        ahead: what rows see of those after them, in which layers; None: nothing in any.
        returned_grads: gradients of keys and values from chunks below: (the row behind its last, by layer) for each
            piece, of its last rows.
        calls: layers that have called the attention function, in order.
        kept: whatever a backend prepares once a chunk, by its own keys.
        index_keys: of layers with an indexer, ([1, 1, n, D],) by layer, as `keys_values`.
        index_cache: those of the path; None in models without.
        stand_in: for a mask, which layers with an indexer hand on; None in models without.
        backends: of layers whose keys are more than the rows', what computes their attention instead; empty again once
            they have attended.
    """

    layout: Layout
    cache: PathCache
    path_tokens: int
    depths: Ints
    backend: Backend
    store: bool
    shares: RowShares | None = None
    ahead: Ahead | None = None
    keys_values: dict[int, KeyValue] = field(default_factory=dict)
    returned_grads: list[tuple[int, dict[int, KeyValue]]] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    kept: dict[Any, Any] = field(default_factory=dict)
    index_keys: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    index_cache: PathCache | None = None
    stand_in: Tensor | None = None
    backends: dict[int, Backend] = field(default_factory=dict)

    def parts(self, call: LayerCall, cut_squares: bool = True) -> list[Part]:
        """Attention parts of layers with this window and these sections; see `layer_parts`."""
        key = ("parts", call.window, cut_squares, call.section)
        if key not in self.kept:
            self.kept[key] = layer_parts(
                self.layout, self.depths, self.path_tokens, call.window, cut_squares, call.section
            )
        parts: list[Part] = self.kept[key]
        return parts

    def depths_on(self, device: torch.device) -> Tensor:
        """Those of the rows, int64 [n]."""
        if "depths" not in self.kept:
            self.kept["depths"] = on_device(self.depths, device)
        depths: Tensor = self.kept["depths"]
        return depths

    def sight(self, call: LayerCall) -> tuple[Ints, int | None]:
        """Depths int64 [n] of the rows, and how much less than a query's those of its keys are (None: any). Of layers
        with sections the depths at which their sections begin: a query sees keys from there on, or of equal ones."""
        section, window = call.section, call.window
        if section is not None and int(self.depths.max()) >= section:
            return self.depths // section * section, 1
        return self.depths, None if window is None or int(self.depths.max()) < window else window

    def parts_ahead(self, layer: int) -> tuple[Part, ...]:
        """Parts of a layer's rows with keys after them. No window hides these."""
        return self.ahead.parts if self.ahead is not None and layer in self.ahead.layers else ()

    def additive(self, mask: Bools | None, like: Tensor) -> Tensor | None:
        """The mask of a part as 0 and -inf, in the dtype and on the device of `like`."""
        if mask is None:
            return None
        key = ("mask", id(mask), like.dtype)  # parts stay alive with the chunk, so ids stay theirs
        if key not in self.kept:
            hidden = on_device(~mask, like.device)
            self.kept[key] = torch.zeros_like(hidden, dtype=like.dtype).masked_fill(hidden, float("-inf"))
        additive: Tensor = self.kept[key]
        return additive

    def refuse_other_calls(self, attending: frozenset[int], name: str) -> None:
        """Raises ValueError unless each layer of `attending` (all but those that carry states instead) has attended
        over the tree, once, and no other. `name`: of the model."""
        if len(self.calls) == len(attending) and set(self.calls) == attending:
            return
        repeated = sorted({layer for layer in self.calls if self.calls.count(layer) > 1})
        if repeated:
            raise ValueError(
                f"layers {repeated} of {name} attend more than once a forward; tree training supports one attention a"
                " layer"
            )
        missing = sorted(attending - set(self.calls))
        raise ValueError(
            f"layers {missing} of {name} did not attend through transformers' attention interface; tree training"
            " cannot compute them"
        )

    def add_returned(self, layer: int, grad_k: Tensor, grad_v: Tensor) -> None:
        """Adds to [1, Hk, n, d] gradients of the chunk's own keys and values what chunks below sent back."""
        for stop, by_layer in self.returned_grads:
            for grad, below in zip((grad_k, grad_v), by_layer[layer], strict=True):
                grad[:, :, stop - below.shape[2] : stop] += below
