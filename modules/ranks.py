"""What ranks are given to do: how a batch is cut into steps and shares, and how rank 0 has all ranks work on them.

Promises: rank 0, which owns the stream, decides everything (who runs which sequences, what columns they read), so that
nothing depends on ranks computing the same. Of a batch it sends the sequences, once, which the others keep packed; and
for every piece of work the shares and the columns' values of trained tokens. Metadata stays on rank 0. On one process
nothing is cut, packed or copied, whatever the Trainer's strategy. Every sequence is in exactly one minibatch of an
epoch and on exactly one rank; minibatches are a function of the batch and the seed alone, whatever the number of ranks;
empty shares are ordinary, and so are empty minibatches where a batch has fewer episodes than minibatches (the last of a
pass over recorded tasks, or one that is replayed), or fewer groups where these stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from app.batch import BatchError, EvalHandle, RolloutBatch, StepHandle, ranges
from app.exchange import Parts, Ranks, Said
from app.tree import Likeliest, PrefixTree, SelfCheckError, TreeEngine, partition, routed

Passes = Mapping[str, Sequence[str]]
"""Forward passes: the outputs that are wanted, by the name of the engine, as `{"policy": ["logprobs", "values"]}`; the
names of `likeliest_columns` come last."""
POLICY = "policy"
"""The engine of the policy among `Passes`, which alone replays the experts that a batch has on record."""
TEACHERS_VIEW = "teachers_view"
"""Column with a number for each prompt of a teacher, on the trained tokens of the sequences that have it."""
H = TypeVar("H", StepHandle, EvalHandle)
EngineFor = Callable[[str], AbstractContextManager[TreeEngine]]


def likeliest_columns(count: int) -> tuple[str, ...]:
    """Columns with the `count` likeliest tokens where a token stands, best first, and with their probabilities. Ids are
    exact in float32 below 2^24."""
    return (*(f"likely_id_{k}" for k in range(count)), *(f"likely_p_{k}" for k in range(count)))


@dataclass
class Step:
    """What all ranks together do in one optimizer step.

    Attributes:
        batch: a whole batch. indices: the sequences of the step, ascending, one at least.
        columns: what their loss reads, [T] of the whole batch.
        tree: their prefix tree, of mode "tree".
        whole_groups: a rank gets the sequences of a group together.
    """

    batch: RolloutBatch
    indices: list[int]
    columns: Mapping[str, Tensor]
    tree: PrefixTree
    whole_groups: bool = False


class RankWork:
    """Rank 0 leads, the others follow.

    Args:
        exchange: the ranks of the run.
        share: how sequences share prefixes; see `PrefixTree.build`.
        engine_for: the tree engine of each name in `Passes`, for the time of one pass.
    """

    def __init__(self, exchange: Ranks, share: str, engine_for: EngineFor) -> None:
        self.exchange = exchange
        self._share, self._engine_for = share, engine_for

    def lead(self, handle: H, work: Callable[[H], Step | None]) -> RolloutBatch | None:
        """Collective: this rank's sequences of the step that `work(handle)` returns, with their columns and no others.
        Rank 0 does `work`, which may call `outputs`; the others run the passes it asks for until it is done, and hear
        of its errors.

        Raises:
            BatchError: another rank than 0 holds the batch of `handle`.
        """
        rank, part = self.exchange.rank, self.exchange.part
        if rank != 0 and handle.batch is not None:
            raise BatchError(f"{handle} on rank {rank}: only rank 0 owns the stream of batches")
        if self.exchange.size == 1:
            step = work(handle)
            return None if step is None else _pick(step.batch, step.indices, step.columns)
        led: list[tuple[Step, list[list[int]]]] = []

        def cut() -> Said:
            step = work(handle)
            if step is None:
                return None, None, {}
            tree = step.tree if self._share == "tree" else None
            shares = self.shares(step.batch, step.indices, tree, step.whole_groups)
            led.append((step, shares))
            values, bounds = trained_values(step.batch, shares, step.columns)
            return {"shares": shares, "bounds": bounds}, step.batch, values

        request, batch, values = self.exchange.lead(cut, self._answer)
        if led:  # not before the others have theirs
            step, shares = led[0]
            return _pick(step.batch, shares[part], step.columns) if shares[part] else None
        if batch is None or not request["shares"][part]:
            return None
        own = batch.select(request["shares"][part])
        return own.with_columns(own_values(own, values, request["bounds"], part))

    def outputs(
        self, batch: RolloutBatch, passes: Passes, indices: list[int] | None = None
    ) -> dict[str, dict[str, Tensor]]:
        """Rank 0, while it leads: float32 [T] of the whole batch, on the CPU, by engine and output, 0 where not trained
        and for sequences that are not among `indices` (ascending; default: all). The ranks compute a balanced share
        each."""
        shares = self.shares(batch, list(range(len(batch))) if indices is None else indices)
        request = {"passes": {name: list(want) for name, want in passes.items()}, "shares": shares}
        answers = self.exchange.ask(request, batch, self._answer)
        flat = torch.zeros(sum(map(len, passes.values())), batch.num_tokens, dtype=torch.float32)
        for own, answer in zip(shares, answers, strict=True):
            at = batch.flat_index(own)
            at = at[batch.loss_mask[at]]
            flat[:, at] = answer.view(len(flat), len(at))
        rows = iter(flat)
        return {engine: {name: next(rows) for name in want} for engine, want in passes.items()}

    def _answer(self, request: dict[str, Any], batch: Parts | None) -> Tensor:
        """Float32 [outputs, M] on the CPU: of the M trained tokens of this rank's share, in the order of the passes."""
        passes: Passes = request["passes"]
        share = request["shares"][self.exchange.part]
        if not share:
            return torch.zeros(sum(map(len, passes.values())), 0, dtype=torch.float32)
        assert batch is not None, "what is asked for is about a batch"
        part = _pick(batch, share, {}) if isinstance(batch, RolloutBatch) else batch.select(share)
        tree, rows = build_tree(part, self._share), []
        for name, want in passes.items():
            own = tree if name == POLICY else replace(tree, routes=None)  # another model's experts are not these
            outputs = [one for one in want if not one.startswith("likely_")]
            likeliest = Likeliest((len(want) - len(outputs)) // 2) if len(outputs) < len(want) else None
            with self._engine_for(name) as engine:
                out = engine.forward(own, want=outputs, temperatures=part.temperatures, soft=likeliest)
            columns = [out.flat(output) for output in outputs]
            if likeliest is not None:
                ids, logprobs = likeliest.found()
                columns += [*ids.unbind(-1), *logprobs.exp().unbind(-1)]
            rows += [column[part.loss_mask.to(column.device)].float().cpu() for column in columns]
        return torch.stack(rows)

    def shares(
        self,
        batch: RolloutBatch,
        indices: Sequence[int],
        tree: PrefixTree | None = None,
        whole_groups: bool = False,
    ) -> list[list[int]]:
        """Which of the sequences `indices` each rank (or group of ranks) runs, ascending: shares of similar predicted
        cost. `tree`: that of `build_tree` for `indices`, where it is at hand. `whole_groups`: as in `Step`."""
        if self.exchange.parts == 1:
            return [list(indices)]
        tree = build_tree(batch, self._share, indices) if tree is None else tree
        together = batch.group_ids[list(indices)].numpy() if whole_groups else None
        parts = partition(tree, self.exchange.parts, **self.exchange.partition_options, together=together)
        return [sorted(indices[i] for i in part) for part in parts]

    def verify_together(
        self, engine: TreeEngine, tree: PrefixTree, want: Sequence[str], fall_back: bool, unchecked: set[bool]
    ) -> set[bool]:
        """Collective: the engine's self-check on a part of this rank's `tree`, one decision for all: when any rank's
        fails, all ranks stop, or all fall back to dense-leaf execution.

        Args:
            unchecked: kinds of trees, without pictures and with them, that no rank has compared; the same on all.

        Returns:
            Those that are still to be checked.

        Raises:
            SelfCheckError: some rank's tree and dense execution differ, and `fall_back` is False or of no help.
        """
        seen = bool(tree.pictures)
        report = engine.verify(tree, want) if seen in unchecked else None
        failed = report is not None and not report.passed
        hopeless = report is not None and failed and report.heads
        device = next(engine.model.parameters()).device
        found = [report is not None, report is not None and seen, failed, hopeless]
        compared, with_pictures, mismatches, heads = self.exchange.sum(
            torch.tensor(found, dtype=torch.float32, device=device)
        ).tolist()
        if mismatches:
            findings = str(report) if failed else f"tree and dense execution differ on {mismatches:.0f} other rank(s)"
            name = type(engine.model).__name__
            if heads:  # every sequence alone has the same ones
                cause = report.cause if report is not None and hopeless else "Its output projection is not understood"
                raise SelfCheckError(f"{name}: {findings}. {cause}")
            if not fall_back:
                raise SelfCheckError(
                    f"{name}: {findings}. Some layer mixes tokens past the attention the engine controls: set"
                    " model.self_check to 'fallback' (every sequence alone, slower), or to 'skip' if you know better"
                )
            engine.fall_back(findings)
        done = {False} if compared else set[bool]()
        if with_pictures or engine.tower.processor is None:  # which has no pictures
            done |= {True} if compared else set()
        return unchecked - done


def build_tree(batch: RolloutBatch, share: str, indices: Sequence[int] | None = None) -> PrefixTree:
    """The prefix tree of the sequences `indices` (default: all) of a batch, whose trained tokens are scored.

    Only equal temperatures share tokens (a log-probability depends on its sequence's temperature), and where the
    batch has the column TEACHERS_VIEW only equal numbers in it (soft targets depend on these). `share`: see
    `PrefixTree.build`.
    """
    if indices is not None and not len(indices):
        return PrefixTree.build([])
    picks = range(len(batch)) if indices is None else indices
    sequences, scored = batch.sequences(), batch.split(batch.loss_mask)
    images = None if batch.images is None else batch.split(batch.images)
    keys = batch.temperatures[list(picks)].unique(return_inverse=True)[1]
    if TEACHERS_VIEW in batch.columns:
        views = torch.stack([column.max() for column in batch.split(batch.columns[TEACHERS_VIEW])])[list(picks)]
        keys = torch.stack([keys.to(views), views]).unique(dim=1, return_inverse=True)[1]
    tree = PrefixTree.build(
        [sequences[i] for i in picks],
        scored=[scored[i] for i in picks],
        keys=keys.numpy(),
        share=share,
        images=images and [images[i] for i in picks],
        pictures=batch.pictures,
    )
    if batch.routes is None:
        return tree
    return routed(tree, batch.routes.index[batch.flat_index(list(picks))].numpy(), batch.routes.table.numpy())


def settle_routes(batch: RolloutBatch) -> None:
    """Every token of a batch points to the experts that all sequences which share it are given, whichever of them a
    step or a rank has: those of the first that has any, as a tree of all decides. In place, and the same when done
    again."""
    if batch.routes is None:
        return
    tree = build_tree(batch, "tree")
    assert tree.routes is not None
    rows = tree.routes.rows[tree.sequence_tokens(range(len(batch)))]
    batch.routes = batch.routes.pointing(torch.from_numpy(rows).to(torch.int32))


def split_minibatches(
    batch: RolloutBatch, count: int, seed: Sequence[int], whole_groups: bool = False
) -> list[list[int]]:
    """Sequence indices (ascending) of `count` minibatches.

    What stays together is a group, whose samples share their prompt and whose advantages balance; when there are fewer
    groups than minibatches, an episode, whose turns extend one another. These are shuffled by `seed` (any number
    of integers, for example seed, policy version, epoch) and dealt in equal numbers.

    Args:
        whole_groups: some minibatches are empty rather than that a group is taken apart.
    """
    if count == 1:
        return [list(range(len(batch)))]
    groups = batch.group_ids.numpy()
    pairs = np.stack([groups, batch.episode_ids.numpy()], axis=1)
    units = np.unique(groups, return_inverse=True)[1]
    if units.max() + 1 < count and not whole_groups:
        units = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.random.default_rng([*seed]).permutation(units.max() + 1)
    return [np.flatnonzero(np.isin(units, part)).tolist() for part in np.array_split(order, count)]


def trained_values(
    batch: RolloutBatch, shares: list[list[int]], columns: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """What ranks need of the columns ([T] of the whole batch).

    Returns:
        By name the values of the shares' sequences, in that order: of trained tokens alone where the column is 0 on all
        others of the batch. And where each rank's values begin in them, [ranks + 1].
    """
    order = [sequence for share in shares for sequence in share]
    trained = torch.from_numpy(np.flatnonzero(batch.loss_mask.numpy()))
    edges = torch.searchsorted(trained, batch.cu_seqlens)
    at = trained[ranges(edges, order)]
    values, bounds = {}, {}
    for name, column in columns.items():
        array = column.numpy()
        sparse = np.count_nonzero(array) == np.count_nonzero(array[trained.numpy()])
        values[name] = column[at if sparse else batch.flat_index(order)]
        sizes = edges.diff() if sparse else batch.lengths()
        bounds[name] = [0, *np.cumsum([int(sizes[share].sum()) if share else 0 for share in shares]).tolist()]
    return values, bounds


def own_values(
    own: RolloutBatch, values: Mapping[str, Tensor], bounds: Mapping[str, list[int]], share: int
) -> dict[str, Tensor]:
    """The inverse of `trained_values` for the sequences of one share: [T] of them."""
    columns = {}
    for name, column in values.items():
        piece = column[bounds[name][share] : bounds[name][share + 1]]
        if len(piece) < own.num_tokens:  # the first token of a sequence is never trained
            piece = torch.zeros(own.num_tokens, dtype=column.dtype).masked_scatter_(own.loss_mask, piece)
        columns[name] = piece
    return columns


def _pick(batch: RolloutBatch, indices: list[int], columns: Mapping[str, Tensor]) -> RolloutBatch:
    """The sequences `indices` (ascending, one at least) with these columns ([T] of the whole batch) and no others,
    without metadata."""
    seen = batch.without("metadata").with_columns(columns)
    return seen if len(indices) == len(batch) else seen.select(indices)
