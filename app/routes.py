"""Experts in training data: which experts of each layer the engine sent a token to when it sampled (or read) it.

What an engine has recorded of an episode lies in one table, a row a token, to which sequences point: conversations
repeat their beginnings many times, and these rows are held once. Tokens point nowhere where nothing was recorded: the
last one of a reply, which no forward has seen, and whatever no engine read.

Promises: rows are never changed; merging and selecting keep every token's row, and rows that no token points to are
dropped. Imports of the project `app.fields` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from app.fields import BatchError

DTYPES = (torch.uint8, torch.int16)


class RouteTable:
    """Rows of experts, [R, layers, k], that grow: uint8 for up to 256 experts of a layer, else int16."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, rows: Tensor) -> int:
        """Appends rows [n, layers, k]; returns the place of the first of them.

        Raises:
            BatchError: another dtype, or other layers or numbers of experts than there were before.
        """
        before = self._pieces[0] if self._pieces else rows
        alike = (rows.dtype, rows.shape[1:]) == (before.dtype, before.shape[1:])
        if rows.dim() != 3 or rows.dtype not in DTYPES or not alike:
            raise BatchError(
                f"RouteTable: {rows.dtype} rows of shape {tuple(rows.shape)} behind {before.dtype} of shape"
                f" {tuple(before.shape)}; give uint8 or int16 [n, layers, k], of one model"
            )
        start, self._count = self._count, self._count + len(rows)
        self._pieces.append(rows)
        return start

    def rows(self) -> Tensor:
        """All of them, in one tensor."""
        if len(self._pieces) > 1:
            self._pieces = [torch.cat(self._pieces)]
        return self._pieces[0]


@dataclass(frozen=True, eq=False)
class Routes:
    """The rows of one sequence.

    Attributes:
        index: int32 [L], for each token its row in `table`, or -1.
        table: shared by the sequences of an episode, or of a batch that they come from.
    """

    index: Tensor
    table: RouteTable


@dataclass(frozen=True, eq=False)
class BatchRoutes:
    """The rows of a batch's tokens.

    Attributes:
        index: int32 [T], for each token its row in `table`, or -1.
        table: uint8 or int16 [R, layers, k].
    """

    index: Tensor
    table: Tensor

    @classmethod
    def merged(cls, parts: Iterable[tuple[Routes | None, int]]) -> BatchRoutes | None:
        """Of sequences, one behind another; None where no token has a row.

        Args:
            parts: the routes of each (None: nothing is known), and its tokens.

        Raises:
            BatchError: rows of different models.
        """
        places: dict[int, int] = {}
        whole, columns = RouteTable(), []
        for routes, length in parts:
            if routes is None or not len(routes.table):
                columns.append(torch.full((length,), -1, dtype=torch.int32))
                continue
            if id(routes.table) not in places:
                places[id(routes.table)] = whole.add(routes.table.rows())
            columns.append(torch.where(routes.index >= 0, routes.index + places[id(routes.table)], -1).to(torch.int32))
        index = torch.cat(columns)
        return cls(index, whole.rows()).pointing(index) if places else None

    def split(self, bounds: Sequence[int]) -> list[Routes]:
        """Of each of the sequences, which begin and end at `bounds` [N + 1]."""
        shared = RouteTable()
        shared.add(self.table)
        return [Routes(self.index[a:b], shared) for a, b in pairwise(bounds)]

    def pointing(self, index: Tensor) -> BatchRoutes | None:
        """Tokens (int32 [T]) that point to these rows, without those that none points to; None where all are."""
        here = torch.zeros(len(self.table) + 1, dtype=torch.bool)  # its last entry is that of index -1
        here[index.long()] = True
        here[-1] = False
        if not bool(here.any()):
            return None
        if bool(here[:-1].all()):
            return BatchRoutes(index, self.table)
        places = torch.where(here, here.cumsum(0) - 1, -1).to(torch.int32)
        return BatchRoutes(places[index.long()], self.table[here[:-1]])

    def fault(self, tokens: int) -> tuple[None, str] | None:
        """What is wrong with those of so many tokens, at no position in particular; None if nothing."""
        index, table = self.index, self.table
        if index.shape != (tokens,) or index.dtype != torch.int32:
            return None, f"expected torch.int32 of shape ({tokens},), got {index.dtype} of shape {tuple(index.shape)}"
        if table.dim() != 3 or table.dtype not in DTYPES or not table.numel():
            got = f"{table.dtype} of shape {tuple(table.shape)}"
            return None, f"expected a table of uint8 or int16 [rows, layers, k], got {got}"
        first, last = int(index.min()), int(index.max())
        if first < -1 or last >= len(table):
            return None, f"rows {first} to {last} of a table of {len(table)}: index its rows from 0, or -1"
        return None
