"""One pass over a tree whose tokens go to the experts that they went to when they were sampled (rollout routing replay,
Ma et al. 2025, arXiv 2510.11370).

A router that rounds otherwise than the sampler's sends some tokens to other experts, and their log-probabilities differ
by far more than rounding. Here it chooses as the sampler did, and weighs these experts itself, with gradient.

Promises: a run's rows go to their tokens' recorded experts in forward, and when layers run again in backward; tokens
without a record, and those of trees without, as the router has it; a router that did not run is an error. How often it
would have chosen otherwise is counted on the device, of every token's one run with gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.tree.experts.routers import REMEDY, Routers
from app.tree.experts.routes import Tree, TreeRoutes
from app.tree.transfer import on_device

Ints = npt.NDArray[np.int64]
AnyTree = TypeVar("AnyTree", bound=Tree)  # a PrefixTree, which holds routes itself
_UNKNOWN = 1 / 8
"""Of the tokens that the self-check makes records for, those that have none."""


def routed(tree: AnyTree, rows: npt.NDArray[Any], table: npt.NDArray[Any]) -> AnyTree:
    """The same tree with records, which passes over it replay.

    Args:
        rows: integers [sum of L_i], for each token of all sequences its row in `table`, or -1 where nothing is known.
            Of sequences that share a token the first that has a row decides.
        table: integers [R, layers, k]: see `TreeRoutes`. Empty: nothing is known of any token.

    Raises:
        ValueError: another number of rows.
    """
    return _with(tree, TreeRoutes.of(rows, tree, table) if len(table) else None)


def _with(tree: AnyTree, routes: TreeRoutes | None) -> AnyTree:
    held: Any = tree
    changed: AnyTree = replace(held, routes=routes)
    return changed


class Replay:
    """Of one model.

    Attributes:
        routers: the model's.
        counts: float64 [2]: records (a token's of one layer) that were replayed, times experts of each, and how many of
            these experts the router would not have chosen.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.routers = model, Routers.of(model)
        self.counts: Tensor | None = None

    def refuse(self, routes: TreeRoutes) -> None:
        """Raises ValueError where the routes are not of this model."""
        layers, chosen = self.routers.shape
        if routes.table.shape[1:] != (layers, chosen):
            raise ValueError(
                f"routes: recorded are {routes.table.shape[2]} experts in each of {routes.table.shape[1]} layers, and"
                f" {type(self.model).__name__} chooses {chosen} in {layers}; they are another model's; {REMEDY}"
            )
        if not 0 <= int(routes.table.min()) <= int(routes.table.max()) < self.routers.experts:
            raise ValueError(
                f"routes: recorded are experts {routes.table.min()} to {routes.table.max()}, and"
                f" {type(self.model).__name__} has {self.routers.experts} in a layer; they are another model's;"
                f" {REMEDY}"
            )

    def over(self, routes: TreeRoutes | None) -> ReplayPass | None:
        """A pass over a tree with these routes."""
        return None if routes is None else ReplayPass(self, routes, next(self.model.parameters()).device)

    def take_counts(self) -> Tensor:
        """float64 [2], since this was last asked; see `counts`."""
        counts, self.counts = self.counts, None
        return torch.zeros(2, dtype=torch.float64) if counts is None else counts

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, nothing is counted."""
        counts = self.counts
        try:
            yield
        finally:
            self.counts = counts

    @contextmanager
    def alone(self, tree: Any, sequence: int) -> Iterator[None]:
        """Inside, one forward of the model over a sequence of the tree, by itself, is replayed."""
        run = ReplayPass(self, tree.routes, next(self.model.parameters()).device)
        with run.replayed():
            run.at(tree.sequence_tokens([sequence]))
            yield

    def invented(self, tree: AnyTree) -> AnyTree:
        """A tree with records made up, for the self-check, whose sample is of no sampler: random experts, the same for
        the same tree."""
        random = np.random.default_rng(tree.num_tokens)
        layers, chosen = self.routers.shape
        table = np.empty((tree.num_tokens, layers, chosen), np.int64)
        for place, one in enumerate(self.routers.all):
            table[:, place] = random.random((tree.num_tokens, one.experts)).argsort(1)[:, :chosen]
        rows = np.where(random.random(tree.num_tokens) < _UNKNOWN, -1, np.arange(tree.num_tokens))
        return _with(tree, TreeRoutes(rows, table))


class ReplayPass:
    """Of one pass over a tree with routes."""

    def __init__(self, replay: Replay, routes: TreeRoutes, device: torch.device) -> None:
        self.replay, self.routes, self.device = replay, routes, device
        self._known = self._experts = torch.empty(0)
        self._ran: set[int] = set()
        self._first = False

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, forwards of the model do as `at` and `again` said last."""
        with self.replay.routers.chosen_by(self._choose):
            yield

    def at(self, tokens: Ints) -> tuple[Tensor, Tensor]:
        """Before a run over these tree tokens; what it returns is for `again`."""
        rows = self.routes.rows[tokens]
        known = on_device(rows >= 0, self.device).unsqueeze(1)
        experts = on_device(self.routes.table[np.maximum(rows, 0)], self.device)
        self._known, self._experts, self._ran, self._first = known, experts, set(), torch.is_grad_enabled()
        return known, experts

    def again(self, told: tuple[Tensor, Tensor]) -> None:
        """Before layers of that run may go forward once more, in its backward."""
        self._known, self._experts = told
        self._first = False

    def refuse_unreached(self) -> None:
        """Raises ValueError where a router did not run in the forward that `at` was called for."""
        missing = [one.name for place, one in enumerate(self.replay.routers.all) if place not in self._ran]
        if missing:
            raise ValueError(
                f"'{missing[0]}' did not run in a forward of {type(self.replay.model).__name__}, so that its recorded"
                f" experts were not replayed; {REMEDY}"
            )

    def _choose(self, place: int, own: Tensor) -> Tensor:
        if len(own) != len(self._known):
            raise ValueError(
                f"'{self.replay.routers.all[place].name}' was given {len(own)} tokens of {len(self._known)}, so that"
                f" recorded experts cannot be told apart; {REMEDY}"
            )
        self._ran.add(place)
        recorded = self._experts[:, place].to(own.dtype)
        if self._first:
            with torch.no_grad():
                other = ~(recorded.unsqueeze(2) == own.unsqueeze(1)).any(2) & self._known
                counts = torch.stack([self._known.sum() * own.shape[1], other.sum()]).double()
                self.replay.counts = counts if self.replay.counts is None else self.replay.counts + counts
        return torch.where(self._known, recorded, own)
