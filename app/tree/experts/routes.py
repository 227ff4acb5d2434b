"""Which experts the tokens of a tree went to when they were sampled: an index into a table of rows, one number a token.

Promises: numpy alone. A token that several sequences share has one row, that of the first of them (in the tree's order
of sequences) that has one, wherever the tree is cut, selected from or run densely; a token without a row has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Tree(Protocol):
    """What is asked of a prefix tree."""

    @property
    def num_sequences(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    def sequence_tokens(self, indices: Sequence[int]) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True, eq=False)
class TreeRoutes:
    """Rows of a table, by the tokens of a tree.

    Attributes:
        rows: int64 [T], for each token its row in `table`, -1 for none.
        table: integers [R, layers, k], R at least 1: of each layer of experts, first to last, the k experts that a
            token goes to.
    """

    rows: npt.NDArray[np.int64]
    table: npt.NDArray[Any]

    @classmethod
    def of(cls, rows: npt.NDArray[Any], tree: Tree, table: npt.NDArray[Any]) -> TreeRoutes:
        """`rows`: [sum of L_i], -1 or a row of `table`, for the tokens of all sequences of a tree, one after the other.

        Raises:
            ValueError: another number of rows.
        """
        tokens = tree.sequence_tokens(range(tree.num_sequences))
        if len(rows) != len(tokens):
            raise ValueError(f"routes: {len(rows)} rows for {len(tokens)} tokens of all sequences; give one a token")
        known = np.flatnonzero(rows >= 0)
        found, first = np.unique(tokens[known], return_index=True)
        of_token = np.full(tree.num_tokens, -1, np.int64)
        of_token[found] = rows[known[first]]
        return cls(of_token, table)

    def moved(self, source: npt.NDArray[np.int64], tree: Tree) -> TreeRoutes:
        """Those of another tree, the tokens of whose sequences are `source` [n] of this one."""
        return TreeRoutes.of(self.rows[source], tree, self.table)
