"""Metrics of a run that was gone on with often are read in time that its rows alone decide; in a hurry, no more than
can be read in it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from app.interruption import End, Interrupted
from callbacks import base, pictures
from callbacks.pictures import read_launches
from tests.helpers.tiny_run import TinyData, TinyModule, trainer


class Step(float):
    """A step that counts what it is compared with."""

    compared = 0

    def __lt__(self, other: float) -> bool:
        Step.compared += 1
        return float(self) < float(other)


def test_a_launch_does_not_look_at_all_rows_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, rows, repeated = 64, 100, 10
    read = pictures.read_metrics

    def counting(path: Path) -> pictures.Series:
        return {name: ([Step(step) for step in steps], values) for name, (steps, values) in read(path).items()}

    monkeypatch.setattr(pictures, "read_metrics", counting)
    for number in range(launches):
        first = number * (rows - repeated)
        lines = "".join(f"0,{number},{step}\n" for step in range(first, first + rows))
        name = "metrics.csv" if number == launches - 1 else f"metrics_{number + 1}.csv"
        (tmp_path / name).write_text(f"epoch,reward,step\n{lines}")
    steps, values = read_launches(tmp_path)["reward"]
    assert steps == list(range(1, launches * (rows - repeated) + repeated + 1))
    assert values[:90] == [0.0] * 90 and values[90:100] == [1.0] * 10 and values[-1] == launches - 1
    assert Step.compared < 16 * launches  # a logarithm each


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_long_run_that_is_preempted_draws_when_it_ends(
    tmp_path: Path, signum: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C leaves time for it."""

    class Ends(TinyModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise Interrupted(signum, End(2, None))

    for most, draws in ((16, True), (0, signum == signal.SIGINT)):
        monkeypatch.setattr(base, "AT_ONCE_MIB", most)
        run = tmp_path / str(most)
        with pytest.raises(Interrupted):
            trainer(run, pictures.Pictures()).fit(Ends(), datamodule=TinyData(batches=3))
        assert (run / "reward_curve.png").exists() is draws
        assert ("Pictures: not drawn, as SIGTERM" in capsys.readouterr().out) is not draws
