"""The callbacks a run gets without being asked: which, when, one of a kind, and how to leave one out."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning, RichProgressBar

from app.cli import main
from app.cli.runs.default_callbacks import OPTIONAL, with_defaults
from callbacks import Interruption, Progress, RewardLogger, SaveLast, Summary, Throughput, WeightSync
from modules import ModelSource, PolicyModule
from tests.fuzz.test_configurations import ROLLED_OUT, base
from tests.helpers.tiny_run import TinyData, TinyModule

MODEL = ModelSource(config={"model_type": "qwen3"})


def rolls_out(held_out: bool = False) -> TinyData:
    data = TinyData()
    data.val_sets = ("held-out",) if held_out else ()
    return data


def names(
    *given: Callback, data: Any = None, model: Any = None, subcommand: str = "fit", without: Any = (), **trainer: Any
) -> list[str]:
    callbacks = with_defaults(list(given), without, subcommand, trainer, model or PolicyModule(MODEL), data)
    assert [one for one in callbacks if one in given] == list(given)
    return [type(one).__name__ for one in callbacks]


ALWAYS = ["HangDump", "Progress"]
FIT = [*ALWAYS, "Interruption", "KeepOptions", "KeepBest", "SaveLast"]


def test_what_a_run_needs_it_gets() -> None:
    rollouts, all_ = ["WeightSync", "Opening", "Throughput", "RewardLogger"], [*OPTIONAL, *FIT[1:]]
    assert names(data=rolls_out()) == [*rollouts, "Summary", "Coach", "Report", *FIT]
    assert names(data=rolls_out(held_out=True)) == all_
    assert names(data=object()) == ["Opening", "Throughput", "Summary", "Coach", "Report", *FIT]
    for subcommand in ("validate", "test", "predict"):
        kept = ["Report"] if subcommand == "validate" else []
        found = names(data=rolls_out(held_out=True), subcommand=subcommand)
        assert found == ["WeightSync", "RewardLogger", *kept, *ALWAYS]
    # A module of another kind logs nothing that these could read.
    assert names(data=rolls_out(held_out=True), model=TinyModule()) == ["WeightSync", *FIT]


@pytest.mark.parametrize("given", [BatchSizeFinder(), ModelPruning("l1_unstructured")])
def test_callbacks_that_cannot_work_are_refused(given: Callback) -> None:
    with pytest.raises(ValueError, match=rf"trainer\.callbacks: {type(given).__name__} .*; remove it"):
        names(given, data=rolls_out())
    names(given, data=rolls_out(), subcommand="validate")
    names(given, data=rolls_out(), model=TinyModule())


@pytest.mark.parametrize("trainer", [{"limit_val_batches": 0}, {"max_steps": 3}])
def test_ends_are_validated_where_they_can_be(trainer: dict[str, Any]) -> None:
    two_steps = PolicyModule(MODEL, minibatches=2)
    assert "ValidateEnds" not in names(data=rolls_out(held_out=True), model=two_steps, **trainer)
    assert "ValidateEnds" in names(data=rolls_out(held_out=True), model=two_steps, max_steps=4)


def test_one_that_is_named_is_the_only_one_of_its_kind() -> None:
    class Mine(RewardLogger):
        pass

    given = [Throughput(), Mine(), RichProgressBar(), SaveLast(minutes=1)]
    assert names(*given, data=rolls_out()) == [
        "WeightSync",  # before Throughput, which reports its time
        *("Throughput", "Mine", "RichProgressBar", "SaveLast"),
        *("Opening", "Summary", "Coach", "Report", "HangDump", *FIT[2:5]),
    ]
    assert names(Summary(), WeightSync("disk"), data=rolls_out())[:3] == ["Summary", "WeightSync", "Opening"]
    assert Interruption.__name__ not in names(Progress(), data=rolls_out(), subcommand="test")


def test_switches_leave_out() -> None:
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False}
    assert names(data=rolls_out(), without=list(OPTIONAL), **quiet) == ["Interruption", "KeepOptions"]


@pytest.fixture
def rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that rolls out and trains two steps, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    Path("rollouts.yaml").write_text(yaml.safe_dump(base(ROLLED_OUT)))
    return ["fit", "--config", "rollouts.yaml", "--run_dir"]


def test_a_run_without_callbacks_syncs_and_reports(rollouts: list[str]) -> None:
    main([*rollouts, "run"])
    rows = list(csv.DictReader(Path("run/metrics.csv").read_text().splitlines()))
    assert len(rows) == 2 and all(float(row["sync/bytes"]) > 0 and float(row["time/sync"]) > 0 for row in rows)
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 2 and Path("run/samples.jsonl").exists()


def test_options_and_what_is_left_out_are_saved_and_hold_in_a_run_from_the_saved_configuration(
    rollouts: list[str],
) -> None:
    disk = "--trainer.callbacks=[{class_path: callbacks.WeightSync, init_args: {method: disk, directory: sent}}]"
    main([*rollouts, "run", disk, "--without_callbacks=[Summary]", "--without_callbacks+=RewardLogger"])
    main(["fit", "--config", "run/config.yaml", "--run_dir", "again"])
    for run in (Path("run"), Path("again")):
        assert (run / "sent").is_dir()
        assert not (run / "summary.json").exists() and not (run / "samples.jsonl").exists()
