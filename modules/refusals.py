"""What a `TreeModule` refuses before any training: options without effect, and Trainer settings it cannot honour.

Promises: every error is a ValueError that names the key and the remedy.
"""

from __future__ import annotations

from typing import Any

from modules.engine_check import SELF_CHECKS

TREE_TRAINING_MODES = ("disabled", "sparse", "dta")


def refuse_options(tree_training_mode: str, chunk_tokens: Any, self_check: str) -> None:
    """Options of the module itself."""
    if self_check not in SELF_CHECKS:
        raise ValueError(f"self_check: {self_check!r} is not one of {', '.join(SELF_CHECKS)}")
    if tree_training_mode not in TREE_TRAINING_MODES:
        raise ValueError(f"tree_training_mode: '{tree_training_mode}' is not one of {', '.join(TREE_TRAINING_MODES)}")
    if chunk_tokens != "auto" and tree_training_mode != "dta":
        raise ValueError(
            f"chunk_tokens={chunk_tokens} has no effect with tree_training_mode={tree_training_mode}, whose chunks"
            " are as large as live_tokens: set live_tokens, or tree_training_mode=dta"
        )


def refuse_trainer(trainer: Any, stage: str, sums_gradients: bool) -> None:
    """Settings of the Trainer. `sums_gradients`: whether its strategy adds up the gradients of all ranks."""
    if not sums_gradients and trainer.world_size > 1:
        raise ValueError(
            f"trainer.strategy: {type(trainer.strategy).__name__} on {trainer.world_size} processes does not sum"
            " gradients as tree training needs: set trainer.strategy to app.strategies.DTAStrategy"
        )
    if stage == "fit" and trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: losses are already divided by the"
            " count of a whole optimizer step; set it to 1 and raise the data's batch_size instead"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            f"trainer.precision={trainer.precision}: the tree pass does not scale losses, which float16 needs;"
            " use bf16-mixed, bf16-true or 32-true"
        )
