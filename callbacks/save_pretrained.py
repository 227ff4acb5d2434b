"""Writes the trained policy as a Hugging Face directory when training ends.

Promises: it is written after the last step, also where a signal, or rollouts that fail, end the run before its last
validation does; the directory loads with `AutoModelForCausalLM.from_pretrained`, or what a `RewardModule` trained with
`AutoModelForSequenceClassification.from_pretrained`, or a model that sees with `AutoModelForImageTextToText` and its
image processor (and `AutoTokenizer`, when the datamodule has a tokenizer, or the model that the run began with), on
this project's `model: {path: ...}` and on inference servers alike. Adapters are written as PEFT has them, for
`model: {path: ..., adapter: ...}`, unless they are to be merged: into what weights in 4 bit stand for, where they are.
Of a model in shards rank 0 holds no more than a file.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_warn
from transformers import AutoTokenizer

from app.hub import check_reachable
from app.interruption import end_of
from app.text import reason
from callbacks.base import comes_in_parts, policy_in_parts, run_dir
from datamodules.inference.weight_files import save_adapter, save_model

_log = logging.getLogger(__name__)


class SavePretrained(Callback):
    """Saves `module.policy` and its tokenizer at the end of `fit`.

    Args:
        dirpath: where; relative paths are below the run directory.
        merge: write a policy with adapters as one model without, which servers load.
        artifact: the name under which W&B keeps the directory too, as an artifact of type "model"; None: it does not.

    Raises:
        ValueError: (as `fit` begins) `artifact` without a WandbLogger among the trainer's loggers; a callback behind
            it that averages weights as training ends.
    """

    def __init__(self, dirpath: str = "model", merge: bool = False, artifact: str | None = None) -> None:
        self.dirpath = dirpath
        self.merge = merge
        self.artifact = artifact
        self._saved = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._saved = False
        if stage != "fit":
            return
        later = trainer.callbacks[trainer.callbacks.index(self) :]
        if averages := next((type(one).__name__ for one in later if isinstance(one, WeightAveraging)), None):
            raise ValueError(
                f"trainer.callbacks: SavePretrained stands before {averages}, whose average is there when training has"
                " ended, and would save the last step's weights; name it behind"
            )
        if self.artifact is not None and not any(isinstance(one, WandbLogger) for one in trainer.loggers):
            raise ValueError(
                f"SavePretrained.artifact: {self.artifact} is for Weights & Biases; add"
                " lightning.pytorch.loggers.WandbLogger to trainer.logger, or leave artifact out"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module)
        trainer.strategy.barrier("SavePretrained")  # no rank reads or leaves before the files are complete
        self._saved = True

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        target = run_dir(trainer) / self.dirpath
        adapter = hasattr(pl_module.policy, "peft_config") and not self.merge
        policy: Any = pl_module.policy
        parts = None
        if comes_in_parts(policy) and not adapter:
            policy, parts = policy_in_parts(policy, trainer.is_global_zero)
        if trainer.is_global_zero:
            if adapter:
                save_adapter(policy, target)
            else:
                save_model(policy, target, None if parts is None else parts.saved())
            tokenizer = _tokenizer(trainer, pl_module)
            if tokenizer is not None:
                tokenizer.save_pretrained(target)
            images = getattr(trainer.datamodule, "image_processor", None)
            if images is not None:
                images.processor.save_pretrained(target)
            if self.artifact is not None:
                _keep_in_wandb(self.artifact, target, trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Of a run that has made its last step nothing is left to go on with, which would come to `on_train_end`.
        end = end_of(exception)
        if end is not None and end.finished and not self._saved:
            try:
                self._write(trainer, pl_module)
            except Exception as error:  # raised here it would keep the strategy from ending what it is writing
                rank_zero_warn(
                    f"SavePretrained: {run_dir(trainer) / self.dirpath} is not written: {reason(error)}; `arborist"
                    f" export --ckpt {end.checkpoint} --out DIR` writes it"
                )
            trainer.strategy.barrier("SavePretrained")


def _keep_in_wandb(name: str, directory: Path, trainer: Trainer) -> None:
    import wandb

    made = wandb.Artifact(name, type="model", metadata={"step": trainer.global_step})
    made.add_dir(str(directory))
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.log_artifact(made)


def _tokenizer(trainer: Trainer, module: LightningModule) -> Any:
    """The datamodule's, or, as recorded tokens need none, that of the model it began with; None where there is none."""
    found = getattr(trainer.datamodule, "tokenizer", None)
    source = getattr(getattr(module, "model_source", None), "path", None)
    if found is not None or source is None:
        return found
    try:
        check_reachable(source, "tokenizer_config.json")
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        _log.warning("SavePretrained: no tokenizer beside the weights, as %s has none: %s", source, error)
        return None
