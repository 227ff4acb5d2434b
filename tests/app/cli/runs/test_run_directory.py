"""Run directories: one run at a time, refusals of one line, and disks that say no."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import main
from app.cli.runs.run_directory import LOCK_FILE, RunDirectory, RunDirectoryError, naming, run_of
from tests.app.cli.test_cli import CONFIG
from tests.app.cli.verbs.test_look import made_run

_HOLD = "from pathlib import Path; from app.cli.runs.run_directory import RunDirectory; held = RunDirectory(Path('here'));"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    monkeypatch.delenv("ARBORIST_DEBUG", raising=False)
    (tmp_path / "toy.yaml").write_text(CONFIG)


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that `fit` ends with; asserts exit code 2."""
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", "toy.yaml", *args])
    said = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and not any("Traceback" in line for line in said)
    errors = [line for line in said if line.startswith("error: ")]
    assert len(errors) == 1 and said.index(errors[0]) >= len(said) - 2, said
    return errors[0]


def holder(then: str) -> subprocess.Popen[str]:
    """Another process that holds `here`, and then does what `then` says."""
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", f"{_HOLD} print('held', flush=True); {then}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_run_in_a_directory_is_refused_before_it_changes_anything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["fit", "--config", "toy.yaml", "--run_dir", "here"])
    before = {path: path.read_bytes() for path in Path("here").iterdir() if path.is_file() and path.name != LOCK_FILE}
    other = holder("input()")
    try:
        said = refusal(capsys, "--run_dir", "here", "--ckpt_path", "last", "--trainer.max_epochs", "2")
        assert f"here is in use by process {other.pid} on host {socket.gethostname()}, since 20" in said
        assert "name another directory" in said
    finally:
        other.kill()
        other.wait(20)
    assert before == {path: path.read_bytes() for path in before}
    RunDirectory(Path("here")).close()  # the lock of a dead process is no obstacle


def test_the_lock_lasts_as_long_as_the_run_and_says_whose_it_is() -> None:
    first = RunDirectory(Path("here"))
    assert json.loads(Path("here", LOCK_FILE).read_text())["pid"] == os.getpid()
    with pytest.raises(RunDirectoryError, match=f"here is in use by process {os.getpid()} "):
        RunDirectory(Path("here"))
    first.close()
    RunDirectory(Path("here")).close()


def test_new_run_directories_are_for_their_owner_alone() -> None:
    Path("old").mkdir(mode=0o755)
    for path in (Path("new"), Path("deep/er"), Path("old")):
        RunDirectory(path).close()
    assert [oct(Path(path).stat().st_mode & 0o777) for path in ("new", "deep/er", "old")] == ["0o700", "0o700", "0o755"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "run_dir: the name is empty"),
        ("toy.yaml", "run_dir: toy.yaml cannot be made, a file is in the way"),
        ("toy.yaml/below", "run_dir: toy.yaml/below cannot be made, a file is in the way"),
        ("/proc/none", "run_dir: /proc/none: No such file or directory; name another directory"),
        ("x" * 300, "File name too long; choose a shorter path"),
        ("a\0b", "has a NUL in it"),
    ],
)
def test_run_directories_that_cannot_be(path: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(capsys, f"--run_dir={path}")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--ckpt_path", "last"], "last needs the run it goes on with; name it with --run_dir"),
        (["--ckpt_path", "last", "--trainer.callbacks=callbacks.SavePretrained"], "last needs the run it goes on with;"),
        (["--ckpt_path", "last", "--run_dir", "hree"], "no checkpoint in hree/checkpoints; is run_dir mistyped?"),
        (["--ckpt_path", "best"], "ckpt_path: best means nothing to a new process"),
        (["--ckpt_path", "nope.ckpt"], "ckpt_path: 'nope.ckpt' does not exist"),
        (["--ckpt_path", "toy.yaml"], "ckpt_path: toy.yaml is no checkpoint"),
        (["--ckpt_path", "."], "ckpt_path: . is a directory without manifest.json"),
        (["--ckpt_path="], "ckpt_path: '' does not exist"),
    ],
)
def test_checkpoints_that_are_none(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(capsys, *args)
    assert not Path("hree").exists() and not Path("runs").exists()  # before anything starts


def test_a_launcher_that_restarts_may_ask_for_the_last_checkpoint_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.cli.configuration.restarted_by_agent", lambda: True)
    main(["fit", "--config", "toy.yaml", "--run_dir", "here", "--ckpt_path", "last"])
    assert "no checkpoint in here/checkpoints yet; starting from the beginning" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["last.ckpt", "best-val/accuracy=0.5.ckpt", "val/aime/accuracy=0.5.ckpt"])
def test_a_checkpoint_is_of_the_run_it_is_in(tmp_path: Path, named: str) -> None:
    """Where a metric's name in its file name makes folders, too."""
    (tmp_path / "config.yaml").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    assert run_of(tmp_path / "run" / "checkpoints" / named) == tmp_path / "run"


def test_a_full_disk_is_named_with_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("here").mkdir()
    Path("here/metrics.csv").symlink_to("/dev/full")  # every write: no space left on device
    said = refusal(capsys, "--run_dir", "here")
    assert "here/metrics.csv: No space left on device; free space there, or choose another disk" in said


def test_a_full_disk_elsewhere_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    Path("here").mkdir()
    Path("here/summary.json").symlink_to("/dev/full")
    assert "No space left on device; free space there" in refusal(capsys, "--run_dir", "here")


@pytest.mark.parametrize(
    ("named", "is_of_it"),
    [("out/page.html", True), ("out/.page.html-3vh9/model", True), ("out", True), (None, True), ("out/other", False)],
)
def test_the_option_that_chose_a_place_is_named_for_trouble_there_alone(named: str | None, is_of_it: bool) -> None:
    refused = OSError(errno.EROFS, "Read-only file system", named)
    with pytest.raises(OSError if not is_of_it else RunDirectoryError) as told, naming(Path("out/page.html"), "--out"):
        raise refused
    assert (told.value is refused) != is_of_it
    if is_of_it:
        assert str(told.value) == "--out: out/page.html: Read-only file system; choose a directory that can be written"


@pytest.mark.parametrize(
    ("args", "option"),
    [(["look", "run", "--out", "page.html"], "--out"), (["serve", "--model", ".", "--log_dir", "logs"], "--log_dir")],
)
def test_commands_name_the_option_of_a_place_that_cannot_be_written(
    args: list[str], option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", args[-1])

    made_run(Path("run"), 0.5)
    Path("config.json").write_text("{}")
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2 and f"{option}: {args[-1]}: Read-only file system;" in capsys.readouterr().err


def test_what_is_in_the_way_is_named_with_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    made_run(Path("run"), 0.5)
    Path("afile").touch()
    Path("afolder").mkdir()
    for out, words in (("afile/page.html", "afile/page.html cannot be made, a file is in"), ("afolder", "is a directory")):
        with pytest.raises(SystemExit) as ended:
            main(["look", "run", "--out", out])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and f"--out: {out}" in said and words in said, said
