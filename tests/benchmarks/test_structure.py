"""The structure benchmark at toy size: every figure is there, and what can be counted is right."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.tree import structure


def test_every_figure(tmp_path: Path) -> None:
    structure.main(["--toy", "--repeats", "1", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "structure.json").read_text())
    assert [row["case"] for row in report["build"]] == ["turns 8x4", "whole 8x4", "think 8x4"]
    for row in report["build"]:
        assert row["tokens"] > row["tree_tokens"] > 0 and row["tokens_per_second"] > 0 and row["peak_over_tokens"] > 0
    crowd = report["plan"][-1]
    turns = report["build"][0]
    assert crowd["sequences"] == 200 and crowd["tree_tokens"] > 1.5 * turns["tree_tokens"]  # copies share nothing
    assert all(row["balance"] >= 1 - 1e-9 for row in report["partition"])
    assert (tmp_path / "structure.md").read_text().count("\n## ") == 3
