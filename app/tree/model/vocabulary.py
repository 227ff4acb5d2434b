"""Embedding and output projection in parts: each rank of a group holds the rows of its share of the vocabulary.

    rank 0   tokens 0-9     looks these up for all ranks     their logits, of the rows of all ranks
    rank 1   tokens 10-19   looks these up for all ranks     their logits, of the rows of all ranks

Promises: neither matrix, nor its gradient, is ever whole anywhere: what travels are hidden states, and one number a row
for the softmax (after Megatron-LM's vocabulary parallelism, arXiv:1909.08053). A parameter's gradient is complete where
its rows are, the sum over the ranks of the group, and is in the accumulation dtype from the first chunk on. Every rank
issues the same collectives. Embeddings that scale what they look up, projections with a bias, and matrices that are one
parameter for both work as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import PreTrainedModel

from app.tree.attention.groups import RankGroup, exchange_rows
from app.tree.prefix_tree import Ints
from app.tree.transfer import on_device

_KEPT_AS = "cut_vocabulary"  # attribute of the model


def vocabulary_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Embedding and output projection, those of which `CutVocabulary` can run in parts: both or none where they share a
    parameter."""
    embedding, projection = model.get_input_embeddings(), model.get_output_embeddings()
    plain = isinstance(embedding, nn.Embedding) and embedding.max_norm is None
    plain = plain and not (embedding.sparse or embedding.scale_grad_by_freq)
    found = [embedding] if plain else []
    if type(projection) is nn.Linear:
        found.append(projection)
    tied = projection is not None and getattr(embedding, "weight", None) is getattr(projection, "weight", None)
    return [] if tied and len(found) < 2 else found


class CutVocabulary:
    """Runs those of a model's `vocabulary_modules` whose parameters are cut up: `DTensor`s over the group, each rank
    having ceil(vocabulary / ranks) rows or what is left.

    Outside of a tree pass the modules work as well, where every rank calls them with the same input.

    Args:
        model: its modules are made to look things up in parts, for good.
        group: the ranks that have the parts, in order.
        dtype: what they compute in: that of embedded tokens, and of logits.

    Attributes:
        projects: whether the output projection is among them.
        first, count: this rank's rows of the vocabulary.
    """

    def __init__(self, model: PreTrainedModel, group: RankGroup, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype
        self._wanted: Sequence[Ints] | None = None
        self._in_parts = False
        modules = [m for m in vocabulary_modules(model) if isinstance(m.weight.data, DTensor)]
        self.projects = any(isinstance(module, nn.Linear) for module in modules)
        size: int = modules[0].weight.shape[0]  # type: ignore[index, assignment]
        self._rows = -(-size // group.size)
        self._starts = [min(self._rows * rank, size) for rank in range(group.size + 1)]
        self.first, after = self._starts[group.rank : group.rank + 2]
        self.count = after - self.first
        for module in modules:
            run = self._embed if isinstance(module, nn.Embedding) else self._project
            module.forward = _bound(run, module, module.forward)
        setattr(model, _KEPT_AS, self)

    @classmethod
    def of(cls, model: PreTrainedModel) -> CutVocabulary | None:
        """That of a model which was cut up."""
        return getattr(model, _KEPT_AS, None)

    @contextmanager
    def asked_for(self, tokens: Sequence[Ints]) -> Iterator[None]:
        """Inside, the embedding gets the `tokens` of this rank, and those of other ranks are these."""
        self._wanted = tokens
        try:
            yield
        finally:
            self._wanted = None

    # Hidden states

    def to_everyone(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Collective: this rank's [counts[rank], H] -> those of all ranks, in their order, without gradient."""
        size = self.group.size
        return exchange_rows(self.group, rows.repeat(size, 1), [len(rows)] * size, counts)

    def to_owners(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Collective: [sum of counts, H] -> this rank's rows [counts[rank], H], summed over the ranks."""
        size, own = self.group.size, counts[self.group.rank]
        received = exchange_rows(self.group, rows, counts, [own] * size).view(size, own, rows.shape[1])
        return received.sum(0, dtype=torch.promote_types(torch.float32, rows.dtype)).to(rows.dtype)

    # Logits, of which this rank has `count` columns

    @contextmanager
    def logits_in_parts(self) -> Iterator[None]:
        """Inside, the projection returns this rank's columns alone, with gradient."""
        self._in_parts = True
        try:
            yield
        finally:
            self._in_parts = False

    def log_of_sum(self, part: Tensor) -> Tensor:
        """Collective: [n], log of the sum of exp over the ranks: the same bits on each."""
        return torch.stack(self.group.exchange([part] * self.group.size, [len(part)] * self.group.size)).logsumexp(0)

    def sum(self, part: Tensor) -> Tensor:
        """Collective: [n], summed over the ranks."""
        self.group.sum_(part)
        return part

    def pick(self, columns: Tensor, targets: Tensor) -> Tensor:
        """[n]: of each row of `columns` [n, count] that of its target, 0 where another rank has it."""
        at, here = self._here(targets)
        return torch.where(here, columns.gather(-1, at).squeeze(-1), 0) if self.count else 0 * columns.sum(-1)

    def add_(self, columns: Tensor, targets: Tensor, values: Tensor) -> None:
        """Adds `values` [n] to `columns` [n, count] at the rows' targets, where this rank has them."""
        at, here = self._here(targets)
        if self.count:
            columns.scatter_add_(-1, at, torch.where(here, values, 0).unsqueeze(-1))

    def _here(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        at = targets - self.first
        return at.clamp(0, max(0, self.count - 1)).unsqueeze(-1), (at >= 0) & (at < self.count)

    # What the modules do

    def _embed(self, module: nn.Embedding, forward: Any, ids: Tensor) -> Tensor:
        """The module over a table of the rows asked for, in their order."""
        wanted = [ids.reshape(-1).cpu().numpy()] * self.group.size if self._wanted is None else self._wanted
        if self._wanted is None:
            self._require_same(ids.reshape(-1))
        owners = [tokens // self._rows for tokens in wanted]
        mine = [tokens[owner == self.group.rank] - self.first for tokens, owner in zip(wanted, owners, strict=True)]
        weight: Any = module.weight
        padding = -1 if module.padding_idx is None else module.padding_idx - self.first
        without = padding if 0 <= padding < self.count else None
        found = functional.embedding(on_device(np.concatenate(mine), ids.device), weight.to_local(), without)
        own = owners[self.group.rank]
        sizes = np.bincount(own, minlength=self.group.size).tolist()
        by_owner: Tensor = _Exchange.apply(self.group, found.to(self.dtype), [len(part) for part in mine], sizes)
        place = np.empty(len(own), np.int64)
        place[np.argsort(own, kind="stable")] = np.arange(len(own))
        table = by_owner.index_select(0, on_device(place, ids.device))
        with _in_place_of(module, weight=table, padding_idx=None):
            embedded: Tensor = forward(torch.arange(len(own), device=ids.device).view(ids.shape))
        return embedded

    def _project(self, module: nn.Linear, forward: Any, hidden: Tensor) -> Tensor:
        whole: dict[str, Any] = {name: p for name, p in module.named_parameters() if isinstance(p.data, DTensor)}
        with _in_place_of(module, **{name: p.to_local().to(self.dtype) for name, p in whole.items()}):
            logits: Tensor = forward(hidden)
        if self._in_parts:
            return logits
        if torch.is_grad_enabled() and logits.requires_grad:
            raise RuntimeError(
                "the output projection is in parts over a group of ranks: whole logits come without gradient; compute"
                " losses by TreeEngine(group=...), or under torch.no_grad()"
            )
        self._require_same(hidden.new_full((1,), hidden.numel()))
        rows = hidden.numel() // hidden.shape[-1]
        counts = [b - a for a, b in zip(self._starts, self._starts[1:])]
        parts = self.group.exchange([logits.reshape(-1)] * self.group.size, [rows * count for count in counts])
        return torch.cat([part.view(*logits.shape[:-1], count) for part, count in zip(parts, counts)], -1)

    def _require_same(self, ids: Tensor) -> None:
        """Raises RuntimeError where ranks call a module with different input outside of a tree pass."""
        sums = [float(len(ids)), float((ids.double() * torch.arange(1.0, len(ids) + 1, device=ids.device)).sum())]
        if len({tuple(found) for found in self.group.gather(sums)}) > 1:
            raise RuntimeError(
                "embedding and output projection are in parts over a group of ranks, which call them with different"
                " input: run different sequences by TreeEngine(group=...), or the same ones on every rank"
            )


class _Exchange(torch.autograd.Function):
    """Rows [n, H] to the ranks of a group: `send[r]` of them to rank r; returns `receive[r]` of rank r, in order."""

    @staticmethod
    def forward(ctx: Any, group: RankGroup, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return exchange_rows(group, rows, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, exchange_rows(ctx.group, grads[0], ctx.receive, ctx.send), None, None


def _bound(run: Any, module: nn.Module, forward: Any) -> Any:
    return lambda *arguments: run(module, forward, *arguments)


@contextmanager
def _in_place_of(module: nn.Module, **values: Any) -> Iterator[None]:
    """Attributes of `module`, parameters too, are `values` inside."""
    own = vars(module)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)
