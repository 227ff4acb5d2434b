"""Loggers beside metrics.csv, with their real packages and files: what a run logs arrives; W&B goes on with a run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from transformers import AutoModelForCausalLM

from app.cli import main
from tests.fuzz.test_configurations import ROLLED_OUT, base


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    yield
    wandb.finish()  # or the next test's logger would go on with this run


def fit(logger: dict[str, Any], *options: str, **trainer: Any) -> Path:
    """Two steps of a tiny model that rolls out."""
    config = base(ROLLED_OUT)
    config["trainer"] = {**config["trainer"], "logger": {**logger}, **trainer}
    Path("toy.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "toy.yaml", "--run_dir", "run", *options])
    assert Path("run/metrics.csv").exists()
    return Path("run")


def test_tensorboard() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        pytest.importorskip("tensorboardX", reason="TensorBoardLogger needs tensorboard or tensorboardX")
    fit({"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": "board"}})
    (events,) = Path("board").rglob("events.out.tfevents.*")
    written = events.read_bytes()
    assert all(name in written for name in (b"rollouts/reward", b"time/step", b"samples/train"))


def test_mlflow() -> None:
    pytest.importorskip("mlflow", reason="MLFlowLogger needs mlflow or mlflow-skinny")
    fit({"class_path": "lightning.pytorch.loggers.MLFlowLogger", "init_args": {"tracking_uri": "file:./mlruns"}})
    (metric,) = Path("mlruns").rglob("metrics/time/step")
    assert len(metric.read_text().splitlines()) == 2


def test_a_run_that_goes_on_is_one_run_of_wandb() -> None:
    logger = {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"project": "toy", "offline": True}}
    run = fit(logger, enable_checkpointing=True)
    name = (run / "wandb_id").read_text().strip()
    wandb.finish()
    main(["fit", "--config", "run/config.yaml", "--run_dir", "run", "--ckpt_path", "last", "--trainer.max_steps", "3"])
    assert (run / "wandb_id").read_text().strip() == name
    # two launches in one second are one directory of W&B's
    assert {path.name.rsplit("-", 1)[1] for path in Path("wandb").glob("offline-run-*")} == {name}
    wandb.finish()
    main(["fit", "--config", "run/config.yaml", "--run_dir", "other"])
    assert Path("other/wandb_id").read_text().strip() != name


def test_an_exported_model_is_an_artifact_of_wandb() -> None:
    logger = {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"project": "toy", "offline": True}}
    save = {"class_path": "callbacks.SavePretrained", "init_args": {"artifact": "toy-model"}}
    run = fit(logger, callbacks=[save])
    wandb.finish()
    AutoModelForCausalLM.from_pretrained(run / "model")
    (record,) = Path("wandb").glob("offline-run-*/run-*.wandb")
    written = record.read_bytes()
    assert b"toy-model" in written and b"model.safetensors" in written


def test_an_artifact_needs_a_logger(capsys: pytest.CaptureFixture[str]) -> None:
    config = base(ROLLED_OUT)
    save = {"class_path": "callbacks.SavePretrained", "init_args": {"artifact": "toy-model"}}
    config["trainer"] = {**config["trainer"], "callbacks": [save]}
    Path("toy.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", "toy.yaml"])
    assert caught.value.code == 2 and "without a WandbLogger" in capsys.readouterr().err
