"""The plan-cost benchmark end to end at toy size, and its rank correlation against known values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.tree.attention.part_attention import PartBackend
from app.tree.planning.cost import ModelShape
from app.tree.planning.timing import CPU_RATES, TimeModel
from benchmarks.common.workloads import conversations, make_case
from benchmarks.tree import hybrid, plan_cost
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


@pytest.mark.slow
def test_plans_of_a_hybrid(tmp_path: Path) -> None:
    """Its scans are part of the prediction: the same plans of the same model take longer with them than without."""
    arguments = ["--toy", "--hybrid", "--repeats", "1", "--workloads", "think", "--name", "scans"]
    report = plan_cost.main([*arguments, "--out", str(tmp_path)])
    assert json.loads((tmp_path / "scans.json").read_text()) == report and " --hybrid" in report["command"]
    (case,) = report["cases"]
    time_model = TimeModel(ModelShape.of(hybrid.build("qwen3_5", True).config), CPU_RATES, PartBackend())
    bare = replace(time_model, shape=replace(time_model.shape, states=None))
    source, recorded = conversations(None, True)
    tree = make_case(source, recorded, "think", 1, 2, 512).tree()
    longest = int(tree.sequence_length.max())
    plans = plan_cost.spread_of_plans(tree, longest, time_model.shape.checkpoint_share())
    assert [row["plan"] for row in case["plans"]] == list(plans)
    for row, execution in zip(case["plans"], plans.values(), strict=True):
        assert (
            row["predicted_seconds"]
            == time_model.predict(tree, execution.chunks)
            > bare.predict(tree, execution.chunks)
        )
