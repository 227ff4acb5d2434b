"""The batches of a datamodule as what Lightning iterates over: `StepLoader` to train, one item an optimizer step;
`PredictLoader` and `EvalLoader` to roll out without training.

Promises: every loader has a length (Lightning reads one without length a batch ahead, which would deadlock at
`max_staleness: 0`); ranks other than 0 get handles without a batch, as many of them. A `StepLoader` goes on with the
step after the last one that was done, wherever the iteration before it ended: with an epoch that was cut off in the
middle of a batch, with the run, or with an error in a step. So epochs may end anywhere, and a checkpoint may be written
after any step. What goes wrong with a batch while it is waited for, where the weights are those of a whole step, ends
the run once these are saved (`app.interruption.put_off`): until then rank 0 has a handle without a batch, too.

Every piece of the batch under way has one owner. The module: how far it is (`policy_version`, which rises with the last
step of a batch, and `steps_done` of it) and what was prepared of it (`modules/step.py`). The datamodule: its
sequences, and the policy's version when it was handed out; while the policy is at that version, it is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from app import interruption
from app.batch import EvalHandle, RolloutBatch, StepHandle
from datamodules.groups import Group, to_batch
from datamodules.pipeline.validation import ValSet

Played = tuple[list[Group], int]
"""Held-out episodes, and how many prompts they were asked of: not of those that are skipped."""


class BatchStream(Protocol):
    """What a `StepLoader` reads, on every rank; the module has `steps_per_batch`, `policy_version`, `steps_done`."""

    batches_per_epoch: int
    trainer: Any

    def is_under_way(self, version: int) -> bool:
        """Whether the batch handed out last was handed out to the policy of `version`, whose training it is."""

    def hand_out(self, version: int) -> RolloutBatch | None:
        """The batch under way, else the next one, which is that of `version` from now on; None on ranks but 0."""


class StepLoader:
    """`batches_per_epoch` batches of a stream, each as often as the module takes steps on it."""

    def __init__(self, stream: BatchStream) -> None:
        self._stream = stream

    def __len__(self) -> int:
        steps: int = self._module().steps_per_batch
        return self._stream.batches_per_epoch * steps

    def __iter__(self) -> Iterator[StepHandle]:
        stream, module = self._stream, self._module()
        left, count = len(self), module.steps_per_batch
        while left > 0:
            version = module.policy_version
            first = module.steps_done if stream.is_under_way(version) else 0
            batch = _unless_it_fails(stream.hand_out, version)
            for index in range(first, min(count, first + left)):
                yield StepHandle(batch, index, count)
                left -= 1
            if left > 0 and module.policy_version == version:
                raise RuntimeError(
                    f"policy_version: still {version} after all {count} steps of a batch; the module must raise it"
                    " with the last step of a batch, or its batches never change"
                )

    def _module(self) -> Any:
        return self._stream.trainer.lightning_module


class PredictLoader:
    """Handles on a stream's next batches, for a run that rolls out and does not train.

    Args:
        count: batches.
        collect: the next batch's groups; none on other ranks than 0.
        discard: called when such a batch is done with.
    """

    def __init__(self, count: int, collect: Callable[[], list[Group]], discard: Callable[[], None]) -> None:
        self._count = count
        self._collect = collect
        self._discard = discard

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[StepHandle]:
        for _ in range(self._count):
            groups = self._collect()
            yield StepHandle(to_batch(groups) if groups else None, 0, 1)
            if groups:
                self._discard()


class EvalLoader:
    """Handles on rolled-out prompts of one validation set, `batch_size` prompts each.

    Args:
        prompts: the set.
        batch_size: prompts rolled out at a time.
        evaluate: plays the set's prompts from the first to before the last; none on other ranks than 0.
    """

    def __init__(self, prompts: ValSet, batch_size: int, evaluate: Callable[[ValSet, int, int], Played]) -> None:
        self._set = prompts
        self._batch_size = batch_size
        self._evaluate = evaluate

    def __len__(self) -> int:
        return -(-self._set.size // self._batch_size)

    def __iter__(self) -> Iterator[EvalHandle]:
        one = self._set
        for first in range(0, one.size, self._batch_size):
            last = min(first + self._batch_size, one.size)
            groups, asked = _unless_it_fails(self._evaluate, one, first, last) or ([], 0)
            batch = to_batch(groups) if groups else None
            yield EvalHandle(batch, one.name, one.prefix, one.samples, one.ks, one.solved_at, asked)


_T = TypeVar("_T")


def _unless_it_fails(get: Callable[..., _T], *args: Any) -> _T | None:
    """What `get` returns; None where the run ends, once it is saved, with what it raises or with an earlier error."""
    if interruption.failure() is not None:
        return None
    try:
        return get(*args)
    except Exception as error:
        if not interruption.put_off(error):
            raise
        return None


class Position:
    """Where a stream of numbered examples is, which are handed out in batches.

    A state holds how many examples come before the next batch, or before the one under way, of which it also holds how
    many it has and the version it is of. So batches may have another size where a run goes on: that one stays as it is,
    and the next begins behind it.

    Args:
        end: of the batch that begins with an example: the number of the first example behind it.
    """

    def __init__(self, end: Callable[[int], int]) -> None:
        self._end = end
        self._batch = range(0)  # its examples' numbers, from 0, of the one handed out last
        self._version: int | None = None  # of the policy that it was handed out to

    def is_under_way(self, version: int) -> bool:
        """See `BatchStream`."""
        return version == self._version

    def hand_out(self, version: int) -> range:
        """The examples of the batch under way, else of the next one."""
        if not self.is_under_way(version):
            first = self._batch.stop
            self._batch, self._version = range(first, self._end(first)), version
        return self._batch

    def state_dict(self, version: int) -> dict[str, int]:
        if self.is_under_way(version):
            return {"dealt": self._batch.start, "under_way": len(self._batch), "version": version}
        return {"dealt": self._batch.stop}

    def load_state_dict(self, state: Mapping[str, Any], begin: Callable[[int], int]) -> None:
        """`begin`: the first example of a batch of the run that made the state, by its number. States of older versions
        have the number of the batch under way, or of the next one."""
        under_way = "version" in state
        if "dealt" in state:
            first, last = state["dealt"], state["dealt"] + state.get("under_way", 0)
        else:
            number = state["position"]
            first, last = begin(number), begin(number + under_way)
        self._batch, self._version = range(first, last), state.get("version")
