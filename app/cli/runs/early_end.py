"""Why a `fit` ended before the steps that were asked for: a run that a limit or a callback cut short is told from one
that is done.

Promises: one line, in the words of the options; "" for a run that made all its steps, and for one that is limited by
epochs alone and made these.
"""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer

_SIGNAL = " Signaling Trainer to stop."  # Lightning's


def why_early(trainer: Trainer) -> str:
    """Of a trainer whose `fit` came back without an error."""
    epochs, limit = trainer.max_epochs, trainer.max_steps
    if trainer.fast_dev_run or 0 <= limit <= trainer.global_step:
        return ""
    if trainer.should_stop:
        why = " ".join(filter(None, map(_why, trainer.callbacks))) or "a callback asked for it"
    elif epochs is not None and 0 <= epochs <= trainer.current_epoch:
        if limit < 0:
            return ""
        why = f"trainer.max_epochs ({epochs}) comes first"
    else:
        why = "there is nothing more to train on; look at trainer.limit_train_batches and the data"
    return f"ended early, after step {trainer.global_step}{f' of {limit}' if limit > 0 else ''}: {why}"


def _why(callback: Callback) -> str:
    if isinstance(callback, Timer):
        left = callback.time_remaining()
        return "trainer.max_time is over, earlier launches of the run counted" if left is not None and left <= 0 else ""
    if isinstance(callback, EarlyStopping):
        return f"EarlyStopping: {(callback.stopping_reason_message or '').removesuffix(_SIGNAL)}"
    return ""
