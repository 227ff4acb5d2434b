"""The states of one forward: what its pieces start from, what they end with, and the functions layers call for it.

Promises: a piece continues its parent's state, whichever forward that ran in, and gradients reach it through autograd;
end states are kept only of pieces that were asked for; each function of a layer runs on the rows of this forward alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.tree.prefix_tree import Ints
from app.tree.states.block_scan import BlockIndex, block_scan
from app.tree.states.piece_tree import PieceTree
from app.tree.transfer import on_device

StateKey = tuple[int, str]
"""Layer and kind of a state: "convolution" [K - 1, channels] in the layer's dtype, "scan" [heads, ...] in float32."""

States = dict[StateKey, Tensor]


class PieceStates:
    """The run of one forward.

    Args:
        tree: its pieces, and how many starts their roots continue.
        starts: by layer and kind, [starts, ...]; where there is none, roots start from zeros.
        wanted: pieces whose end states are kept.

    Attributes:
        layer, owner: index and name of the layer that is running.
        called: layers and kinds whose function was called.
        ends: by layer and kind, [wanted, ...], with the forward's graph.
    """

    def __init__(self, tree: PieceTree, starts: States, wanted: Sequence[int]) -> None:
        self.tree, self.starts, self.wanted = tree, starts, np.asarray(wanted, np.int64)
        self.layer, self.owner = -1, ""
        self.called: set[StateKey] = set()
        self.ends: States = {}
        self._shared: dict[Any, Any] = {}

    def convolution(
        self, original: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """The layer's own causal convolution of x [1, C, n] with weight [C, K], each piece behind the K - 1 tokens
        before it."""
        reach = weight.shape[-1] - 1
        rows = self.tree.convolution(reach)
        gather = self._rows("gather", reach, rows.gather, x.device)
        select = self._rows("select", reach, rows.select, x.device)
        starts = self._start("convolution", (reach, x.shape[1]), x)
        extended = torch.cat([starts.flatten(0, 1).to(x.dtype), x[0].T])
        if len(self.wanted):
            self._end("convolution", extended[self._rows("tails", reach, rows.tails[self.wanted], x.device)])
        out = original(extended[gather].T[None], weight, bias, activation=activation)
        return out[0].T[select].T[None]

    def delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, unit_length: bool
    ) -> Tensor:
        """Gated delta rule: query and key [1, n, Hk, dk], value [1, n, H, dv], g [1, n, H] or [1, n, H, dk], beta
        [1, n, H] -> [1, n, H, dv] in the query's dtype. `unit_length`: queries and keys get length 1 first."""
        dtype = torch.promote_types(torch.float32, query.dtype)
        q, k, v, decay, b = (x[0].to(dtype) for x in (query, key, value, g, beta))
        if unit_length:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        decay = decay if decay.dim() == 3 else decay[..., None]
        return self._scan(q * q.shape[-1] ** -0.5, k, v, decay, b).to(query.dtype)

    def state_space(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        """Mamba-2: x [1, n, H, P], step sizes dt [1, n, H], A [H], B and C [1, n, groups, N] -> [1, n, H, P], in
        float32 or float64."""
        dtype = torch.promote_types(torch.float32, x.dtype)
        v, step, k, q = (y[0].to(dtype) for y in (x, dt, B, C))
        return self._scan(q, k, v * step[..., None], (step * A.to(dtype))[..., None], None)

    def _scan(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        """[1, n, H, dv]: a scan from the starts; keeps the wanted ends."""
        starts = self._start("scan", (value.shape[1], key.shape[2], value.shape[2]), value)
        index = self._blocks(value.device)
        wanted = index.last[self._rows("wanted", 0, self.wanted, value.device)]
        out, ends = block_scan(query, key, value, g, beta, starts, index, wanted)
        if len(self.wanted):
            self._end("scan", ends)
        return out[None]

    def _start(self, kind: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """[starts, *shape]; notes that the layer's function was called."""
        self.called.add((self.layer, kind))
        given = self.starts.get((self.layer, kind))
        return like.new_zeros(self.tree.starts, *shape) if given is None else given

    def _end(self, kind: str, states: Tensor) -> None:
        """Keeps the wanted end states of the first forward: a checkpointed layer runs again in backward (and has to
        compute them again, for checkpointing compares), and by then those of the first are roots of it."""
        self.ends.setdefault((self.layer, kind), states)

    def _blocks(self, device: torch.device) -> BlockIndex:
        index: BlockIndex = self._once("blocks", lambda: BlockIndex.of(self.tree, device))
        return index

    def _rows(self, name: str, reach: int, rows: Ints, device: torch.device) -> Tensor:
        index: Tensor = self._once((name, reach), lambda: on_device(rows, device))
        return index

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What all layers share, made for the first that asks."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]
