"""Scans over a tree of pieces: by blocks in plain torch, or wave by wave through whatever runs flat pieces.

Promises: both compute the same function of inputs and starts, gradients included; states are float32, or float64 where
the input is. What is derived from a tree is made once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from app.tree.prefix_tree import Ints
from app.tree.states.block_scan import BlockIndex, block_scan
from app.tree.states.piece_tree import PieceTree
from app.tree.transfer import on_device


class Scans(Protocol):
    """What computes the scans of a forward.

    n rows in `tree`'s order; `starts` [starts, H, dk, dv] in float32 or float64; `wanted`: int64 [m], pieces whose end
    states [m, H, dk, dv] are returned beside the outputs [n, H, dv].
    """

    name: str

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        unit_length: bool,
        starts: Tensor,
        tree: PieceTree,
        wanted: Ints,
    ) -> tuple[Tensor, Tensor]:
        """Gated delta rule: query and key [n, Hk, dk], value [n, H, dv], g [n, H] or [n, H, dk], beta [n, H].
        `unit_length`: queries and keys get length 1 first; queries are scaled by dk ** -0.5."""
        ...

    def state_space(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, starts: Tensor, tree: PieceTree, wanted: Ints
    ) -> tuple[Tensor, Tensor]:
        """Mamba-2: x [n, H, P], step sizes dt [n, H], A [H], B and C [n, groups, N]; dk is N, dv is P."""
        ...


class TorchScans:
    """`block_scan` over the whole tree: any device, and exact in float64."""

    name = "torch"

    def delta_rule(self, query, key, value, g, beta, unit_length, starts, tree, wanted):  # type: ignore[no-untyped-def]
        dtype = torch.promote_types(torch.float32, query.dtype)
        q, k, v, decay, b = (x.to(dtype) for x in (query, key, value, g, beta))
        if unit_length:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        decay = decay if decay.dim() == 3 else decay[..., None]
        return self._scan(q * q.shape[-1] ** -0.5, k, v, decay, b, starts, tree, wanted)

    def state_space(self, x, dt, A, B, C, starts, tree, wanted):  # type: ignore[no-untyped-def]
        dtype = torch.promote_types(torch.float32, x.dtype)
        v, step, k, q = (y.to(dtype) for y in (x, dt, B, C))
        return self._scan(q, k, v * step[..., None], (step * A.to(dtype))[..., None], None, starts, tree, wanted)

    def _scan(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor | None,
        starts: Tensor,
        tree: PieceTree,
        wanted: Ints,
    ) -> tuple[Tensor, Tensor]:
        where = ("blocks", value.device)
        if where not in tree.kept:
            tree.kept[where] = BlockIndex.of(tree, value.device)
        index: BlockIndex = tree.kept[where]
        last = index.last[_kept(tree, ("wanted", wanted.tobytes()), wanted, value)]
        return block_scan(query, key, value, g, beta, starts, index, last)


TORCH = TorchScans()


class ByWave:
    """`flat`, which runs pieces that continue nothing but a start each, over a tree: those of one depth at a time, from
    the end states of those above them. A wave is one call, whatever the lengths of its pieces."""

    def __init__(self, flat: Scans) -> None:
        self.flat, self.name = flat, flat.name

    def delta_rule(self, query, key, value, g, beta, unit_length, starts, tree, wanted):  # type: ignore[no-untyped-def]
        def run(
            own: PieceTree, begin: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
        ) -> tuple[Tensor, Tensor]:
            return self.flat.delta_rule(q, k, v, g, beta, unit_length, begin, own, np.arange(own.starts))

        return self._run(run, (query, key, value, g, beta), starts, tree, wanted)

    def state_space(self, x, dt, A, B, C, starts, tree, wanted):  # type: ignore[no-untyped-def]
        def run(own: PieceTree, begin: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
            return self.flat.state_space(x, dt, A, B, C, begin, own, np.arange(own.starts))

        return self._run(run, (x, dt, B, C), starts, tree, wanted)

    def _run(
        self,
        run: Callable[..., tuple[Tensor, Tensor]],
        inputs: tuple[Tensor, ...],
        starts: Tensor,
        tree: PieceTree,
        wanted: Ints,
    ) -> tuple[Tensor, Tensor]:
        like, above = inputs[0], starts
        outs: list[Tensor] = []
        ends: list[Tensor] = []
        for number, wave in enumerate(tree.waves):
            rows = _kept(tree, ("rows", number), wave.rows, like)
            begin = above.index_select(0, _kept(tree, ("above", number), wave.above, like))
            out, above = run(wave.tree, begin, *(x.index_select(0, rows) for x in inputs))
            outs.append(out)
            ends.append(above)
        order = np.argsort(np.concatenate([wave.rows for wave in tree.waves]), kind="stable")
        place = np.argsort(np.concatenate([wave.pieces for wave in tree.waves]), kind="stable")
        last = _kept(tree, ("ends", wanted.tobytes()), place[wanted], like)
        return torch.cat(outs).index_select(0, _kept(tree, "order", order, like)), torch.cat(ends).index_select(0, last)


def _kept(tree: PieceTree, name: object, index: Ints, like: Tensor) -> Tensor:
    """An index array of `tree` on the device of `like`."""
    key = (name, like.device)
    if key not in tree.kept:
        tree.kept[key] = on_device(index, like.device)
    found: Tensor = tree.kept[key]
    return found
