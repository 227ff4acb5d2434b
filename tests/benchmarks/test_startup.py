"""The benchmark of start-up: it waits for what a user sees, and says so where that never comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import startup


@pytest.mark.slow
def test_a_command_without_progress_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with code 2 and no progress"):
        startup.measured(["fit", "--config", "nowhere.yaml"], startup.PROGRESS, tmp_path / "run", 60.0)


@pytest.mark.slow
def test_the_whole_page(tmp_path: Path) -> None:
    report = startup.main(["--out", str(tmp_path), "--repeats", "1", "--left_out", "0"])
    assert report["rows"].keys() == startup.cases(tmp_path).keys() >= startup.WANTED.keys()
    assert all(0 < one < 100 for row in report["rows"].values() for values in row.values() for one in values)
    assert (tmp_path / "startup.md").read_text() == startup.markdown(report)
