"""Writes the trained policy as a Hugging Face directory when training ends.

Promises: the directory loads with `AutoModelForCausalLM.from_pretrained` (and `AutoTokenizer`, when the
datamodule has a tokenizer), on this project's `model: {path: ...}` and on inference servers alike.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from transformers import AutoTokenizer

from callbacks.base import run_dir


class SavePretrained(Callback):
    """Saves `module.policy` and `datamodule.tokenizer` at the end of `fit`.

    Args:
        dirpath: where; relative paths are below the run directory.
    """

    def __init__(self, dirpath: str = "model") -> None:
        self.dirpath = dirpath

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        target = run_dir(trainer) / self.dirpath
        if trainer.is_global_zero:
            policy: Any = pl_module.policy
            policy.save_pretrained(target)
            tokenizer: Any = getattr(trainer.datamodule, "tokenizer", None)
            if isinstance(tokenizer, str):  # recorded text names the directory
                tokenizer = AutoTokenizer.from_pretrained(tokenizer)
            if tokenizer is not None:
                tokenizer.save_pretrained(target)
        trainer.strategy.barrier("SavePretrained")  # no rank reads or leaves before the files are complete
