"""Ranks that run every plan together: each holds a share of a chunk's rows, and of its attention a share of the heads.

    rank 0   rows 0-3  ─┐            ┌─ heads 0-1 of all rows ─┐            ┌─ rows 0-3
    rank 1   rows 4-7  ─┴─ to_heads ─┴─ heads 2-3 of all rows ─┴─ to_rows ──┴─ rows 4-7

Promises: exact, whatever the number of rows (fewer than ranks too); linear layers see a rank's own rows, attention,
the path cache and its gradients a rank's own heads, so nothing of either is computed twice; every rank issues the same
collectives in the same order, forward and backward, because they run the same plan. Gradients of parameters are those
of a rank's own rows: their sum over the group is the tree's. Two all-to-alls a layer and direction: queries, keys and
values together, and what attention returns. (Head-parallel attention after DeepSpeed-Ulysses, arXiv:2309.14509.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class RankGroup(Protocol):
    """The ranks that run a plan together, on which engine, tree, budgets and loss functions are the same."""

    @property
    def rank(self) -> int:
        """This rank's place in the group."""

    @property
    def size(self) -> int: ...

    def exchange(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Collective: sends `pieces[r]` (flat, of one dtype) to rank r; what each rank sent here, `sizes[r]` elements
        of rank r."""

    def sum_(self, tensor: Tensor) -> None:
        """Collective: `tensor` becomes its sum over the group, the same bits on every rank."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Collective: the `values` of each rank, by rank, in float64."""


@dataclass(frozen=True, eq=False)
class RowShares:
    """Which of a run's rows each rank of a group has: rank r has [bounds[r], bounds[r + 1])."""

    group: RankGroup
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, group: RankGroup, rows: int) -> RowShares:
        """Equal shares of `rows` rows, up to one row."""
        return cls(group, tuple(rows * rank // group.size for rank in range(group.size + 1)))

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def own(self) -> slice:
        """This rank's rows."""
        return slice(self.bounds[self.group.rank], self.bounds[self.group.rank + 1])

    @property
    def run(self) -> slice:
        """The rows that this rank's layers run: its own, or one that nobody reads where it has none, since layers need
        not know how to do nothing, and every rank has to take part in what layers do together."""
        return self.run_by(self.group.rank)

    def run_by(self, rank: int) -> slice:
        """The rows that a rank's layers run."""
        start, stop = self.bounds[rank : rank + 2]
        return slice(start, stop) if start < stop else slice(0, 1)

    def refusal(self, query_heads: int, key_heads: int) -> str | None:
        """Why attention with so many heads cannot be shared, with the remedy; None when it can."""
        size = self.group.size
        if query_heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0):
            return None
        return (
            f"{query_heads} query and {key_heads} key-value heads cannot be dealt over a group of {size} ranks: choose"
            f" a group size that divides {query_heads} and either divides {key_heads} or is a multiple of it"
        )

    def to_heads(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Each [1, H, rows run here, d] of this rank's rows -> [1, H / size, all rows, d] of its heads. Where there are
        fewer key-value heads than ranks, neighbours get the same one."""
        count, size = self.own.stop - self.own.start, self.group.size
        spread = (x if x.shape[1] % size == 0 else x.repeat_interleave(size // x.shape[1], dim=1) for x in rows)
        found: tuple[Tensor, ...] = _Swap.apply(self, True, *(x[:, :, :count] for x in spread))
        return found

    def to_rows(self, heads: Tensor) -> Tensor:
        """[1, H / size, all rows, d] of this rank's heads -> [1, H, rows run here, d], 0 for the row nobody reads."""
        (rows,) = _Swap.apply(self, False, heads)
        missing = self.run.stop - self.run.start - rows.shape[2]
        padded: Tensor = torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        return padded

    def everyones(self, rows: Tensor) -> Tensor:
        """Collective: [1, rows run here, D] of this rank's rows -> [1, all rows, D], without gradient."""
        count, width, size = self.own.stop - self.own.start, rows.shape[2], self.group.size
        counts = [b - a for a, b in zip(self.bounds, self.bounds[1:])]
        received = self.group.exchange([rows[0, :count].reshape(-1)] * size, [n * width for n in counts])
        return torch.cat(received).view(1, -1, width)

    def heads_of(self, per_head: Tensor | None) -> Tensor | None:
        """This rank's part of [H]."""
        return None if per_head is None else per_head.chunk(self.group.size)[self.group.rank]

    def swap(self, tensors: Sequence[Tensor], to_heads: bool) -> tuple[Tensor, ...]:
        """`to_heads` or its inverse, without gradient: one all-to-all for all `tensors`."""
        size, counts = self.group.size, [b - a for a, b in zip(self.bounds, self.bounds[1:])]
        if to_heads:
            parts = [x.chunk(size, dim=1) for x in tensors]
            shapes = [[(1, x.shape[1] // size, count, x.shape[3]) for x in tensors] for count in counts]
        else:
            parts = [x.split(counts, dim=2) for x in tensors]
            shapes = [[(1, x.shape[1], counts[self.group.rank], x.shape[3]) for x in tensors]] * size
        sizes = [[_elements(shape) for shape in of_rank] for of_rank in shapes]
        pieces = [torch.cat([part[rank].reshape(-1) for part in parts]) for rank in range(size)]
        received = self.group.exchange(pieces, [sum(of_rank) for of_rank in sizes])
        by_rank = [
            [flat.view(shape) for flat, shape in zip(piece.split(lengths), of_rank, strict=True)]
            for piece, lengths, of_rank in zip(received, sizes, shapes, strict=True)
        ]
        return tuple(torch.cat(found, dim=2 if to_heads else 1) for found in zip(*by_rank, strict=True))


def exchange_rows(group: RankGroup, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Collective: rows [n, H] without gradient: `send[r]` of them, in order, to rank r;
    returns `receive[r]` of rank r, in order."""
    width = rows.shape[1]
    pieces = [part.reshape(-1) for part in rows.split(list(send))]
    return torch.cat(group.exchange(pieces, [count * width for count in receive])).view(-1, width)


class _Swap(torch.autograd.Function):
    """An exchange of rows for heads, or back; each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, shares: RowShares, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shares, ctx.to_heads = shares, to_heads
        return shares.swap(tensors, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.shares.swap(grads, not ctx.to_heads))


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
