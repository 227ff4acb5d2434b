"""The states of one forward: what its pieces start from, what they end with, and the functions layers call for it.

Promises: a piece continues its parent's state, whichever forward that ran in, and gradients reach it through autograd;
end states are kept only of pieces that were asked for; each function of a layer runs on the rows of this forward alone.
Ranks that run a forward together have a share of the rows each; a function runs, exactly, over all rows of a rank's own
channels or heads, whose states it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from app.tree.prefix_tree import Ints
from app.tree.states.piece_tree import PieceTree
from app.tree.states.scans import TORCH, Scans
from app.tree.transfer import on_device

StateKey = tuple[int, str]
"""Layer and kind of a state: "convolution" and "lookback" [K - 1, channels] in the layer's dtype, "tokens" int64
[K - 1], "scan" [heads, ...] in float32."""

States = dict[StateKey, Tensor]


class HeadShares(Protocol):
    """How ranks deal rows and heads: `app.tree.attention.groups.RowShares`."""

    @property
    def size(self) -> int: ...

    def to_heads(self, *rows: Tensor) -> tuple[Tensor, ...]: ...

    def to_rows(self, heads: Tensor) -> Tensor: ...

    def heads_of(self, per_head: Tensor | None) -> Tensor | None: ...


class PieceStates:
    """The run of one forward.

    Args:
        tree: its pieces, and how many starts their roots continue.
        starts: by layer and kind, [starts, ...]; where there is none, roots start from zeros.
        wanted: pieces whose end states are kept.
        scans: what computes scans.
        shares: of the ranks that run the forward together; None: this process runs all of it.

    Attributes:
        layer, owner: index and name of the layer that is running.
        called: layers and kinds whose function was called.
        ends: by layer and kind, [wanted, ...], with the forward's graph.
    """

    def __init__(
        self,
        tree: PieceTree,
        starts: States,
        wanted: Sequence[int],
        scans: Scans = TORCH,
        shares: HeadShares | None = None,
    ) -> None:
        self.tree, self.starts, self.wanted = tree, starts, np.asarray(wanted, np.int64)
        self.layer, self.owner = -1, ""
        self.called: set[StateKey] = set()
        self.ends: States = {}
        self.scans, self.shares = scans, shares

    def convolution(
        self, original: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """The layer's own causal convolution of x [1, C, n] with weight [C, K], each piece behind the K - 1 tokens
        before it."""
        channels, shares = x.shape[1], self.shares
        if shares is not None:
            missing = -channels % shares.size
            if missing:
                weight, x = (nn.functional.pad(one, (0, 0, 0, missing)) for one in (weight, x))
                bias = None if bias is None else nn.functional.pad(bias, (0, missing))
            weight, bias = cast(Tensor, shares.heads_of(weight)), shares.heads_of(bias)
            (x,) = shares.to_heads(x.unsqueeze(3))
            x = x.squeeze(3)

        def run(rows: Tensor) -> Tensor:
            return original(rows.T[None], weight, bias, activation=activation)[0].T

        out = self.lookback((self.layer, "convolution"), run, x[0].T, weight.shape[-1] - 1).T[None]
        return out if shares is None else shares.to_rows(out.unsqueeze(3)).squeeze(3)[:, :channels]

    def lookback(self, key: StateKey, run: Callable[[Tensor], Tensor], x: Tensor, reach: int) -> Tensor:
        """What `run` makes of a row [C] and of the `reach` rows before it, for each of x [n, C] (or of numbers [n]):
        each piece behind the rows before it, zeros where there are none."""
        extended, gather, select = self._extended(key, x, reach)
        return run(extended[gather])[select]

    def behind(self, key: StateKey, x: Tensor, reach: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of some `rows` int64 [m] of x [n, C], each with the `reach` rows before it, zeros where there are none: rows
        [r, C], and int64 [m, reach + 1], where among them these are, in order."""
        extended, gather, select = self._extended(key, x, reach)
        return extended, gather[select[rows].unsqueeze(1) + torch.arange(-reach, 1, device=x.device)]

    def delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, unit_length: bool
    ) -> Tensor:
        """Gated delta rule: query and key [1, n, Hk, dk], value [1, n, H, dv], g [1, n, H] or [1, n, H, dk], beta
        [1, n, H] -> [1, n, H, dv] in the query's dtype. `unit_length`: queries and keys get length 1 first."""
        query, key, value, g, beta = self._to_heads(key.shape[2], query, key, value, g, beta)
        starts = self._scan_starts(value.shape[1], key.shape[2], value)
        out, ends = self.scans.delta_rule(query, key, value, g, beta, unit_length, starts, self.tree, self.wanted)
        return self._scanned(out.to(query.dtype), ends)

    def state_space(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        """Mamba-2: x [1, n, H, P], step sizes dt [1, n, H], A [H], B and C [1, n, groups, N] -> [1, n, H, P], in
        float32 or float64."""
        x, dt, B, C = self._to_heads(B.shape[2], x, dt, B, C)
        if self.shares is not None:
            A = cast(Tensor, self.shares.heads_of(A))
        starts = self._scan_starts(x.shape[1], B.shape[2], x)
        out, ends = self.scans.state_space(x, dt, A, B, C, starts, self.tree, self.wanted)
        return self._scanned(out, ends)

    def _to_heads(self, keys: int, *rows: Tensor) -> tuple[Tensor, ...]:
        """[1, n, heads, ...] of the rows run here -> [n, heads, ...], all rows of this rank's heads. `keys`: how many
        heads those have that values share."""
        if self.shares is None:
            return tuple(x[0] for x in rows)
        size, heads = self.shares.size, max(x.shape[2] for x in rows)
        if heads % size or (keys % size and size % keys):
            raise ValueError(
                f"layer {self.layer} ({self.owner}): a scan of {heads} heads of values and {keys} of keys cannot be"
                f" dealt over a group of {size} ranks: choose a group size that divides {heads} and either divides"
                f" {keys} or is a multiple of it, or let each rank run a part of its own (group=None)"
            )
        as_heads = [(x if x.dim() == 4 else x.unsqueeze(3)).transpose(1, 2) for x in rows]
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(x.dtype for x in rows):  # one exchange of each: decays are float32 beside bfloat16
            places = [place for place, x in enumerate(rows) if x.dtype == dtype]
            found |= zip(places, self.shares.to_heads(*(as_heads[place] for place in places)), strict=True)
        of_heads = (found[place][0].transpose(0, 1) for place in range(len(rows)))
        return tuple(y if x.dim() == 4 else y.squeeze(2) for x, y in zip(rows, of_heads, strict=True))

    def _scan_starts(self, heads: int, key_dim: int, value: Tensor) -> Tensor:
        """[starts, heads, key_dim, value dim], in float32, or float64 where the input is."""
        dtype = torch.promote_types(torch.float32, value.dtype)
        return self._start((self.layer, "scan"), (heads, key_dim, value.shape[2]), value).to(dtype)

    def _scanned(self, out: Tensor, ends: Tensor) -> Tensor:
        if len(self.wanted):
            self._end((self.layer, "scan"), ends)
        if self.shares is None:
            return out[None]
        return self.shares.to_rows(out.transpose(0, 1)[None]).transpose(1, 2).contiguous()  # layers ask for views

    def _extended(self, key: StateKey, x: Tensor, reach: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [starts | x], and `gather` and `select` of `ConvolutionRows`; keeps the ends."""
        rows = self.tree.convolution(reach)
        gather = self._rows("gather", reach, rows.gather, x.device)
        select = self._rows("select", reach, rows.select, x.device)
        starts = self._start(key, (reach, *x.shape[1:]), x)
        extended = torch.cat([starts.flatten(0, 1).to(x.dtype), x])
        if len(self.wanted):
            tails = self._rows(("tails", self.wanted.tobytes()), reach, rows.tails[self.wanted], x.device)
            self._end(key, extended[tails])
        return extended, gather, select

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
