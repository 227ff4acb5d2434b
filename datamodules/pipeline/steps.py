"""`StepLoader`: the batches of a datamodule as what Lightning trains on, one item an optimizer step.

Promises: an iteration goes on with the step after the last one that was done, wherever the one before it ended: with an
epoch that was cut off in the middle of a batch, with the run, or with an error in a step. So epochs may end anywhere,
and a checkpoint may be written after any step.

Every piece of the batch under way has one owner. The module: how far it is (`policy_version`, which rises with the last
step of a batch, and `steps_done` of it) and what was prepared of it (`modules/step.py`). The datamodule: its
sequences, and the policy's version when it was handed out; while the policy is at that version, it is under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from app.batch import RolloutBatch, StepHandle


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
            batch = stream.hand_out(version)
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


class Position:
    """Where a stream of numbered batches is.

    A state holds the number of the next batch, or of the batch under way and then also the version it is of.
    """

    def __init__(self) -> None:
        self._number = 0
        self._version: int | None = None  # of the policy that batch `_number` was handed out to

    def is_under_way(self, version: int) -> bool:
        """See `BatchStream`."""
        return version == self._version

    def hand_out(self, version: int) -> int:
        """The number, from 0, of the batch under way, else of the next one."""
        self._number, self._version = self._next(version), version
        return self._number

    def state_dict(self, version: int) -> dict[str, int]:
        state = {"position": self._next(version)}
        return {**state, "version": version} if self.is_under_way(version) else state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._number, self._version = state["position"], state.get("version")

    def _next(self, version: int) -> int:
        return self._number + (self._version is not None and not self.is_under_way(version))
