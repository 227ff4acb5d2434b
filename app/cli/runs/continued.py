"""What a run keeps that goes on: its configuration, the options that it was given, and which of its checkpoints are the
best.

Promises: `config.yaml` is written when training begins, in one piece, so that a launch that is refused before leaves the
one by which the run goes on; a run directory that was moved, copied, linked or named by another path is the same run;
options of callbacks are as configured, whatever a checkpoint remembers of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from app.cli.runs import run_directory

_NAMED = 5  # files in a line


class SavedConfig(SaveConfigCallback):
    """`config.yaml`: of a fit when its training begins, of other commands at once. In a run directory there is one of a
    launch before, and the last counts."""

    _written = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self._save(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        directory = trainer.log_dir  # which all ranks agree on
        if not trainer.is_global_zero or directory is None or self._written:
            return
        path = Path(directory) / self.config_filename
        begun = path.with_name(f"{path.name}.part")
        with run_directory.naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.parser.save(self.config, str(begun), skip_none=False, overwrite=True, multifile=self.multifile)
            begun.replace(path)
        self._written = True


class KeepOptions(Callback):
    """Before a fit goes on: `EarlyStopping.patience` stays as configured, which Lightning loads with what was counted so
    far; of its callbacks that can go on no other loads an option. A change is told."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        states = checkpoint.get("callbacks", {})
        for callback in trainer.callbacks:
            state = states.get(callback.state_key) or {}
            if isinstance(callback, EarlyStopping) and state.get("patience", callback.patience) != callback.patience:
                states[callback.state_key] = {**state, "patience": callback.patience}
                rank_zero_warn(
                    f"{type(callback).__name__}: patience was {state['patience']} and is {callback.patience} from here on"
                )


class KeepBest(Callback):
    """Before a fit goes on: what `ModelCheckpoint`s know of checkpoints in the directory that they write to, by the
    paths that these have now, and of no more than they keep (`save_top_k`). Lightning forgets all of it where the path
    reads otherwise, and with it what is best; and where it knows of more than it keeps it deletes none from then on."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        states = checkpoint.get("callbacks", {})
        for callback in trainer.checkpoint_callbacks:
            state = states.get(callback.state_key)
            if isinstance(callback, ModelCheckpoint) and state is not None and trainer.ckpt_path is not None:
                found = found_again(state, callback.dirpath, Path(trainer.ckpt_path))
                states[callback.state_key] = cut_to(callback, found)


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
        return os.path.join(directory, os.path.relpath(path, before)) if path else path  # as Lightning joins them

    if (best := moved(state["best_model_path"])) and not Path(best).exists():
        return {**state}
    kept = {moved(path): score for path, score in state.get("best_k_models", {}).items()}
    named = {name: moved(state.get(name, "")) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
    best_k = {path: score for path, score in kept.items() if Path(path).exists()}
    return {**state, **named, "best_k_models": best_k, "dirpath": directory}


def cut_to(callback: ModelCheckpoint, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with the best checkpoints that `callback` keeps by its `save_top_k`. The others stay on the disk, where
    the user may want them, and are told."""
    best, most = state.get("best_k_models", {}), callback.save_top_k
    if most < 1 or len(best) < most or state.get("dirpath") != callback.dirpath:  # Lightning loads none of another's
        return {**state}
    ranked = sorted(best, key=lambda path: float(best[path]), reverse=callback.mode == "max")
    kept, surplus = ranked[:most], ranked[most:]
    if surplus:
        named = ", ".join(os.path.relpath(path, callback.dirpath) for path in surplus[:_NAMED])
        more = f" and {len(surplus) - _NAMED} more" if len(surplus) > _NAMED else ""
        rank_zero_warn(
            f"{type(callback).__name__}.save_top_k is {most}, and {len(best)} best checkpoints are in {callback.dirpath}:"
            f" {named}{more} will stay there; delete what you no longer want"
        )
    # Lightning looks at the worst one when there are as many as it keeps, which may not have been so before.
    worst = {"kth_best_model_path": kept[-1], "kth_value": best[kept[-1]]}
    return {**state, **worst, "best_k_models": {path: best[path] for path in kept}}
