"""Gated linear recurrences over a tree of pieces, in plain torch: blocks at once, then one small step a level of it.

Gated delta rule: S_t = (I - b_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + b_t k_t v_t^T and o_t = S_t^T q_t, with a state S
[key dim, value dim] a head (Yang et al., Gated Delta Networks, arXiv 2412.06464; blocks as in its section 3.3; with a
decay a channel, Kimi Linear, arXiv 2510.26692). Within a block the products of (I - b k k^T) are one triangular solve;
its end state is then linear in the state it starts from. State space: the same with b = 1 and nothing erased (Dao and
Gu, Mamba-2, arXiv 2405.21060).

Promises: computed in float32, or in float64 where the input is, whatever autocast says; nothing of a block is kept for
backward but the input: the scan runs again there, so memory does not grow with padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from app.tree.states.piece_tree import PieceTree
from app.tree.transfer import on_device

Scan = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """`app.tree.states.piece_tree.BlockRows` on a device; of `levels` the bounds, and what each block starts from."""

    rows: Tensor
    places: Tensor
    levels: list[Tensor]
    bounds: list[tuple[int, int]]
    last: Tensor

    @classmethod
    def of(cls, tree: PieceTree, device: torch.device) -> BlockIndex:
        """The blocks of `tree`, of the size that suits it."""
        blocks = tree.blocks(tree.block)
        bounds = list(zip(blocks.levels[:-1], blocks.levels[1:], strict=True))
        rows, places, above, last = (
            on_device(x, device) for x in (blocks.rows, blocks.places, blocks.above, blocks.last)
        )
        return cls(rows, places, [above[low:high] for low, high in bounds], bounds, last)

    def cut(self, x: Tensor) -> Tensor:
        """[n, H, ...] -> [blocks, H, size, ...], zeros where a block has no row."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded[self.rows].transpose(1, 2)

    def join(self, blocks: Tensor) -> Tensor:
        """[blocks, H, size, d] -> [n, H, d]."""
        return blocks.transpose(1, 2).flatten(0, 1)[self.places]


def recomputed(scan: Scan, *inputs: Tensor | BlockIndex) -> tuple[Tensor, Tensor]:
    """`scan(*inputs)`, in full precision; where there is a gradient, its insides are computed again in backward."""
    device = next(x.device.type for x in inputs if isinstance(x, Tensor))
    with torch.autocast(device, enabled=False):
        if not torch.is_grad_enabled():
            return scan(*inputs)
        out: tuple[Tensor, Tensor] = checkpoint(scan, *inputs, use_reentrant=False, preserve_rng_state=False)
        return out


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, starts: Tensor, index: BlockIndex
) -> tuple[Tensor, Tensor]:
    """Queries (scaled) and keys [n, H, dk], values [n, H, dv], log decays [n, H, 1 or dk], betas [n, H], starts
    [S, H, dk, dv], all float32 or float64 -> outputs [n, H, dv] and end states of all blocks [blocks, H, dk, dv]."""
    q, k, v, decay, b = (index.cut(x) for x in (query, key, value, g, beta[..., None]))
    total = decay.cumsum(-2)
    kb = k * b
    right = torch.cat([v * b, kb * total.exp()], -1)
    # What a block writes is u - w S: what it would write from an empty state, less what is there already.
    u, w = torch.linalg.solve_triangular(_met(kb, k, total), right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    to_end = _to_end(k, total)
    start, ends = _levels(starts, index, total, to_end @ u, to_end @ w)
    out = (q * total.exp()) @ start + _met(q, k, total) @ (u - w @ start)
    return index.join(out), ends


def state_space(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, starts: Tensor, index: BlockIndex
) -> tuple[Tensor, Tensor]:
    """As `delta_rule`, without betas: every token adds k v^T to the state."""
    q, k, v, decay = (index.cut(x) for x in (query, key, value, g))
    total = decay.cumsum(-2)
    start, ends = _levels(starts, index, total, _to_end(k, total) @ v, None)
    return index.join((q * total.exp()) @ start + _met(q, k, total) @ v), ends


def _met(x: Tensor, y: Tensor, total: Tensor) -> Tensor:
    """[..., size, size]: x_i . y_j, decayed from j to i, for j <= i; x and y [..., size, d], decays summed up."""
    size = total.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    # exp of differences, never a quotient of exps: those under- and overflow.
    if total.shape[-1] == 1:
        return x @ y.mT * (total - total.mT).masked_fill(later, float("-inf")).exp()
    pairs = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(later[..., None], float("-inf")).exp()
    return torch.einsum("...id,...jd,...ijd->...ij", x, y, pairs)


def _to_end(k: Tensor, total: Tensor) -> Tensor:
    """Keys [..., d, size], decayed to the end of their block."""
    return (k * (total[..., -1:, :] - total).exp()).mT


def _levels(
    starts: Tensor, index: BlockIndex, total: Tensor, written: Tensor, erased: Tensor | None
) -> tuple[Tensor, Tensor]:
    """States each block starts from and ends with, [blocks, H, dk, dv]; all that has to be done in order."""
    kept = total[..., -1, :].exp()[..., None]
    before, ends, state = [], [], starts
    for above, (low, high) in zip(index.levels, index.bounds, strict=True):
        start = state[above]
        state = start * kept[low:high] + written[low:high]
        if erased is not None:
            state = state - erased[low:high] @ start
        before.append(start)
        ends.append(state)
    return torch.cat(before), torch.cat(ends)
