"""The progress line: plain lines without a terminal, one live line with one, on rank 0 only."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import termios
from pathlib import Path

import pytest

from callbacks import Progress, ValidateEnds
from tests.helpers.tiny_run import TinyData, TinyModule, trainer


def test_plain_lines_show_every_step_and_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [Progress(seconds=0.0), ValidateEnds()]
    fit = trainer(tmp_path, *callbacks, enable_progress_bar=True, max_epochs=2)
    fit.fit(TinyModule(), datamodule=TinyData(batches=2))
    lines = capsys.readouterr().err.splitlines()
    steps = [line for line in lines if line.startswith("step ") and "s/step" in line]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    assert "reward 4.000" in steps[-1] and "loss" not in steps[-1]
    assert [line for line in lines if "val/" in line] == [
        "step 0: val/accuracy 0.000",
        "step 4: val/accuracy 4.000",
    ]


def test_what_a_module_prints_stands_beside_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Talking(TinyModule):
        def on_train_start(self) -> None:
            self.print("hello")

    trainer(tmp_path, Progress(), enable_progress_bar=True).fit(Talking(), datamodule=TinyData(batches=2))
    assert "hello" in capsys.readouterr().err.splitlines()


def test_few_lines_when_steps_are_fast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit = trainer(tmp_path, Progress(seconds=1000.0), enable_progress_bar=True)
    fit.fit(TinyModule(), datamodule=TinyData(batches=20))
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines() if "s/step" in line] == ["20/20"]


@pytest.mark.parametrize("columns", [100, 0])
def test_terminal_gets_one_live_line(tmp_path: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        fit = trainer(tmp_path, Progress(), enable_progress_bar=True)
        fit.fit(TinyModule(), datamodule=TinyData(batches=5))
        terminal.flush()
        shown = ""
        while "5/5" not in shown and select.select([ours], [], [], 10.0)[0]:  # a terminal hands on what it has
            shown += os.read(ours, 1 << 20).decode()
    os.close(ours)
    if columns:
        assert "\r" in shown and "training 5/5" in shown and "reward 5.000" in shown
    else:  # a terminal of no width still says something
        assert "step 5/5" in shown
