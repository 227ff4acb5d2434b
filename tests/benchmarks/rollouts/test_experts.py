"""The benchmark of recorded experts at toy size: records bring the trainer nearer to the sampler, by any router."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.rollouts import experts

pytestmark = pytest.mark.slow


def test_records_bring_the_trainer_nearer(tmp_path: Path) -> None:
    options = ["--seeds", "1", "--requests", "4", "--layers", "3", "--repeats", "1"]
    experts.main([*options, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "experts.json").read_text())
    assert [row["family"] for row in result["rows"]] == [name for name in experts.FAMILIES for _ in experts.TRAINERS]
    for row in result["rows"]:
        assert 0 < row["with"]["experts"] < 0.1
        assert 0 < row["with"]["k3"] < row["without"]["k3"] and row["with"]["mean"] < row["without"]["mean"]
    assert set(result["cost"]) == set(experts.FAMILIES) and all(value > 0 for value in result["cost"].values())
    assert "| GPT-OSS | float32, routers moved | " in (tmp_path / "experts.md").read_text()
