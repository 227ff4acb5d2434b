"""The command line: run directories, precedence of flags, and what a user's mistake looks like."""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.accelerators import MPSAccelerator

from app.cli import main
from app.cli.fit import VERBS
from callbacks import figures
from tests.helpers.selection import some
from tests.helpers.tiny_run import TinyData, TinyModule

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
model: {class_path: tests.helpers.tiny_run.TinyModule}
data: {class_path: tests.helpers.tiny_run.TinyData, init_args: {batches: 3}}
trainer:
  accelerator: cpu
  strategy: auto
  max_epochs: 1
  callbacks:
    - class_path: callbacks.Summary
"""


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    monkeypatch.delenv("ARBORIST_DEBUG", raising=False)
    (tmp_path / "toy.yaml").write_text(CONFIG)


def _runs() -> list[Path]:
    return sorted(path.parent for path in Path("runs").rglob("config.yaml"))


def _mistake(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What the command prints; asserts exit code 2 and no traceback."""
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert "Traceback" not in printed.err and len(printed.err.splitlines()) < 12, printed.err
    return printed.err


def test_each_launch_gets_a_directory_of_its_own() -> None:
    main(["fit", "--config", "toy.yaml"])
    main(["fit", "--config", "toy.yaml"])
    first, second = _runs()
    assert first.parent == second.parent == Path("runs/toy")
    for run in (first, second):
        assert {"config.yaml", "metrics.csv", "summary.json"} <= {path.name for path in run.iterdir()}
        assert len((run / "metrics.csv").read_text().splitlines()) == 5  # header, three steps, validation


def test_saved_config_starts_a_new_run_beside_the_old_one() -> None:
    main(["fit", "--config", "toy.yaml", "--run_dir", "runs/toy/first", "--trainer.max_steps", "2"])
    main(["fit", "--config", "runs/toy/first/config.yaml"])
    other = next(run for run in _runs() if run.name != "first")
    assert other.parent == Path("runs/toy")
    assert yaml.safe_load((other / "config.yaml").read_text())["trainer"]["max_steps"] == 2


def test_run_dir_that_holds_a_run_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config", "toy.yaml", "--run_dir", "here"])
    before = Path("here/metrics.csv").read_bytes()
    assert "run_dir: here already holds a run" in _mistake(capsys, "fit", "--config", "toy.yaml", "--run_dir", "here")
    assert Path("here/metrics.csv").read_bytes() == before


def test_run_dir_goes_on_with_its_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its curve is that of both launches."""
    drawn, draw = list[list[float]](), figures.reward_curve
    monkeypatch.setattr(figures, "reward_curve", lambda *given: drawn.append(list(given[0])) or draw(*given))
    saving = ["--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks.save_last=true"]
    pictures = "--trainer.callbacks+=callbacks.Pictures"
    args = ["--config", "toy.yaml", "--run_dir", "here", pictures, *saving, "--trainer.callbacks.every_n_train_steps=1"]
    main(["fit", *args, "--trainer.max_steps", "2"])
    before = Path("here/metrics.csv").read_text()
    main(["fit", *args, "--trainer.max_steps", "3", "--ckpt_path", "last", "--weights_only", "false"])
    assert Path("here/metrics_1.csv").read_text() == before
    after = list(csv.DictReader(Path("here/metrics.csv").read_text().splitlines()))
    assert [row["step"] for row in after if row.get("reward")] == ["2"]  # steps are counted from 0
    assert drawn == [[1, 2], [1, 2, 3]]


def test_validate_scores_a_checkpoint_as_the_run_did(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config", "toy.yaml", "--run_dir", "first"])
    checkpoint = next(Path("first").rglob("*.ckpt"))
    main(["validate", "--config", "toy.yaml", "--ckpt_path", str(checkpoint)])
    assert "3.0" in capsys.readouterr().out  # the tiny module's accuracy is its number of steps
    assert [run.parent.name for run in _runs()] == ["toy_validate"]
    for saved in (Path("first/config.yaml"), _runs()[0] / "config.yaml"):
        main(["validate", "--config", str(saved), "--ckpt_path", str(checkpoint)])
    assert {run.parent.name for run in _runs()} == {"toy_validate", "first_validate", "toy_validate_validate"}


def test_flags_win_over_what_a_checkpoint_remembers() -> None:
    saving = CONFIG.replace("TinyModule", "RememberingModule")
    Path("saving.yaml").write_text(saving)
    main(["fit", "--config", "saving.yaml", "--model.init_args.note", "old", "--run_dir", "first"])
    checkpoint = next(Path("first").rglob("*.ckpt"))
    args = ["--ckpt_path", str(checkpoint), "--trainer.max_epochs", "2", "--weights_only", "false"]
    main(["fit", "--config", "saving.yaml", "--model.init_args.note", "new", "--run_dir", "second", *args])
    assert yaml.safe_load(Path("second/config.yaml").read_text())["model"]["init_args"]["note"] == "new"
    assert Path("second/note.txt").read_text() == "new"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--trainer.max_step", "3"], ["--trainer.max_step", "Did you mean 'trainer.max_steps'?"]),
        (["--data.init_args.batchez", "3"], ["batchez", "Did you mean 'batches'?", "TinyData accepts: batches"]),
        (["--model.init_args.steps_per_batch", "many"], ["steps_per_batch", "Expected a <class 'int'>", "many"]),
        (["--config", "nope.yaml"], ["nope.yaml", "config"]),
        (["--model", "tests.helpers.tiny_run.Nope"], ["model", "tests.helpers.tiny_run", "Nope"]),
        (["--trainer.precision", "16-wrong"], ["trainer.precision", "16-wrong"]),
        (["--trainer.strategy", "dat"], ["trainer", "invalid strategy name", "dat"]),
    ],
)
def test_mistakes_on_the_command_line(args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    printed = _mistake(capsys, "fit", "--config", "toy.yaml", *args)
    assert all(word in printed for word in words), printed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer: {max_stepz: 3}", ["trainer.max_stepz", "trainer.max_steps"]),
        ("modle: {class_path: x.Y}", ["modle", "Did you mean 'model'?"]),
        (
            "trainer: {callbacks: [{class_path: callbacks.RewardLogger, init_args: {every: 3}}]}",
            ["callbacks.RewardLogger", "every", "RewardLogger accepts: every_n_batches, samples"],
        ),
        (
            "trainer: {callbacks: [{class_path: callbacks.RewardLogger, init_args: {samples: 0}}]}",
            ["RewardLogger.samples: 0, must be at least 1"],
        ),
        ("trainer: [", ["line"]),
    ],
)
def test_mistakes_in_yaml(text: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.yaml").write_text(text)
    printed = _mistake(capsys, "fit", "--config", "toy.yaml", "--config", "bad.yaml")
    assert all(word in printed for word in words), printed


def test_devices_that_torchrun_did_not_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("GROUP_WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    said = _mistake(capsys, "fit", "--config", "toy.yaml", "--trainer.devices", "1")
    assert "trainer.devices: 1, but torchrun started 2 processes on this machine" in said


def test_a_machine_with_apples_gpu_trains_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    Path("auto.yaml").write_text("trainer: {accelerator: auto, strategy: {class_path: app.strategies.DTAStrategy}}")
    main(["fit", "--config", "toy.yaml", "--config", "auto.yaml", "--run_dir", "here"])
    assert len(Path("here/metrics.csv").read_text().splitlines()) == 5
    assert yaml.safe_load(Path("here/config.yaml").read_text())["trainer"]["accelerator"] == "auto"  # also elsewhere


def test_failures_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cli.fit.ArboristCLI", lambda args: int("not ours"))
    with pytest.raises(ValueError, match="not ours"):
        main(["fit"])


def test_a_package_of_an_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("app.cli.fit.ArboristCLI", lambda args: importlib.import_module("flash_attn.x"))
    assert "comes with an extra of this project: pip install -e '.[flash]'" in _mistake(capsys, "fit")


def test_what_no_extra_brings_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for gone in ("datasets.of_mine", "my_module"):  # the first is installed, and has no such module
        monkeypatch.setattr("app.cli.fit.ArboristCLI", lambda args, gone=gone: importlib.import_module(gone))
        with pytest.raises(ModuleNotFoundError, match=f"^No module named '{gone}'$"):
            main(["fit"])
    monkeypatch.setattr("importlib.metadata.requires", lambda _: (_ for _ in ()).throw(PackageNotFoundError()))
    with pytest.raises(ModuleNotFoundError, match="my_module"):  # from a checkout that nobody has installed
        main(["fit"])


def test_debug_shows_where_a_mistake_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBORIST_DEBUG", "1")
    Path("bad.yaml").write_text("trainer: {callbacks: [{class_path: callbacks.RewardLogger, init_args: {samples: 0}}]}")
    with pytest.raises(ValueError, match="samples"):
        main(["fit", "--config", "toy.yaml", "--config", "bad.yaml"])


def test_data_verb_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "CHECKOUT" in _mistake(capsys, "data", "import-gsm8k", "no/such/folder")
    assert "import-nothing" in _mistake(capsys, "data", "import-nothing", "x")


def test_other_loggers_stand_behind_metrics_csv_and_get_the_samples() -> None:
    Path("wandb.yaml").write_text(
        """
        trainer:
          logger: {class_path: lightning.pytorch.loggers.WandbLogger, init_args: {offline: true}}
          callbacks: [{class_path: callbacks.RewardLogger}]
        """
    )
    main(["fit", "--config", "toy.yaml", "--config", "wandb.yaml", "--run_dir", "here"])
    assert Path("here/metrics.csv").exists() and Path("here/samples.jsonl").exists()
    table = json.loads(next(Path("wandb").rglob("media/table/samples/train*.json")).read_text())
    assert {"prompt", "completion", "reward"} <= set(table["columns"]) and len(table["data"]) == 3


def test_a_csv_logger_elsewhere_takes_nothing_out_of_the_run_directory() -> None:
    flags = ["--trainer.logger=lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir=elsewhere"]
    main(["fit", "--config", "toy.yaml", "--run_dir", "kept", *flags])
    assert Path("kept/metrics.csv").exists() and Path("kept/config.yaml").exists()
    (besides,) = Path("elsewhere").rglob("metrics.csv")
    assert not (besides.parent / "config.yaml").exists()


def test_loggers_are_told_all_that_was_configured() -> None:
    """The data's options too, by which runs differ as they do by the model's."""
    flags = ["--trainer.logger=lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir=elsewhere"]
    saving = CONFIG.replace("TinyModule", "RememberingModule")
    Path("saving.yaml").write_text(saving)
    main(["fit", "--config", "saving.yaml", "--model.init_args.note", "said", "--run_dir", "kept", *flags])
    (told,) = (yaml.safe_load(path.read_text()) for path in Path("elsewhere").rglob("hparams.yaml"))
    saved = yaml.safe_load(Path("kept/config.yaml").read_text())
    assert told["note"] == "said" and told["data"] == saved["data"] and told["data"]["init_args"]["batches"] == 3
    assert told["trainer"] == saved["trainer"] and told["seed_everything"] == saved["seed_everything"]


class OwnModule(TinyModule):
    """Has an option that is named as one of the run's sections."""

    def __init__(self, trainer: str) -> None:
        super().__init__()
        self.save_hyperparameters()


class OwnData(TinyData):
    """As it, and uses what it has saved."""

    def __init__(self, data: str, speaks: bool) -> None:
        super().__init__()
        self.save_hyperparameters(logger=speaks)

    def setup(self, stage: str) -> None:
        assert self.hparams["data"] == "prices"


@pytest.mark.parametrize("speaks", [True, False])
def test_hyper_parameters_of_ones_own_parts_stay_as_they_saved_them(speaks: bool) -> None:
    """And loggers are told nothing of what is saved with `logger=False`."""
    flags = ["--trainer.logger=lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir=elsewhere"]
    own = {"model": {"trainer": "mine"}, "data": {"data": "prices", "speaks": speaks}}
    parts = {
        part: {"class_path": f"{__name__}.Own{name}", "init_args": own[part]}
        for part, name in (("model", "Module"), ("data", "Data"))
    }
    Path("own.yaml").write_text(yaml.safe_dump(yaml.safe_load(CONFIG) | parts))
    main(["fit", "--config", "own.yaml", "--seed_everything", "3", "--run_dir", "kept", *flags])
    (told,) = (yaml.safe_load(path.read_text()) for path in Path("elsewhere").rglob("hparams.yaml"))
    assert told["trainer"] == "mine" and told.get("data") == ("prices" if speaks else None)
    assert told.get("seed_everything") == (3 if speaks else None)


def test_a_csv_logger_of_the_run_directory_is_the_one_that_writes_there() -> None:
    init_args = "{save_dir: own, name: '', version: ''}"
    Path("own.yaml").write_text(
        f"trainer: {{logger: {{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {init_args}}}}}"
    )
    main(["fit", "--config", "toy.yaml", "--config", "own.yaml", "--run_dir", "own"])
    assert len(Path("own/metrics.csv").read_text().splitlines()) > 1 and Path("own/config.yaml").exists()


def test_a_run_that_goes_on_goes_on_in_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")

    def fit(run_dir: str, *args: str) -> str:
        """The id in W&B of the run."""
        wandb.finish()  # one that another test has left
        seen = set(Path("wandb").glob("offline-run-*"))
        main(["fit", "--config", "toy.yaml", "--run_dir", run_dir, *saving, *logger, *args])
        wandb.finish()
        (made,) = set(Path("wandb").glob("offline-run-*")) - seen
        return made.name.split("-")[3]  # a second run of the same second has a number behind it

    saving = ["--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks.save_last=true"]
    logger = ["--trainer.logger=lightning.pytorch.loggers.WandbLogger", "--trainer.logger.init_args.offline=true"]
    on = ["--trainer.max_epochs", "2", "--ckpt_path", "last", "--weights_only", "false"]
    first = fit("first")
    assert fit("first", *on) == first == Path("first/wandb_id").read_text().strip()
    assert fit("second") != first
    monkeypatch.setenv("WANDB_RUN_ID", "ofasweep")
    assert fit("third") == "ofasweep" == Path("third/wandb_id").read_text().strip()
    monkeypatch.delenv("WANDB_RUN_ID")
    assert fit("third", *on) == "ofasweep"
    assert fit("fourth", "--trainer.logger.init_args.id=mine") == "mine" and not Path("fourth/wandb_id").exists()


@pytest.mark.slow
def test_wandb_learns_that_a_run_has_failed() -> None:
    """By the exit code, which is that of the process; 0 would be a run that finished."""
    from wandb.proto.wandb_internal_pb2 import Record

    logger = ["--trainer.logger=lightning.pytorch.loggers.WandbLogger", "--trainer.logger.init_args.offline=true"]
    command = [sys.executable, "-m", "app", "fit", "--config", "toy.yaml", *logger, _EARLY, f"{_IS}.monitor=misspelt"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_SILENT": "true"}
    assert subprocess.run(command, env=environment, capture_output=True, timeout=300).returncode == 2
    (file,) = Path("wandb").glob("offline-run-*/*.wandb")
    data = file.read_bytes()
    at, last = 7, b""  # behind the file's head; a record has one of 7 bytes: a sum, its length, whether it goes on
    while at + 7 <= len(data):
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        last = data[at + 7 : at + 7 + length]
        at += 7 + length
        at += 32768 - at % 32768 if at % 32768 > 32768 - 7 else 0  # no head crosses a block's end
    assert Record.FromString(last).exit.exit_code == 2


@pytest.mark.parametrize(
    ("args", "unbuffered"),  # argparse says nothing of help that it could not print
    some(
        [
            (["doctor"], False),
            (["doctor"], True),
            (["--help"], False),
            (["--help"], True),
            (["check", "--help"], False),
        ],
        [(["--help"], False)],
    ),
)
def test_output_that_nobody_reads_any_more_ends_a_command_quietly(args: list[str], unbuffered: bool) -> None:
    done = _unread(args, {"PYTHONUNBUFFERED": "1"} if unbuffered else {})
    assert done.returncode == 128 + signal.SIGPIPE and not done.stderr, done.stderr


@pytest.mark.parametrize(("args", "code"), [("--help", 0), ("inspect nowhere.npz", 2)])
def test_a_command_without_standard_streams_ends_as_any_other(args: str, code: int) -> None:
    """As supervisors start some; it ended with code 1, a whole run too."""
    command = f"{sys.executable} -m app {args} <&- >&- 2>&-"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(["sh", "-c", command], env=environment, timeout=300).returncode == code


def test_processes_that_such_a_command_starts_have_their_streams() -> None:
    child = "import os, sys; os.write(2, b'none' if sys.stdout is None else b'one')"
    parent = "import subprocess, sys; import app.__main__ as m; m._open_what_is_closed(); "
    parent += f"subprocess.run([sys.executable, '-c', {child!r}])"
    words = ["sh", "-c", '"$0" -c "$1" >&-', sys.executable, parent]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, timeout=300)
    assert done.returncode == 0 and done.stderr == b"one"


def test_what_fails_says_so_though_nobody_reads_the_rest() -> None:
    done = _unread(["inspect", "nowhere.npz"], {})
    assert done.returncode == 2 and b"nowhere.npz" in done.stderr and b"Broken" not in done.stderr, done.stderr


def _unread(args: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    reads, writes = os.pipe()
    os.close(reads)  # as `head` does
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "app", *args]
    try:
        return subprocess.run(command, env=environment, stdout=writes, stderr=subprocess.PIPE, timeout=300)
    finally:
        os.close(writes)


_IS = "--trainer.callbacks.init_args"
_EARLY = "--trainer.callbacks+=lightning.pytorch.callbacks.EarlyStopping"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--trainer.max_steps=2"], ""),
        (["--trainer.max_steps=0"], ""),
        (["--trainer.max_steps=9"], "after step 3 of 9: trainer.max_epochs (1) comes first"),
        (["--trainer.max_epochs=2"], ""),
        (["--trainer.max_time=00:00:00:00"], "after step 0: trainer.max_time is over"),
        (
            ["--trainer.callbacks+=lightning.pytorch.callbacks.Timer", f"{_IS}.duration=00:00:00:00"],
            "after step 0: trainer.max_time is over",
        ),  # whose options hold a text of an enumeration
        (["--trainer.limit_train_batches=0"], "after step 0: there is nothing more to train on"),
        (
            [
                "--trainer.max_epochs=5",
                _EARLY,
                f"{_IS}.monitor=tokens/tree",
                f"{_IS}.stopping_threshold=1e9",
            ],
            "after step 3: EarlyStopping: Stopping threshold reached: tokens/tree = ",
        ),
    ],
)
def test_a_run_that_ends_early_says_why(flags: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config", "toy.yaml", *flags])
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ended early, ")]
    assert bool(told) == bool(why) and all(why in line for line in told), told


def test_a_metric_to_stop_by_that_is_none_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    said = _mistake(capsys, "fit", "--config", "toy.yaml", _EARLY, f"{_IS}.monitor=val/acuracy")
    assert "trainer.callbacks: Early stopping conditioned on metric `val/acuracy` which is not available" in said
    assert "`val/accuracy`" in said and "set strict: false" in said


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_has_its_words(verb: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(VERBS[verb]).add_arguments(parser)
    assert _without_words(parser) == []


def _without_words(parser: argparse.ArgumentParser) -> list[str]:
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [option for each in action.choices.values() for option in _without_words(each)]
        elif not action.help:
            found.append(action.dest)
    return found


def test_help_is_there_before_anything_is_imported() -> None:
    code = "import sys; sys.argv = ['arborist', '--help']; import app.__main__ as m\n"
    code += (
        "try: m.main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules, 'lightning' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    said = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "0 False False"
    named = {line.split()[0] for line in said.splitlines() if line.startswith("  ")}
    assert named == {"fit", "validate", "test", "predict", *VERBS}


@pytest.mark.parametrize(
    ("lacks", "told"), [("fcntl", "Windows is supported within WSL"), ("torch", "has no torch; use")]
)
def test_a_python_that_cannot_run_it_is_told_so(lacks: str, told: str) -> None:
    code = "import sys; sys.argv = ['arborist', 'fit']\n"
    code += (
        f"class Gone:\n def find_spec(self, name, *_):\n  if name == {lacks!r}: raise ModuleNotFoundError(name=name)\n"
    )
    code += "sys.meta_path.insert(0, Gone()); sys.modules.pop('fcntl', None)\nimport app.__main__ as m; m.main()\n"
    given = {"cwd": Path(__file__).parents[3], "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], **given)
    assert done.returncode == 2 and told in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr, done.stderr
