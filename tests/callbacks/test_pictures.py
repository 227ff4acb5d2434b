"""Metrics of a run that was gone on with often are read in time that its rows alone decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from callbacks import pictures
from callbacks.pictures import read_launches


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
