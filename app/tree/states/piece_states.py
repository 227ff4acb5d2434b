"""The states of one forward: what its pieces start from, what they end with, and the functions layers call for it.

Promises: a piece continues its parent's state, whichever forward that ran in, and gradients reach it through autograd;
end states are kept only of pieces that were asked for; each function of a layer runs on the rows of this forward alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from app.tree.prefix_tree import Ints
from app.tree.states.piece_tree import PieceTree
from app.tree.states.scans import TORCH, Scans
from app.tree.transfer import on_device

StateKey = tuple[int, str]
"""Layer and kind of a state: "convolution" and "lookback" [K - 1, channels] in the layer's dtype, "tokens" int64
[K - 1], "scan" [heads, ...] in float32."""

States = dict[StateKey, Tensor]


class PieceStates:
    """The run of one forward.

    Args:
        tree: its pieces, and how many starts their roots continue.
        starts: by layer and kind, [starts, ...]; where there is none, roots start from zeros.
        wanted: pieces whose end states are kept.
        scans: what computes scans.

    Attributes:
        layer, owner: index and name of the layer that is running.
        called: layers and kinds whose function was called.
        ends: by layer and kind, [wanted, ...], with the forward's graph.
    """

    def __init__(self, tree: PieceTree, starts: States, wanted: Sequence[int], scans: Scans = TORCH) -> None:
        self.tree, self.starts, self.wanted = tree, starts, np.asarray(wanted, np.int64)
        self.layer, self.owner = -1, ""
        self.called: set[StateKey] = set()
        self.ends: States = {}
        self.scans = scans

    def convolution(
        self, original: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """The layer's own causal convolution of x [1, C, n] with weight [C, K], each piece behind the K - 1 tokens
        before it."""

        def run(rows: Tensor) -> Tensor:
            return original(rows.T[None], weight, bias, activation=activation)[0].T

        return self.lookback((self.layer, "convolution"), run, x[0].T, weight.shape[-1] - 1).T[None]

    def lookback(self, key: StateKey, run: Callable[[Tensor], Tensor], x: Tensor, reach: int) -> Tensor:
        """What `run` makes of a row [C] and of the `reach` rows before it, for each of x [n, C] (or of numbers [n]):
        each piece behind the rows before it, zeros where there are none."""
        rows = self.tree.convolution(reach)
        gather = self._rows("gather", reach, rows.gather, x.device)
        select = self._rows("select", reach, rows.select, x.device)
        starts = self._start(key, (reach, *x.shape[1:]), x)
        extended = torch.cat([starts.flatten(0, 1).to(x.dtype), x])
        if len(self.wanted):
            tails = self._rows(("tails", self.wanted.tobytes()), reach, rows.tails[self.wanted], x.device)
            self._end(key, extended[tails])
        return run(extended[gather])[select]

    def delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, unit_length: bool
    ) -> Tensor:
        """Gated delta rule: query and key [1, n, Hk, dk], value [1, n, H, dv], g [1, n, H] or [1, n, H, dk], beta
        [1, n, H] -> [1, n, H, dv] in the query's dtype. `unit_length`: queries and keys get length 1 first."""
        starts = self._scan_starts(value.shape[2], key.shape[3], value)
        inputs = (query[0], key[0], value[0], g[0], beta[0])
        out, ends = self.scans.delta_rule(*inputs, unit_length, starts, self.tree, self.wanted)
        return self._scanned(out, ends).to(query.dtype)

    def state_space(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        """Mamba-2: x [1, n, H, P], step sizes dt [1, n, H], A [H], B and C [1, n, groups, N] -> [1, n, H, P], in
        float32 or float64."""
        starts = self._scan_starts(x.shape[2], B.shape[3], x)
        out, ends = self.scans.state_space(x[0], dt[0], A, B[0], C[0], starts, self.tree, self.wanted)
        return self._scanned(out, ends)

    def _scan_starts(self, heads: int, key_dim: int, value: Tensor) -> Tensor:
        """[starts, heads, key_dim, value dim], in float32, or float64 where the input is."""
        dtype = torch.promote_types(torch.float32, value.dtype)
        return self._start((self.layer, "scan"), (heads, key_dim, value.shape[3]), value).to(dtype)

    def _scanned(self, out: Tensor, ends: Tensor) -> Tensor:
        if len(self.wanted):
            self._end((self.layer, "scan"), ends)
        return out[None]

    def _start(self, key: StateKey, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """[starts, *shape]; notes that the layer's function was called."""
        self.called.add(key)
        given = self.starts.get(key)
        return like.new_zeros(self.tree.starts, *shape) if given is None else given

    def _end(self, key: StateKey, states: Tensor) -> None:
        """Keeps the wanted end states of the first forward: a checkpointed layer runs again in backward (and has to
        compute them again, for checkpointing compares), and by then those of the first are roots of it."""
        self.ends.setdefault(key, states)

    def _rows(self, name: object, reach: int, rows: Ints, device: torch.device) -> Tensor:
        """What all layers share, made for the first that asks."""
        kept, key = self.tree.kept, ("convolution", name, reach, device)
        if key not in kept:
            kept[key] = on_device(rows, device)
        found: Tensor = kept[key]
        return found
