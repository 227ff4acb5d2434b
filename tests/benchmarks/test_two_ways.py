"""One recording of an agent, trained as a tree and as rows: the benchmark, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.tree import two_ways


@pytest.mark.slow
def test_both_ways_have_one_gradient(tmp_path: Path) -> None:
    two_ways.main(["--toy", "--repeats", "1", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "two_ways.json").read_text())
    rows = {row["way"]: row for row in report["rows"]}
    assert max(row["error_largest"] for row in rows.values()) < 1e-12
    assert rows["ours"]["tokens"] < rows["dense-leaf"]["tokens"] <= rows["dense"]["tokens"]
    assert report["calls"] == 10 and report["drift"].startswith("thoughts")
    assert (tmp_path / "two_ways.png").stat().st_size > 1000 and "| tree |" in (tmp_path / "two_ways.md").read_text()
