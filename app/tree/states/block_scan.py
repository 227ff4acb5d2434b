"""The gated delta rule over a tree of pieces, in plain torch: blocks at once, then one small step a level of the tree.

S_t = exp(g_t) (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T and o_t = S_t^T q_t, with a state S [key dim, value dim] a
head (Yang et al., Gated Delta Networks, arXiv 2412.06464; blocks as in its section 3.3). Within a block the products
of (I - b k k^T) are one triangular solve; a block's end state is then linear in the state it starts from.

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
    """Queries (scaled) and keys [n, H, dk], values [n, H, dv], log decays and betas [n, H], starts [S, H, dk, dv], all
    float32 or float64 -> outputs [n, H, dv] and the end state of every block [blocks, H, dk, dv]."""
    q, k, v, decay, b = (index.cut(x) for x in (query, key, value, g, beta))
    total = decay.cumsum(-1)
    size = total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    # exp of differences, never a quotient of exps: those under- and overflow.
    pair = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    kb = k * b[..., None]
    from_start = total.exp()[..., None]
    system = kb @ k.mT * pair
    right = torch.cat([v * b[..., None], kb * from_start], -1)
    # What a block writes is u - w S: what it would write from an empty state, less what is there already.
    u, w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    to_end = (k * (total[..., -1:] - total).exp()[..., None]).mT
    written, erased, kept = to_end @ u, to_end @ w, total[..., -1].exp()[..., None, None]
    before, ends, state = [], [], starts
    for above, (low, high) in zip(index.levels, index.bounds, strict=True):
        start = state[above]
        state = start * kept[low:high] + written[low:high] - erased[low:high] @ start
        before.append(start)
        ends.append(state)
    start = torch.cat(before)
    out = (q * from_start) @ start + (q @ k.mT * pair) @ (u - w @ start)
    return index.join(out), torch.cat(ends)
