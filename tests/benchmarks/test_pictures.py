"""The benchmark of pictures over trees, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.tree import pictures


@pytest.mark.slow
def test_every_batch_is_right_and_the_tower_runs_once_a_picture(tmp_path: Path) -> None:
    pictures.main(["--toy", "--repeats", "1", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "pictures.json").read_text())
    assert [row["batch"] for row in report["results"]] == ["geometry", "counting", "navigation"] * 2
    for row in report["results"]:
        assert row["gradient_error"] < 2e-6
        assert set(row["against_ours"]) == {"dense", "dense-leaf"}
        runs = {name: row["counts"][name]["tower_runs"] for name in ("dense", "ours")}
        assert runs == {"geometry": dict(dense=8, ours=1), "counting": dict(dense=32, ours=1)}.get(
            row["batch"], dict(dense=6, ours=3)
        )
    assert "| navigation | 1 x 2 x 2 | trained |" in (tmp_path / "pictures.md").read_text()
