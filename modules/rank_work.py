"""What a module's ranks are given to do: rank 0 cuts a batch into parts, and puts what comes back in its place.

Promises: only rank 0, which owns the stream, ever holds a whole batch; another rank is given its own sequences of one
piece of work at a time, with the columns that it reads. Parts may be empty. On one process nothing is cut, packed or
copied, whatever the Trainer's strategy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from app.batch import BatchError, EvalHandle, RolloutBatch, StepHandle
from app.tree import PrefixTree, TreeEngine
from modules.minibatches import build_tree, rank_shares

Parts = list[RolloutBatch | None]
"""The sequences of each rank, by rank; None for a rank that has none."""
Passes = Mapping[str, Sequence[str]]
"""Forward passes: the outputs that are wanted, by the name of the engine, as `{"policy": ["logprobs", "values"]}`."""
EngineFor = Callable[[str], AbstractContextManager[TreeEngine]]


class RankWork:
    """Rank 0 leads, the others follow, as `DTAStrategy.traffic` lets them; without it there is one rank.

    Args:
        trainer: with its strategy.
        share: how sequences share prefixes; see `PrefixTree.build`.
        engine_for: the tree engine of each name in `Passes`, for the time of one pass.
    """

    def __init__(self, trainer: Any, share: str, engine_for: EngineFor) -> None:
        self._trainer, self._share, self._engine_for = trainer, share, engine_for
        self._traffic = getattr(trainer.strategy, "traffic", None)

    def lead(self, handle: StepHandle | EvalHandle, work: Callable[[], Parts | None]) -> RolloutBatch | None:
        """Collective: this rank's part of what `work` returns. Rank 0 does `work`, which may call `outputs`; the others
        run the passes it asks for until it is done, and hear of its errors.

        Raises:
            BatchError: another rank than 0 holds the batch of `handle`.
        """
        if not self._trainer.is_global_zero and handle.batch is not None:
            raise BatchError(f"{handle} on rank {self._trainer.global_rank}: only rank 0 owns the stream of batches")
        if self._traffic is not None:
            return self._traffic.lead(work, self._run)
        return (work() or [None])[0]

    def cut(self, batch: RolloutBatch, tree: PrefixTree | None = None) -> Parts:
        """A batch as parts of similar predicted cost. `tree`: that of the batch, where it is at hand."""
        return [_pick(batch, own) for own in self._shares(batch, tree)]

    def outputs(self, batch: RolloutBatch, passes: Passes) -> dict[str, dict[str, Tensor]]:
        """Rank 0, while it leads: float32 [T] on the CPU by engine and output, 0 where not trained. The ranks compute
        a balanced share each; they are not sent what passes do not read."""
        seen = copy.copy(batch)
        seen.columns, seen.metadata = {}, [{}] * len(batch)
        seen.behavior_logprobs = torch.zeros((), dtype=torch.float32).expand(batch.num_tokens)
        seen.versions = torch.tensor(-1).expand(batch.num_tokens)
        shares = self._shares(seen)
        parts = [_pick(seen, own) for own in shares]
        if self._traffic is not None:
            answers = self._traffic.ask(passes, parts, self._run)
        else:
            answers = [self._run(passes, parts[0])]
        flat = torch.zeros(sum(map(len, passes.values())), batch.num_tokens, dtype=torch.float32)
        for own, answer in zip(shares, answers, strict=True):
            at = batch.flat_index(own)
            at = at[batch.loss_mask[at]]
            flat[:, at] = answer.view(len(flat), len(at))
        rows = iter(flat)
        return {engine: {name: next(rows) for name in want} for engine, want in passes.items()}

    def _run(self, passes: Passes, part: RolloutBatch | None) -> Tensor:
        """Float32 [outputs, M] on the CPU: of the M trained tokens of a part, in the order of `passes`."""
        if part is None:
            return torch.zeros(sum(map(len, passes.values())), 0, dtype=torch.float32)
        tree, rows = build_tree(part, self._share), []
        for name, want in passes.items():
            with self._engine_for(name) as engine:
                out = engine.forward(tree, want=want, temperatures=part.temperatures)
            columns = [out.flat(output) for output in want]
            rows += [column[part.loss_mask.to(column.device)].float().cpu() for column in columns]
        return torch.stack(rows)

    def _shares(self, batch: RolloutBatch, tree: PrefixTree | None = None) -> list[list[int]]:
        options = self._trainer.strategy.partition_options if self._traffic is not None else {}
        return rank_shares(batch, self._share, self._trainer.world_size, tree, **options)


def step_batch(batch: RolloutBatch, indices: list[int], columns: dict[str, Tensor]) -> RolloutBatch | None:
    """The sequences of an optimizer step with these columns ([T] of the whole batch) and no others; None for none."""
    seen = copy.copy(batch)
    seen.columns, seen.metadata = columns, [{}] * len(batch)
    return _pick(seen, indices)


def _pick(batch: RolloutBatch, indices: list[int]) -> RolloutBatch | None:
    """`indices` ascending."""
    if not indices:
        return None
    return batch if len(indices) == len(batch) else batch.select(indices)
