"""Gated linear recurrences over a tree of pieces, in plain torch: blocks at once, then one small step a level of it.

Gated delta rule: S_t = (I - b_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + b_t k_t v_t^T and o_t = S_t^T q_t, with a state S
[key dim, value dim] a head (Yang et al., Gated Delta Networks, arXiv 2412.06464; blocks as in its section 3.3; with a
decay a channel, Kimi Linear, arXiv 2510.26692). Within a block the products of (I - b k k^T) are one triangular solve;
its end state is then linear in the state it starts from. State space: the same with b = 1 and nothing erased (Dao and
Gu, Mamba-2, arXiv 2405.21060).

Promises: computed in float32, or in float64 where the input is, whatever autocast says. Backward is written by hand: of
a block it keeps what it writes and what it erases (as large as its values and keys) and, where that is no larger than
its values, the state it starts from; the rest is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.tree.states.piece_tree import PieceTree
from app.tree.transfer import on_device


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """`app.tree.states.piece_tree.BlockRows` on a device.

    Attributes:
        rows: [blocks, size], row of each place; some row where there is none.
        inside: [blocks, 1, size, 1], 1.0 at places with a row, 0.0 at others; None where there are no others.
        places: [n], place of each row in the blocks laid end to end.
        levels: which block of the level before, or in the first level which start, each block continues.
        bounds: first and last block of each level. last: [pieces], the block each piece ends with.
    """

    rows: Tensor
    inside: Tensor | None
    places: Tensor
    levels: list[Tensor]
    bounds: list[tuple[int, int]]
    last: Tensor
    _flat: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: PieceTree, device: torch.device) -> BlockIndex:
        """The blocks of `tree`, of the size that suits it."""
        blocks = tree.blocks(tree.block)
        bounds = list(zip(blocks.levels[:-1], blocks.levels[1:], strict=True))
        held = blocks.rows < tree.rows
        inside = None if held.all() else on_device(held, device)[:, None, :, None]
        rows, places, above, last = (
            on_device(x, device) for x in (blocks.rows * held, blocks.places, blocks.above, blocks.last)
        )
        return cls(rows, inside, places, [above[low:high] for low, high in bounds], bounds, last)

    def cut(self, x: Tensor, heads: int) -> Tensor:
        """[n, H', d] -> [blocks, heads, size, d], each head of x for its share of `heads`; places without a row repeat
        another."""
        n, own, d = x.shape
        key = ("cut", heads, own)
        if key not in self._flat:
            of_head = torch.arange(heads, device=x.device) // (heads // own)
            self._flat[key] = (self.rows[:, None, :] * own + of_head[:, None]).flatten()
        return x.reshape(n * own, d).index_select(0, self._flat[key]).view(len(self.rows), heads, -1, d)

    def only(self, x: Tensor) -> Tensor:
        """`x` [blocks, H, size, d], zeros at places without a row."""
        return x if self.inside is None else x * self.inside

    def join(self, blocks: Tensor, heads: int) -> Tensor:
        """[blocks, H, size, d] -> [n, heads, d], summed over the heads that share one."""
        if heads != blocks.shape[1]:
            blocks = blocks.unflatten(1, (heads, -1)).sum(2)
        size, d = blocks.shape[2:]
        key = ("join", heads, size)
        if key not in self._flat:
            block, place = self.places // size, self.places % size
            of_head = torch.arange(heads, device=blocks.device)
            self._flat[key] = ((block[:, None] * heads + of_head) * size + place[:, None]).flatten()
        return blocks.reshape(-1, d).index_select(0, self._flat[key]).view(-1, heads, d)


def block_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor | None,
    starts: Tensor,
    index: BlockIndex,
    wanted: Tensor,
) -> tuple[Tensor, Tensor]:
    """A scan over the blocks of `index`.

    Args:
        query, key: [n, Hk, dk], queries scaled; each head serves H / Hk heads of values.
        value: [n, H, dv]. g: log decays [n, H, 1], or of each channel [n, H, dk].
        beta: [n, H] for the gated delta rule, None for a state space.
        starts: [S, H, dk, dv]. wanted: int64 [m], blocks whose end states are asked for, each at most once.

    All float32, or all float64. Returns outputs [n, H, dv] and end states [m, H, dk, dv].
    """
    with torch.autocast(query.device.type, enabled=False):
        out, ends = _BlockScan.apply(query, key, value, g, beta, starts, index, wanted)
    return out, ends


class _BlockScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *inputs, starts, index, wanted = given
        x = _Blocks.of(index, *inputs)
        written, erased = x.solve()
        before, new, ends = x.descend(written, erased, starts)
        out = torch.matmul(x.met[:, :, : x.size], new)
        out += (x.readers[:, :, : x.size] * x.from_start) @ before
        kept = (before, new) if x.k.shape[-1] <= x.size else (None, written)
        ctx.save_for_backward(*inputs, starts, wanted, erased, *kept)
        ctx.index = index
        ctx.set_materialize_grads(False)
        return index.join(out, out.shape[1]), ends[wanted]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor | None, wanted_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, starts, wanted, erased, before, new = ctx.saved_tensors
        with torch.autocast(starts.device.type, enabled=False):
            x = _Blocks.of(ctx.index, *inputs)
            if before is None:
                before, new, _ = x.descend(new, erased, starts)
            end_grad = torch.zeros_like(before)
            if wanted_grad is not None:
                end_grad[wanted] = wanted_grad
            if out_grad is None:
                out_grad = torch.zeros_like(inputs[2])
            *grads, start_grad = x.ascend(before, new, erased, out_grad, end_grad, len(starts))
            heads = [inputs[0].shape[1]] * 2 + [x.v.shape[1]] * 3
            joined = [None if grad is None else ctx.index.join(grad, h) for grad, h in zip(grads, heads, strict=True)]
        if joined[-1] is not None:
            joined[-1] = joined[-1][..., 0]
        return *joined, start_grad, None, None


@dataclass(frozen=True, eq=False)
class _Blocks:
    """A scan's inputs by blocks, and what of a block depends on it alone: [blocks, H, ...].

    Attributes:
        k: [size, dk]. v: [size, dv]. b: [size, 1], None for a state space.
        readers: [R size, dk], what meets keys and states: queries, and (R = 2, where there are betas) keys x beta.
        decay: from each place to each later one, [size, size], or of each channel [size, size, dk]; 0 to earlier ones.
        met: [R size, size], products of readers and keys, decayed.
        from_start, to_end, whole: decays over part of the block or all of it, [size or 1, 1 or dk].
    """

    index: BlockIndex
    k: Tensor
    v: Tensor
    b: Tensor | None
    readers: Tensor
    decay: Tensor
    met: Tensor
    from_start: Tensor
    to_end: Tensor
    whole: Tensor

    @classmethod
    def of(
        cls, index: BlockIndex, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor | None
    ) -> _Blocks:
        heads = value.shape[1]
        q, k, v = (index.cut(x, heads) for x in (query, key, value))
        # Without writing and without decay, a place that holds no row leaves the state as it is.
        total = index.only(index.cut(g, heads)).cumsum(-2)
        if beta is None:
            b, v, readers = None, index.only(v), q
        else:
            b = index.only(index.cut(beta[..., None], heads))
            readers = torch.cat([q, k * b], -2)
        size, last = k.shape[-2], total[..., -1:, :]
        later = torch.ones(size, size, dtype=torch.bool, device=k.device).triu_(1)
        # exp of differences, never a quotient of exps: those under- and overflow.
        if total.shape[-1] == 1:
            decay = (total - total.mT).masked_fill_(later, float("-inf")).exp_()
            met = readers @ k.mT
            met.unflatten(-2, (-1, size)).mul_(decay[:, :, None])
        else:
            apart = total[..., :, None, :] - total[..., None, :, :]
            decay = apart.masked_fill_(later[..., None], float("-inf")).exp_()
            met = torch.einsum("bhrid,bhjd,bhijd->bhrij", readers.unflatten(-2, (-1, size)), k, decay).flatten(2, 3)
        return cls(index, k, v, b, readers, decay, met, total.exp(), (last - total).exp(), last.exp())

    @property
    def size(self) -> int:
        return self.k.shape[-2]

    def read(self, x: Tensor) -> Tensor:
        """Rows of readers [R size, d], decayed from the start of the block."""
        return x.unflatten(-2, (-1, self.size)).mul(self.from_start[:, :, None]).flatten(2, 3)

    def solve(self) -> tuple[Tensor, Tensor | None]:
        """What each place writes if the block starts from an empty state [size, dv], and what of its start's state it
        takes back [size, dk]."""
        if self.b is None:
            return self.v, None
        right = torch.cat([self.v * self.b, self.readers[:, :, self.size :] * self.from_start], -1)
        found = _solve(self.met[:, :, self.size :], right, upper=False)
        written, erased = found.split([self.v.shape[-1], self.k.shape[-1]], -1)
        return written, erased

    def descend(self, written: Tensor, erased: Tensor | None, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States blocks start from and end with [dk, dv], and what their places write [size, dv] (the middle one)."""
        before = starts.new_empty(len(self.k), *starts.shape[1:])
        ends, new = torch.empty_like(before), written if erased is None else torch.empty_like(self.v)
        keys, above = (self.k * self.to_end).mT, starts
        for which, (low, high) in zip(self.index.levels, self.index.bounds, strict=True):
            start = torch.index_select(above, 0, which, out=before[low:high])
            above = ends[low:high]
            if erased is not None:
                _add_product(written[low:high], erased[low:high], start, -1, out=new[low:high])
            _add_product(start * self.whole[low:high].mT, keys[low:high], new[low:high], out=above)
        return before, new, ends

    def ascend(
        self, before: Tensor, new: Tensor, erased: Tensor | None, out_grad: Tensor, end_grad: Tensor, starts: int
    ) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys, values, log decays, betas (each by blocks) and starts. `end_grad`, what blocks'
        end states receive from outside, is added to."""
        index, size = self.index, self.size
        received = index.only(index.cut(out_grad, before.shape[1]))
        q = self.readers[:, :, :size]
        new_grad = self.met[:, :, :size].mT @ received
        before_grad = (q * self.from_start).mT @ received
        start_grad = before.new_zeros(starts, *before.shape[1:])
        keys = self.k * self.to_end
        for level in range(len(index.levels) - 1, -1, -1):
            low, high = index.bounds[level]
            end, grad = end_grad[low:high], before_grad[low:high]
            grad.addcmul_(end, self.whole[low:high].mT)
            if erased is not None:
                own = new_grad[low:high]
                _add_product(own, keys[low:high], end, out=own)
                _add_product(grad, erased[low:high].mT, own, -1, out=grad)
            above = end_grad[slice(*index.bounds[level - 1])] if level else start_grad
            above.index_add_(0, index.levels[level], grad)
        if self.b is None:
            new_grad += keys @ end_grad
            back = received
        else:
            new_grad = _solve(self.met[:, :, size:].mT, new_grad, upper=True)
            back = torch.cat([received, -new_grad], -2)
        met_grad = back @ new.mT
        if self.b is not None:
            met_grad[:, :, size:].diagonal(dim1=-2, dim2=-1).zero_()  # the unit triangle's own, which is no product
        reader_grad, key_grad = self._met_backward(met_grad)
        reader_grad += self.read(back @ before.mT)
        last_grad = (new @ end_grad.mT) * self.to_end
        # Readers and keys come with their decays everywhere, so the decays' gradients are inner products of theirs.
        of_last = self._per_decay((self.k * last_grad).sum(-2, keepdim=True))
        of_last += self._per_decay((before * end_grad).sum(-1)[:, :, None]) * self.whole
        key_grad += last_grad
        total_grad = self._per_decay((self.readers * reader_grad).unflatten(-2, (-1, size)).sum(2) - self.k * key_grad)
        total_grad[:, :, -1:] += of_last
        decay_grad = total_grad.flip(-2).cumsum(-2).flip(-2)
        if self.b is None:
            return reader_grad, key_grad, new_grad, decay_grad, None, start_grad
        query_grad, erasing = reader_grad[:, :, :size], reader_grad[:, :, size:]
        beta_grad = (self.k * erasing).sum(-1, keepdim=True) + (self.v * new_grad).sum(-1, keepdim=True)
        key_grad.addcmul_(erasing, self.b)
        return query_grad, key_grad, new_grad * self.b, decay_grad, beta_grad, start_grad

    def _met_backward(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of readers and keys, of those of their products."""
        grad = grad.unflatten(-2, (-1, self.size))
        if self.decay.dim() == 4:
            grad = (grad * self.decay[:, :, None]).flatten(2, 3)
            return grad @ self.k, grad.mT @ self.readers
        readers = self.readers.unflatten(-2, (-1, self.size))
        of_readers = torch.einsum("bhrij,bhjd,bhijd->bhrid", grad, self.k, self.decay).flatten(2, 3)
        return of_readers, torch.einsum("bhrij,bhrid,bhijd->bhjd", grad, readers, self.decay)

    def _per_decay(self, x: Tensor) -> Tensor:
        """[..., dk] -> as many channels as there are decays."""
        return x.sum(-1, keepdim=True) if self.whole.shape[-1] == 1 else x


def _solve(triangle: Tensor, right: Tensor, upper: bool) -> Tensor:
    return torch.linalg.solve_triangular(triangle, right, upper=upper, unitriangular=True)


def _add_product(to: Tensor, x: Tensor, y: Tensor, sign: int = 1, *, out: Tensor) -> None:
    """out = to + sign * x @ y, of batches of two dimensions."""
    to, x, y, out = (z.flatten(0, 1) for z in (to, x, y, out))
    torch.baddbmm(to, x, y, alpha=sign, out=out)
