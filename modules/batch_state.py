"""A rollout batch under way, as checkpoints hold it: how far it is, and what was prepared at its start.

Promises: with it a run goes on with the next step of the batch as if it had not stopped: columns (log-probabilities at
the start of the batch, reference, values, advantages) are taken back, never computed again with weights that have moved
meanwhile; they are never joined to another batch, nor to other minibatches, than they were prepared for. The sequences
are the datamodule's (`datamodules/pipeline/steps.py` says who owns what). Tensors and primitives only.
"""

from __future__ import annotations

import hashlib
from typing import Any

from app.batch import BatchError, RolloutBatch

State = dict[str, Any]


def pack(batch: RolloutBatch | None, steps_done: int, plan: dict[str, int]) -> State:
    """The state of a batch of which `steps_done` steps are done.

    Args:
        batch: None on ranks that do not hold it.
        plan: what its division into steps depends on besides the batch, by option.
    """
    state: State = {"steps_done": steps_done, "plan": dict(plan)}
    if batch is not None:
        state |= {"digest": _digest(batch), "columns": dict(batch.columns)}
    return state


def check_plan(state: State, plan: dict[str, int]) -> None:
    """Raises ValueError when the batch of `state` was divided into other steps than `plan` would."""
    changed = [name for name, value in plan.items() if state["plan"].get(name) != value]
    if changed:
        before = ", ".join(f"{name}={state['plan'].get(name)}" for name in changed)
        now = ", ".join(f"{name}={plan[name]}" for name in changed)
        raise ValueError(
            "ckpt_path: the checkpoint is in the middle of a rollout batch, of which"
            f" {state['steps_done']} steps were done with {before}, and this run has {now}: go on with {before}, or"
            " from a checkpoint written at the end of a batch"
        )


def take_up(offered: RolloutBatch, held: RolloutBatch | None, state: State | None) -> RolloutBatch:
    """The batch that a datamodule offers again, with the columns it had.

    Args:
        offered: as the datamodule hands it out. held: the batch under way in memory, or `state`: in a checkpoint.

    Raises:
        BatchError: no step of a batch was done here, or of another one.
    """
    if held is offered:
        return held
    if held is not None:
        state = pack(held, 0, {})
    if state is None or "digest" not in state:
        raise BatchError(
            "StepHandle.index: a later step of a batch whose first step was not done here, nor in the run that the"
            " checkpoint is of: a loader begins a batch at index 0"
        )
    if state["digest"] != _digest(offered):
        raise BatchError(
            "StepHandle.batch: the datamodule offers another batch than the one that is under way, whose columns were"
            " prepared already: go on with the data the checkpoint was written with, or from a checkpoint written at"
            " the end of a batch"
        )
    for name, column in state["columns"].items():
        offered.add_column(name, column)
    return offered


def _digest(batch: RolloutBatch) -> str:
    found = hashlib.sha256()
    for tensor in (batch.tokens, batch.cu_seqlens, batch.rewards):
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()
