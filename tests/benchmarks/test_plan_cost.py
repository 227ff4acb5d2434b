"""The plan-cost benchmark end to end at toy size, and its rank correlation against known values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.tree import plan_cost
from benchmarks.tree.plan_cost import spearman


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)  # ties share a rank


@pytest.mark.slow
def test_toy_run(tmp_path: Path) -> None:
    report = plan_cost.main(["--toy", "--calibrate", "--repeats", "1", "--workloads", "think", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "plan_cost.json").read_text()) == report
    (case,) = report["cases"]
    assert report["plans"] == len(case["plans"]) > 10 and -1 <= report["spearman"] <= 1
    kinds = [row["plan"] for row in case["plans"]]
    assert any("path at a time" in kind for kind in kinds) and any("checkpointed" in kind for kind in kinds)
    assert all(row["predicted_seconds"] > 0 and row["measured_seconds"] > 0 for row in case["plans"])
    assert "| path at a time" in (tmp_path / "plan_cost.md").read_text()
