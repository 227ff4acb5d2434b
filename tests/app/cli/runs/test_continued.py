"""A run that goes on keeps its configuration and its best checkpoints, wherever its directory is by now."""

from __future__ import annotations

import copy
import inspect
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer

from app.cli import main
from app.cli.compare import _side
from app.cli.runs.continued import KeepOptions, cut_to, found_again
from tests.docs.test_readme import ROOT

CONFIG = ROOT / "configs" / "quickstart_sft.yaml"
SMALL = yaml.safe_load(CONFIG.read_text())["model"]["init_args"]["model"]["config"]
SMALL |= {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
SAVING = {  # it goes on with a smaller rate, so the best stays the one of the steps before
    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
    "init_args": {"monitor": "lr", "mode": "max", "every_n_train_steps": 1, "filename": "{step}", "save_last": True},
}
WAYS: dict[str, Callable[[Path], str]] = {
    "moved": lambda run: str(run.rename(run.with_name("moved"))),
    "copied": lambda run: str(shutil.copytree(run, run.with_name("copied"), symlinks=True)),
    "linked": lambda run: str(_link(run)),
    "by its absolute path": lambda run: str(run.absolute()),
}


def _link(run: Path) -> Path:
    run.with_name("linked").symlink_to(run.absolute(), target_is_directory=True)
    return run.with_name("linked")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The relative path of a run of two steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    set_up(SAVING)
    fit("--run_dir=run", "--trainer.max_steps=2")
    return Path("run")


def fit(*flags: str) -> None:
    main(["fit", "--config", str(CONFIG), "--config", "tiny.yaml", *flags])


def set_up(callback: dict[str, Any], **options: Any) -> None:
    """What `fit` runs: a tiny model with this callback, whose options are changed."""
    changed = callback | {"init_args": callback["init_args"] | options}
    overlay = {
        "model": {"init_args": {"model": {"config": SMALL}}},
        "data": {"init_args": {"batch_size": 8}},
        "trainer": {"accelerator": "cpu", "callbacks": [changed]},
    }
    Path("tiny.yaml").write_text(yaml.safe_dump(overlay))


def saved(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_found_elsewhere_knows_its_best_checkpoint(run: Path, way: str) -> None:
    best, last = saved(run)[::-1]
    assert last == "last.ckpt" and best in ("step=1.ckpt", "step=2.ckpt")
    there = WAYS[way](run)
    fit(f"--run_dir={there}", "--ckpt_path=last", "--trainer.max_steps=4", "--model.optimizer.lr=0.001")
    assert saved(Path(there)) == [last, best]


def test_a_run_has_one_last_checkpoint_whatever_its_name_and_time(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A callback that saves at other times knows no `last.ckpt` of its own, and writes another beside it."""
    set_up(SAVING, every_n_train_steps=2)
    fit("--run_dir=run", "--ckpt_path=last", "--trainer.max_steps=4")
    assert {"last.ckpt", "last-v1.ckpt"} < set(saved(run))
    os.utime(run / "checkpoints" / "last.ckpt")  # as in a copy
    capsys.readouterr()
    main(["export", "--ckpt", "run", "--out", "out"])
    assert "of run/checkpoints/last-v1.ckpt\n" in capsys.readouterr().out
    assert _side(run, "A").checkpoint == run / "checkpoints" / "last-v1.ckpt"
    fit("--run_dir=run", "--ckpt_path=last", "--trainer.max_steps=5")
    assert "goes on from step 4 of " in capsys.readouterr().err


def test_a_run_goes_on_with_the_patience_that_is_configured(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its count goes on: epochs of two steps, of whose rate none has been better than that of the first."""
    stopping = {
        "class_path": "lightning.pytorch.callbacks.EarlyStopping",
        "init_args": {"monitor": "lr", "check_on_train_epoch_end": True, "strict": False},  # a launch begins without it
    }
    set_up(stopping, patience=2)
    epochs = ["--run_dir=stopped", "--trainer.limit_train_batches=2"]
    fit(*epochs, "--trainer.max_steps=20")
    assert "ended early, after step 6 of 20: EarlyStopping" in capsys.readouterr().err
    set_up(stopping, patience=4)
    with pytest.warns(UserWarning, match="EarlyStopping: patience was 2 and is 4 from here on"):
        fit(*epochs, "--ckpt_path=last", "--trainer.max_steps=20")
    assert "ended early, after step 10 of 20: EarlyStopping" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_option_that_a_callback_loads_stays_as_configured() -> None:
    """Should a version of Lightning have another callback that loads one, `KeepOptions` has to know it."""
    kinds = [one for one in vars(lightning_callbacks).values() if isinstance(one, type) and issubclass(one, Callback)]
    loading = {one.__name__ for one in kinds if one.load_state_dict is not Callback.load_state_dict}
    assert loading == {
        *("EarlyStopping", "ModelCheckpoint", "BaseFinetuning", "BackboneFinetuning", "Timer"),  # counts
        "SpikeDetection",  # which cannot load what it saves
        *("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"),  # averages, and a rate's schedule
    }
    pairs = [
        (EarlyStopping("lr", patience=1), EarlyStopping("lr", patience=9)),
        (ModelCheckpoint("a", monitor="lr"), ModelCheckpoint("b", monitor="lr", save_top_k=3, save_last=True)),
        (Timer("00:00:01:00"), Timer("00:00:02:00")),
    ]
    for before, now in pairs:
        named = inspect.signature(type(now)).parameters
        configured = {key: value for key, value in vars(now).items() if key.removeprefix("_") in named}
        assert configured
        loaded: dict[str, Any] = {"callbacks": {now.state_key: before.state_dict()}}
        KeepOptions().on_load_checkpoint(Trainer(logger=False, callbacks=[now]), LightningModule(), loaded)
        now.load_state_dict(copy.deepcopy(loaded["callbacks"][now.state_key]))
        assert {key: vars(now)[key] for key in configured} == configured


@pytest.mark.parametrize(
    ("before", "steps", "now", "left"),
    [
        (3, 4, 1, ["step=3.ckpt", "step=4.ckpt", "step=6.ckpt"]),  # of 2, 3 and 4 the first made room for 6
        (3, 3, 2, ["step=5.ckpt", "step=6.ckpt"]),  # there were never as many as it kept
    ],
)
def test_as_many_of_the_best_are_kept_as_is_configured(
    run: Path, before: int, steps: int, now: int, left: list[str]
) -> None:
    """It goes on with a larger rate, which is known after a launch's second step. What was surplus stays, and is told."""
    set_up(SAVING, save_top_k=before)
    fit("--run_dir=other", f"--trainer.max_steps={steps}")
    set_up(SAVING, save_top_k=now)
    fit("--run_dir=other", "--ckpt_path=last", "--trainer.max_steps=7", "--model.optimizer.lr=0.004")
    assert saved(Path("other")) == ["last.ckpt", *left]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_that_are_kept_are_the_best(mode: str) -> None:
    saving = ModelCheckpoint(dirpath="here", monitor="reward", mode=mode, save_top_k=2)
    sign = 1 if mode == "max" else -1
    scores = {f"{saving.dirpath}/step={step}.ckpt": torch.tensor(sign * float(score)) for step, score in enumerate("3142")}
    paths = list(scores)
    state = {**saving.state_dict(), "best_k_models": scores, "kth_best_model_path": paths[1], "kth_value": scores[paths[1]]}
    with pytest.warns(UserWarning, match=r"save_top_k is 2, and 4 best .* in \S+here: step=3\.ckpt, step=1\.ckpt will stay"):
        cut = cut_to(saving, state)
    kept = {path: scores[path] for path in (paths[2], paths[0])}
    assert cut == {**state, "best_k_models": kept, "kth_best_model_path": paths[0], "kth_value": scores[paths[0]]}
    for most in (-1, 0, 5):
        saving.save_top_k = most
        assert cut_to(saving, state) == state
    saving.save_top_k, elsewhere = 2, {**state, "dirpath": "/elsewhere"}
    assert cut_to(saving, elsewhere) == elsewhere


def test_a_launch_that_is_refused_leaves_configuration_and_metrics(run: Path) -> None:
    kept = ("config.yaml", "hparams.yaml", "metrics.csv")
    before = [(run / name).read_bytes() for name in kept]
    for refused in ("--model.optimizer=torch.optim.SGD", "--trainer.max_steps=1"):
        with pytest.raises(SystemExit):
            fit("--run_dir=run", "--ckpt_path=last", "--trainer.max_steps=4", "--data.batch_size=4", refused)
        assert [(run / name).read_bytes() for name in kept] == before and not list(run.glob("metrics_*.csv"))
    fit("--run_dir=run", "--ckpt_path=last", "--trainer.max_steps=3", "--model.optimizer.lr=0.5")
    assert (run / "metrics_1.csv").read_bytes() == before[2] and "0.5" in (run / "hparams.yaml").read_text()
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.5
    assert not list(run.glob("*.part"))


class CutShort(Callback):
    """Stands for a long validation at the start of training, which is interrupted."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise ValueError("cut short")


def test_what_is_cut_short_at_the_start_of_training_has_its_configuration(run: Path) -> None:
    with pytest.raises(ValueError, match="cut short"):
        fit("--run_dir=other", "--trainer.max_steps=2", f"--trainer.callbacks+={__name__}.CutShort")
    assert Path("other/config.yaml").exists()


def test_of_checkpoints_that_are_not_there_nothing_is_known(tmp_path: Path) -> None:
    """One that was copied by hand into another run's directory, without the best ones beside it."""
    (tmp_path / "last.ckpt").mkdir()
    there = {"dirpath": "/elsewhere", "best_model_path": "/elsewhere/step=1.ckpt", "best_k_models": {}}
    assert found_again(there, tmp_path, tmp_path / "last.ckpt") == there
    (tmp_path / "step=1.ckpt").mkdir()
    found = found_again(there, tmp_path, tmp_path / "last.ckpt")
    assert found["best_model_path"] == str(tmp_path / "step=1.ckpt") and found["dirpath"] == tmp_path
    assert found_again(there, tmp_path / "other", tmp_path / "last.ckpt") == there
