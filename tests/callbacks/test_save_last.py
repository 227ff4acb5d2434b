"""`SaveLast`: by time, at the end, and in every run that does not say otherwise."""

from __future__ import annotations

import shutil
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.save_last import SaveLast, saves_last
from tests.helpers.tiny_run import TinyData, TinyModule, trainer

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").rglob("*.yaml"))


class _Counting(SaveLast):
    """Remembers the steps it saved at."""

    def __init__(self, minutes: float) -> None:
        super().__init__(minutes)
        self.steps: list[int] = []

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:  # type: ignore[no-untyped-def]
        self.steps.append(checkpoint["global_step"])


@pytest.mark.parametrize(("minutes", "steps"), [(1e-9, [1, 2, 3, 4]), (60.0, [4])])
def test_saves_by_time_and_once_at_the_end(tmp_path: Path, minutes: float, steps: list[int]) -> None:
    saving = _Counting(minutes)
    fit = trainer(tmp_path, saving, enable_checkpointing=True, max_epochs=2)
    fit.fit(TinyModule(), datamodule=TinyData(batches=2, validate=False))
    assert saving.steps == steps
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]


def test_a_disk_without_room_is_told_after_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the system says how much is free, here: a byte less than Adam's two averages and the weight take."""
    module = TinyModule()
    needs = 3 * module.policy.weight.nbytes + 4  # and the count of steps
    monkeypatch.setattr(module, "configure_optimizers", lambda: torch.optim.Adam(module.parameters()))
    for free, told in ((needs - 1, 1), (needs, 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(10**9, 0, free))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit = trainer(tmp_path / str(free), SaveLast(), enable_checkpointing=True, max_epochs=1)
            fit.fit(module, datamodule=TinyData(batches=2, validate=False))
        said = [str(one.message) for one in caught if "a checkpoint takes at least" in str(one.message)]
        assert len(said) == told and all("choose another run_dir" in one for one in said)


def test_whoever_saves_last_is_left_alone() -> None:
    assert all(map(saves_last, (SaveLast(), ModelCheckpoint(save_last=True))))
    assert not saves_last(ModelCheckpoint(monitor="val/accuracy"))
    assert not saves_last(ModelCheckpoint(train_time_interval=timedelta(minutes=1)))  # leaves none to go on from


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_shipped_configuration_keeps_it_out(path: Path) -> None:
    trainer = yaml.safe_load(path.read_text()).get("trainer") or {}
    assert trainer.get("enable_checkpointing", True) is True
