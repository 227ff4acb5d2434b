"""What a run keeps that goes on: its configuration, and which of its checkpoints are the best.

Promises: `config.yaml` is written when training begins, in one piece, so that a launch that is refused before leaves the
one by which the run goes on; a run directory that was moved, copied, linked or named by another path is the same run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.trainer.states import TrainerFn

from app.cli.runs import run_directory


class SavedConfig(SaveConfigCallback):
    """`config.yaml`: of a fit when its training begins, of other commands at once. In a run directory there is one of a
    launch before, and the last counts."""

    already_saved: bool

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self._save(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        directory = trainer.log_dir  # which all ranks agree on
        if not trainer.is_global_zero or directory is None or self.already_saved:
            return
        path = Path(directory) / self.config_filename
        begun = path.with_name(f"{path.name}.part")
        with run_directory.naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.parser.save(self.config, str(begun), skip_none=False, overwrite=True, multifile=self.multifile)
            begun.replace(path)
        self.already_saved = True


class KeepBest(Callback):
    """Before a fit goes on: what `ModelCheckpoint`s know of checkpoints in the directory that they write to, by the
    paths that these have now. Lightning forgets all of it where the path reads otherwise, and with it what is best."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        states = checkpoint.get("callbacks", {})
        for callback in trainer.checkpoint_callbacks:
            state = states.get(callback.state_key)
            if isinstance(callback, ModelCheckpoint) and state is not None and trainer.ckpt_path is not None:
                states[callback.state_key] = found_again(state, callback.dirpath, Path(trainer.ckpt_path))


def found_again(state: Mapping[str, Any], directory: str | os.PathLike[str] | None, start: Path) -> dict[str, Any]:
    """The state of a `ModelCheckpoint` that writes to `directory`, by paths in there, where the checkpoint `start`, which
    has it, lies in there too and its best one still does; else as it is."""
    before = state.get("dirpath")
    if directory is None or before is None or str(before) == str(directory):
        return {**state}
    here = Path(directory)
    if not any(above.exists() and here.exists() and above.samefile(here) for above in start.absolute().parents):
        return {**state}

    def moved(path: str) -> str:
        return str(here / os.path.relpath(path, before)) if path else path

    if (best := moved(state["best_model_path"])) and not Path(best).exists():
        return {**state}
    kept = {moved(path): score for path, score in state.get("best_k_models", {}).items()}
    named = {name: moved(state.get(name, "")) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
    best_k = {path: score for path, score in kept.items() if Path(path).exists()}
    return {**state, **named, "best_k_models": best_k, "dirpath": directory}
