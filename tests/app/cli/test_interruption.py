"""Ctrl-C and SIGTERM through the command line: what is saved, what is said, and whether the command goes on."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM

from app import interruption
from app.batch import BatchError
from app.cli import main
from app.strategies.checkpoint.trainer_state import put_together
from callbacks import Interruption
from callbacks.report.runs import read_run
from callbacks.save_last import SaveLast
from modules import PolicyModule, SFTModule
from tests.helpers.tiny_policy import Batches, make_batch, sgd, source, trainer

CONFIG = """
model: {class_path: tests.app.cli.signals.Interruptible}
data: {class_path: tests.helpers.tiny_run.TinyData, init_args: {batches: 5}}
trainer:
  accelerator: cpu
  max_epochs: 2
  check_val_every_n_epoch: null
  val_check_interval: 3
  callbacks: [{class_path: callbacks.WeightSync}, {class_path: callbacks.Summary}]
"""


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    (tmp_path / "toy.yaml").write_text(CONFIG)


def interrupted(*args: str) -> int:
    """A fit into `here` that is expected to end early; its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", "toy.yaml", "--run_dir", "here", *args])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def sends(number: signal.Signals, hook: str, step: int, times: int = 1) -> list[str]:
    options = {"signum": int(number), "hook": hook, "step": step, "times": times}
    return [
        "--trainer.callbacks+=tests.app.cli.signals.Sends",
        *(f"--trainer.callbacks.init_args.{key}={value}" for key, value in options.items()),
    ]


def rows(*columns: str) -> list[list[str]]:
    """The training rows of all parts of the run, in order, without repetition."""
    files = [*sorted(Path("here").glob("metrics_*.csv")), Path("here/metrics.csv")]
    found = [row for file in files for row in csv.DictReader(file.read_text().splitlines())]
    return [[row[name] for name in columns] for row in found if row.get("reward")]


def go_on(said: str) -> None:
    """Runs the command that was printed, in this process."""
    command = next(line for line in said.splitlines() if line.startswith("go on with: "))
    words = shlex.split(command.removeprefix("go on with: "))
    assert " ".join(words) == "python -m app fit --config here/config.yaml --run_dir here --ckpt_path last"
    main(words[3:])


@pytest.mark.parametrize(
    ("number", "hook", "step", "done"),
    [
        (signal.SIGINT, "on_train_batch_start", 1, 2),  # in the middle of the second step
        (signal.SIGTERM, "on_train_batch_end", 3, 3),  # in a step that a validation was to follow
        (signal.SIGTERM, "on_validation_start", 3, 3),
        (signal.SIGINT, "on_train_batch_end", 5, 5),  # the last step of an epoch
    ],
)
def test_the_step_is_finished_and_the_printed_command_goes_on(
    number: signal.Signals, hook: str, step: int, done: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert interrupted(*sends(number, hook, step)) == 128 + number
    said = capsys.readouterr().err
    assert f"{number.name}: ended after step {done}, saved as " in said and "Traceback" not in said
    assert rows("step", "reward") == [[str(n), str(float(n + 1))] for n in range(done)]
    assert not Path("here/summary.json").exists()
    assert "run directory: here\n" in said
    go_on(said)
    assert rows("step", "reward") == [[str(n), str(float(n + 1))] for n in range(10)]
    assert Path("here/summary.json").exists()
    assert capsys.readouterr().err.splitlines()[-1] == "run directory: here"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("hook", "steps"), [("on_train_batch_end", 3), ("on_validation_start", 3), ("on_validation_start", 4)]
)
def test_after_the_last_step_the_model_is_written(hook: str, steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In a validation that is due every three steps, and in the one at the end, which comes before the model."""
    speaks = [
        "--model=tests.app.cli.signals.Speaks",
        f"--trainer.max_steps={steps}",
        "--without_callbacks=[WeightSync]",
    ]
    speaks += ["--trainer.callbacks=[callbacks.ValidateEnds, callbacks.SavePretrained]"]
    assert interrupted(*speaks, *sends(signal.SIGTERM, hook, steps)) == 143
    said = capsys.readouterr().err
    assert f"SIGTERM: ended after step {steps}, saved as " in said and "go on with" not in said
    trained = AutoModelForCausalLM.from_pretrained("here/model").lm_head.weight
    assert trained.mean().item() == pytest.approx(-steps, abs=0.1)
    command = next(line for line in said.splitlines() if "score the model with: " in line).partition(": ")[2]
    main(shlex.split(command)[3:])
    (metrics,) = Path("runs").glob("*_validate/*/metrics.csv")
    assert "val/accuracy" in metrics.read_text()


def test_a_model_that_cannot_be_written_then_is_told_and_the_checkpoint_is_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("full").write_text("no directory")
    saves = "{class_path: callbacks.SavePretrained, init_args: {dirpath: ../full/model}}"
    speaks = ["--model=tests.app.cli.signals.Speaks", "--trainer.max_steps=3", "--without_callbacks=[WeightSync]"]
    speaks += [f"--trainer.callbacks=[callbacks.ValidateEnds, {saves}]"]
    with pytest.warns(UserWarning, match=r"full/model is not written: .*arborist export --ckpt .*last\.ckpt --out DIR"):
        assert interrupted(*speaks, *sends(signal.SIGTERM, "on_validation_start", 3)) == 143
    assert "ended after step 3, saved as " in capsys.readouterr().err
    main(["validate", "--config", "here/config.yaml", "--ckpt_path", "here/checkpoints/last.ckpt", *speaks[:1]])


def test_going_on_with_a_finished_run_changes_nothing_but_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert interrupted("--trainer.max_steps=4", *sends(signal.SIGTERM, "on_train_batch_end", 2)) == 143
    go_on(capsys.readouterr().err)  # which trains
    assert rows("step") == [[str(n)] for n in range(4)]
    summary = Path("here/summary.json").read_text()
    assert json.loads(summary)["steps"] == 2
    main(["fit", "--config", "here/config.yaml", "--run_dir", "here", "--ckpt_path", "last"])
    assert Path("here/summary.json").read_text() == summary
    assert read_run(Path("here")).series["reward"] == ([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])
    saved = yaml.safe_load(Path("here/config.yaml").read_text())
    assert saved["ckpt_path"] is None and saved["run_dir"] is None
    main(["validate", "--config", "here/config.yaml"])  # a run of its own
    assert list(Path("runs").glob("*_validate/*/metrics.csv"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_wait_for_rollouts_is_cut_short(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    code = interrupted("--data=tests.app.cli.signals.Waits", f"--data.init_args.signum={int(number)}")
    said = capsys.readouterr().err
    assert code == 128 + number and "ended after step 2, saved as " in said
    assert [row[0] for row in rows("step")] == ["0", "1"]
    main(["fit", "--config", "toy.yaml", "--run_dir", "here", "--ckpt_path", "last"])  # with a stream that goes on
    assert [row[0] for row in rows("step")] == [str(n) for n in range(10)]


def test_before_the_first_step_nothing_is_offered_but_a_new_start(
    capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """Where rollouts are waited for; the directory then holds a run that cannot be gone on with."""
    shows = "--trainer.callbacks=[callbacks.WeightSync, callbacks.Pictures, callbacks.Report]"
    waits = ["--data=tests.app.cli.signals.Waits", "--data.init_args.after=0", "--data.init_args.signum=2"]
    code = interrupted(shows, *waits)
    assert not [one for one in recwarn if "not drawn" in str(one.message) or "not written" in str(one.message)]
    said = capsys.readouterr().err
    assert code == 130 and "SIGINT: ending; until a step is done there is nothing new to save" in said
    assert "SIGINT: ended after step 0, nothing new was saved" in said and "ckpt_path" not in said
    command = said.splitlines()[-1].partition("no checkpoint in here/checkpoints; start again with: ")[2]
    assert interrupted() == 2
    said = capsys.readouterr().err
    assert "here already holds a run, which saved no checkpoint; remove it, name another" in said
    assert "ckpt_path" not in said
    main([*shlex.split(command)[3:], "--data=tests.helpers.tiny_run.TinyData"])
    assert capsys.readouterr().err.startswith("run directory: runs/")


def test_checkpoints_that_a_callback_has_elsewhere_are_gone_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    options = "{dirpath: elsewhere, every_n_train_steps: 1, save_last: true}"
    saves = f"{{class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {options}}}"
    given = [f"--trainer.callbacks=[{{class_path: callbacks.WeightSync}}, {saves}]"]
    stops = sends(signal.SIGINT, "on_train_batch_start", 2, times=2)
    assert interrupted(*given, *[one.replace("callbacks=", "callbacks+=") for one in stops]) == 130
    said = capsys.readouterr().err
    assert Path("elsewhere/last.ckpt").exists() and not Path("here/checkpoints/last.ckpt").exists()
    assert "go on with: " in said and "--ckpt_path last" in said and "start again" not in said


def test_a_second_ctrl_c_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert interrupted(*sends(signal.SIGINT, "on_train_batch_start", 2, times=2)) == 130
    said = capsys.readouterr().err
    assert "finishing this step" in said and "nothing new was saved" in said and "Traceback" not in said
    assert len(rows("step")) == 2 and not Path("here/checkpoints/last.ckpt").exists()
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    last_resorts = [timer for timer in timers if timer.function is interruption.force_end]
    assert all(timer.finished.is_set() for timer in last_resorts)  # or it would end this process too


@pytest.mark.parametrize(
    ("hook", "code"), [("setup", 130), ("on_fit_start", 143), ("on_train_start", 130), ("on_fit_end", 143)]
)
def test_outside_training_a_signal_ends_without_a_traceback(
    hook: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    step = 2 if hook == "on_fit_end" else 0
    assert interrupted("--trainer.max_steps=2", *sends(signal.Signals(code - 128), hook, step)) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said and "nothing new was saved" in said
    assert ("go on with" in said) == (hook == "on_fit_end")


def test_a_run_that_ctrl_c_does_not_reach_says_how_it_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """As `nohup arborist fit ... &` in a script starts it: what comes from the keyboard is not meant for it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert interrupted(*sends(signal.SIGTERM, "on_train_batch_start", 1)) == 143
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr().err
    assert f"SIGINT is ignored, as shells have it of jobs in the background: `kill -TERM {os.getpid()}`" in said
    assert "go on with: " in said
    main(["fit", "--config", "toy.yaml", "--run_dir", "other", "--trainer.max_steps=1"])
    assert "SIGINT is ignored" not in capsys.readouterr().err


def test_a_step_without_effect_replaces_no_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    spoiled = ["--trainer.callbacks+=tests.app.cli.signals.Diverges", "--trainer.callbacks.init_args.step=1"]
    own = ["--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks.save_last=true"]
    own.append("--trainer.callbacks.every_n_train_steps=1")
    assert interrupted(*spoiled, *own, *sends(signal.SIGTERM, "on_train_batch_start", 1)) == 143
    said = capsys.readouterr().err
    assert "SIGTERM: ended after step 2, nothing new was saved" in said and "go on with: " in said
    assert put_together(Path("here/checkpoints/last.ckpt"))["global_step"] == 1


def test_a_step_without_effect_is_saved_where_nothing_is(capsys: pytest.CaptureFixture[str]) -> None:
    spoiled = ["--trainer.callbacks+=tests.app.cli.signals.Diverges", "--trainer.callbacks.init_args.step=1"]
    assert interrupted(*spoiled, *sends(signal.SIGTERM, "on_train_batch_start", 1)) == 143
    assert "SIGTERM: ended after step 2, saved as " in capsys.readouterr().err
    assert put_together(Path("here/checkpoints/last.ckpt"))["global_step"] == 2


def test_whoever_wants_no_checkpoints_gets_none(capsys: pytest.CaptureFixture[str]) -> None:
    args = sends(signal.SIGINT, "on_train_batch_start", 1)
    assert interrupted("--trainer.enable_checkpointing=false", *args) == 130
    said = capsys.readouterr().err
    assert "nothing is saved, because trainer.enable_checkpointing is false" in said
    assert "go on with" not in said and not Path("here/checkpoints").exists()


def test_a_checkpoint_callback_of_ones_own_decides_where(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks.dirpath=elsewhere"]
    own.append("--trainer.callbacks.save_last=true")
    assert interrupted(*own, *sends(signal.SIGTERM, "on_train_batch_start", 1)) == 143
    said = capsys.readouterr().err
    assert f"saved as {Path('elsewhere/last.ckpt').resolve()}" in said
    go_on(said)
    assert [row[0] for row in rows("step")] == [str(n) for n in range(10)]


def test_a_last_checkpoint_of_an_earlier_step_is_not_taken_for_this_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback that keeps others saved at this step; `--ckpt_path last` looks for a last one."""
    last = SaveLast()
    last.dirpath = str(tmp_path)
    steps = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)

    class Ends(Callback):
        def on_train_batch_start(self, trainer: Trainer, *unused: Any) -> None:
            last.minutes = 1e-9 if trainer.global_step == 0 else 10.0  # due once

        def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            interruption.request(signal.SIGTERM)

    fit = trainer(Ends(), Interruption(), steps, last, default_root_dir=tmp_path, enable_checkpointing=True,
                  max_steps=6, max_epochs=-1, val_check_interval=3, check_val_every_n_epoch=None)  # fmt: skip
    batches = [make_batch(k) for k in range(2)]
    monkeypatch.setattr(interruption, "_listener", interruption._Listener())  # for this run alone
    with pytest.raises(interruption.Interrupted) as end:
        fit.fit(SFTModule(source(), optimizer=sgd), Batches(batches, held_out=batches))
    assert interruption.end_of(end.value) == interruption.End(3, tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 3


def test_a_datamodule_without_a_batch_is_no_interruption(tmp_path: Path) -> None:
    fit = trainer(Interruption(), default_root_dir=tmp_path)
    with pytest.raises(BatchError, match="the datamodule yielded no batch on rank 0"):
        fit.fit(PolicyModule(source(), optimizer=sgd), Batches([None]))  # type: ignore[list-item]
