"""Runs are read as far as they are: those going on, those gone on with, those whose files are broken."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from app.cli import main
from callbacks.report.runs import MOST_BATCHES, is_run, read_run


def write(path: Path, rows: list[object], end: str = "\n") -> None:
    path.write_text("\n".join(json.dumps(row) for row in rows) + end)


def test_a_run_that_was_gone_on_with_is_one_curve(tmp_path: Path) -> None:
    (tmp_path / "metrics_1.csv").write_text("epoch,reward,step\n0,1,0\n0,2,1\n0,3,2\n")
    (tmp_path / "metrics.csv").write_text("epoch,loss,reward,step\n0,7,20,1\n0,8,30,2\n")  # from after step 1
    batches = [{"kind": "batch", "step": step, "batch": number} for number, step in enumerate([1, 2, 3, 2, 3])]
    write(tmp_path / "report.jsonl", [*batches, {"kind": "held_out", "step": 3, "sets": {}}])
    found = read_run(tmp_path)
    assert is_run(tmp_path)
    assert found.series == {"reward": ([1, 2, 3], [1, 20, 30]), "loss": ([2, 3], [7, 8])}
    assert [(row["step"], row["batch"]) for row in found.batches] == [(1, 0), (2, 3), (3, 4)]
    assert found.notes == [] and len(found.held_out) == 1


def test_what_was_played_behind_a_restart_is_no_part_of_the_run(tmp_path: Path) -> None:
    """Before the restart has played anything itself, too, and where what it plays first lies further on."""

    def row(kind: str, step: int) -> dict[str, object]:
        return {"kind": kind, "step": step}

    lost = [row("held_out", 4), row("batch", 4), row("batch", 8), row("held_out", 8), row("batch", 10)]
    write(tmp_path / "report.jsonl", [*lost, row("goes_on", 4)])
    found = read_run(tmp_path)
    assert ([one["step"] for one in found.batches], [one["step"] for one in found.held_out]) == ([4], [4])
    write(tmp_path / "report.jsonl", [*lost, row("goes_on", 4), row("batch", 16), row("held_out", 12)])
    found = read_run(tmp_path)
    assert ([one["step"] for one in found.batches], [one["step"] for one in found.held_out]) == ([4, 16], [4, 12])


def test_a_launch_that_logged_nothing_takes_nothing_away(tmp_path: Path) -> None:
    (tmp_path / "metrics_1.csv").write_text("epoch,reward,step\n0,1,0\n0,2,1\n")
    read = {"reward": ([1.0, 2.0], [1.0, 2.0])}
    assert read_run(tmp_path).series == read  # killed before its first step
    for empty in ("", "epoch,reward,step\n", "epoch,reward,st"):
        (tmp_path / "metrics.csv").write_text(empty)
        assert read_run(tmp_path).series == read


def test_a_row_that_was_cut_is_left_out(tmp_path: Path) -> None:
    """Wherever the disk was full: in a number, which would read as another, or behind it."""
    rows = "epoch,reward,step\r\n0,0.25,10\r\n0,0.75,11\r\n"
    for length in range(rows.index("10\r\n") + 4, len(rows)):
        (tmp_path / "metrics.csv").write_bytes(rows[:length].encode())
        assert read_run(tmp_path).series == {"reward": ([11], [0.25])}
    (tmp_path / "metrics.csv").write_bytes(rows.encode())
    assert read_run(tmp_path).series == {"reward": ([11, 12], [0.25, 0.75])}


@pytest.mark.parametrize("row", ["0,abc,1", "0,1,", "0,1", "0,1,2,3"])
def test_a_row_that_is_none_is_named(tmp_path: Path, row: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.csv").write_text(f"epoch,reward,step\n0,1,0\n{row}\n0,3,2\n")
    with pytest.raises(SystemExit) as ended:
        main(["look", str(tmp_path)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said
    assert f"{tmp_path / 'metrics.csv'}, line 3: no row of metrics" in said


def test_a_line_that_is_being_written_is_left_and_broken_ones_are_counted(tmp_path: Path) -> None:
    (tmp_path / "report.jsonl").write_text('{"kind": "batch", "step": 1}\n[]\nnonsense\n{"kind": "ba')
    (tmp_path / "config.yaml").write_text("a: [")
    (tmp_path / "summary.json").write_text('{"seconds": 3}')
    found = read_run(tmp_path)
    assert len(found.batches) == 1 and found.summary == {"seconds": 3}
    assert found.notes == ["report.jsonl: 2 lines cannot be read", "config.yaml cannot be read"]


def test_of_many_batches_some_are_read_and_the_others_counted(tmp_path: Path) -> None:
    """Each launch leaves its last one. In memory are no more than are shown, whatever the file holds."""
    count, text = 300, "x" * 100_000
    with (tmp_path / "report.jsonl").open("w") as file:
        for number in range(1, count + 1):
            row = {"kind": "batch", "step": 2 * number - 1, "batch": number, "tree": {"text": [text]}}
            lost = {"kind": "batch", "step": 2 * number, "batch": number + 1}
            goes_on = {"kind": "goes_on", "step": 2 * number - 1}
            file.writelines(f"{json.dumps(one)}\n" for one in (row, lost, goes_on))
    read_run(tmp_path)  # what is made once
    tracemalloc.start()
    found = read_run(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    shown = [one["batch"] for one in found.batches]
    assert [one["step"] for one in found.batches] == [2 * number - 1 for number in shown]
    assert len(shown) == MOST_BATCHES and {1, 2, 4, 8, 16, 32, 64, 128, 256, count} < set(shown)
    assert max(after - before for before, after in pairwise(shown)) <= count / 10  # well spread
    assert all(one["tree"]["text"] == [text] for one in found.batches)
    assert found.notes == [
        "report.jsonl: 276 of 300 batches are not shown; the last, 1, 2, 4, 8, ... and some between them are"
    ]
    assert peak < 2 * MOST_BATCHES * len(text)


@pytest.mark.parametrize("numbers", [[0] * 100, ["a"] * 100, [2**k for k in range(100)], [None] * 100])
def test_batches_are_few_whatever_their_numbers(tmp_path: Path, numbers: list[object]) -> None:
    rows = [{"kind": "batch", "step": step, "batch": number} for step, number in enumerate(numbers)]
    write(tmp_path / "report.jsonl", list(rows))
    steps = [one["step"] for one in read_run(tmp_path).batches]
    assert len(steps) <= MOST_BATCHES and steps == sorted(set(steps)) and (steps[0], steps[-1]) == (0, 99)


def test_a_run_without_the_callback_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,reward,step\n0,1,0\n")
    assert "Report callback" in read_run(tmp_path).notes[0]
    assert not is_run(tmp_path / "elsewhere")
