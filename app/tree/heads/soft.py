"""Columns of the vocabulary beside a token's own: targets of a loss against another distribution (a teacher's few
likeliest tokens), and the collection of those that a model itself finds likeliest.

Promises: a position has K columns, and costs K picks out of the one softmax that its token's log-probability takes; a
sum over them is one number a row, so it is shared, summed over ranks and differentiated as the other outputs are. Of
sequences that share a token the first that scores it says what its columns are: a distribution depends on the prefix
alone, and two that a teacher computed apart differ by rounding.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.tree.prefix_tree import PrefixTree
from app.tree.transfer import on_device


@dataclass(frozen=True, eq=False)
class SoftTargets:
    """What the output `soft` of a token is made of: the sum over k of weights[k] x log p(ids[k]), with p the
    distribution that the token is drawn from.

    Attributes:
        ids: int64 [n, K], columns of the vocabulary, distinct in a row where weights are not 0.
        weights: [n, K], constants: a teacher's probabilities, say.
    """

    ids: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        if self.ids.dim() != 2 or self.ids.shape != self.weights.shape or self.ids.dtype != torch.int64:
            raise ValueError(
                f"SoftTargets: ids {self.ids.dtype} of shape {tuple(self.ids.shape)} and weights of shape"
                f" {tuple(self.weights.shape)}; give int64 [n, K] and [n, K], one row a token"
            )

    def __getitem__(self, rows: Any) -> SoftTargets:
        return SoftTargets(self.ids[rows], self.weights[rows])

    def on(self, tree: PrefixTree, vocab_size: int, device: torch.device, dtype: torch.dtype) -> SoftTargets:
        """From rows for the tokens of all sequences, concatenated, to rows for the tree's tokens.

        Raises:
            ValueError: another number of rows, or a column outside of the vocabulary.
        """
        if len(self.ids) != tree.num_dense_tokens:
            raise ValueError(
                f"soft: {len(self.ids)} rows, but the tree's sequences have {tree.num_dense_tokens} tokens; give one a"
                " token, those of all sequences in the tree's order"
            )
        if bool(((self.ids < 0) | (self.ids >= vocab_size)).any()):  # before anything else is on its way to a GPU
            raise ValueError(f"soft: a column outside of the vocabulary of {vocab_size}; its ids are another model's")
        tokens, scored = _dense(tree)
        rows = np.flatnonzero(scored)
        found, first = np.unique(tokens[rows], return_index=True)
        ids = torch.zeros(tree.num_tokens, self.ids.shape[1], dtype=torch.int64, device=device)
        weights = torch.zeros(tree.num_tokens, self.ids.shape[1], dtype=dtype, device=device)
        at, chosen = on_device(found, device), on_device(rows[first], device)
        ids[at] = self.ids.to(device)[chosen]
        weights[at] = self.weights.detach().to(device, dtype)[chosen]
        return SoftTargets(ids, weights)


class Likeliest:
    """Collects, in a forward pass, the columns that the model finds likeliest where a scored token stands.

    Args:
        count: how many, 1 to the size of the vocabulary.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._ids = self._logprobs = torch.zeros(0, count)
        self._tree: PrefixTree | None = None  # that was run, which a dense engine builds anew
        self._rows: Tensor | None = None

    def __getitem__(self, rows: Any) -> Likeliest:
        """A view that collects for these rows alone."""
        view = Likeliest(self.count)
        view._ids, view._logprobs = self._ids, self._logprobs
        view._rows = rows if self._rows is None else self._rows[rows]
        return view

    def on(self, tree: PrefixTree, vocab_size: int, device: torch.device, dtype: torch.dtype) -> Likeliest:
        """Ready to collect over a tree. Raises ValueError: more than the vocabulary has, or less than one."""
        if not 1 <= self.count <= vocab_size:
            raise ValueError(f"Likeliest: {self.count} columns, must be 1 to the vocabulary's {vocab_size}")
        self._tree = tree
        self._ids = torch.zeros(tree.num_tokens, self.count, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(tree.num_tokens, self.count, dtype=dtype, device=device)
        return self

    def keep(self, logp: Tensor) -> None:
        """Of log-probabilities [n, V] of these rows."""
        best = logp.topk(self.count, -1)
        self._ids[self._rows], self._logprobs[self._rows] = best.indices, best.values

    def sum_over(self, group: Any) -> None:
        """Collective, where each rank of a group has collected for rows of its own."""
        ids = self._ids.double()
        group.sum_(ids)
        group.sum_(self._logprobs)
        self._ids = ids.long()

    def found(self) -> tuple[Tensor, Tensor]:
        """Columns int64 [sum of L_i, K], likeliest first, and their log-probabilities, of the tokens of all sequences
        concatenated; 0 where a sequence does not score."""
        assert self._tree is not None, "a forward pass collects"
        tokens, scored = _dense(self._tree)
        index = on_device(tokens, self._ids.device)
        here = on_device(scored, self._ids.device).unsqueeze(-1)
        return self._ids[index] * here, self._logprobs[index].masked_fill(~here, 0.0)


Soft = SoftTargets | Likeliest


def refuse_soft(want: Collection[str], soft: Soft | None, in_parts: bool) -> None:
    """Raises ValueError where outputs and `soft` do not belong together. `in_parts`: ranks share the vocabulary."""
    if not isinstance(soft, Likeliest):
        if ("soft" in want) != (soft is not None):
            raise ValueError("want: 'soft' and soft=SoftTargets(...) go together, in forward and backward; give both")
        return
    if "logprobs" not in want:
        raise ValueError("want: a Likeliest collects beside 'logprobs'; add it")
    if in_parts:
        raise ValueError(
            "soft: the likeliest tokens of a model whose vocabulary ranks share are known to none of them;"
            " leave it whole (shard_parameters: false), or have an SGLang server say them (reference.url)"
        )


def _dense(tree: PrefixTree) -> tuple[Any, Any]:
    """Tree token and scored flag of every token of all sequences, concatenated."""
    every = np.arange(tree.num_sequences, dtype=np.int64)
    return tree.sequence_tokens(every), tree.sequence_scored(every).astype(bool)
