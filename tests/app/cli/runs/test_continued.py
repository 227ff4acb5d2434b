"""What a run keeps that goes on: its configuration whoever fails at the start, and its best checkpoints elsewhere."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from app.cli import main
from app.cli.runs.continued import found_again
from tests.app.cli.test_cli import CONFIG



@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    (tmp_path / "toy.yaml").write_text(CONFIG)


class Validates(Callback):
    """Stands for a long validation at the start of training, which is cut short."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise ValueError("cut short")


class Refuses(Callback):
    """Stands for a checkpoint that does not fit."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        raise ValueError("refused")


def test_what_is_cut_short_at_the_start_of_training_has_its_configuration() -> None:
    with pytest.raises(ValueError, match="cut short"):
        main(["fit", "--config", "toy.yaml", "--run_dir", "here", f"--trainer.callbacks=[{__name__}.Validates]"])
    assert Path("here/config.yaml").exists()


def test_a_refused_launch_leaves_the_configuration() -> None:
    main(["fit", "--config", "toy.yaml", "--run_dir", "here"])
    before = Path("here/config.yaml").read_bytes()
    again = ["--ckpt_path=last", "--trainer.max_epochs=2", f"--trainer.callbacks=[{__name__}.Refuses]"]
    with pytest.raises(ValueError, match="refused"):
        main(["fit", "--config", "toy.yaml", "--run_dir", "here", *again])
    assert Path("here/config.yaml").read_bytes() == before and not list(Path("here").glob("*.part"))


def test_a_moved_run_goes_on_with_its_best() -> None:
    before, now = Path("a/checkpoints").absolute(), Path("b/checkpoints").absolute()
    now.mkdir(parents=True)
    for name in ("step=1.ckpt", "last.ckpt"):
        (now / name).touch()
    state = {
        "dirpath": str(before),
        "best_model_path": str(before / "step=1.ckpt"),
        "kth_best_model_path": str(before / "step=1.ckpt"),
        "kth_value": torch.tensor(1.0),
        "best_k_models": {str(before / "step=1.ckpt"): torch.tensor(1.0)},
        "last_model_path": str(before / "last.ckpt"),
    }
    told = found_again(state, now, now / "last.ckpt")
    assert str(told["dirpath"]) == str(now) and list(told["best_k_models"]) == [str(now / "step=1.ckpt")]
    assert told["last_model_path"] == str(now / "last.ckpt")
    assert found_again(state, now, Path("elsewhere/last.ckpt")) == state  # another run's: begins a list of its own
    shutil.rmtree(now)
    assert found_again(state, now, now / "last.ckpt") == state
