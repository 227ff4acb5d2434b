"""The rollout benchmark at toy size on a real server: every figure is there and the settings did the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.rollouts import __main__ as rollouts
from tests.datamodules.inference.sglang.real_servers.servers import skip_unless_wanted
from tests.helpers.doubles import conversations

pytestmark = pytest.mark.slow


def test_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_wanted()
    monkeypatch.setattr("benchmarks.rollouts.runs.TASKS", [0, 1, 2, 3])
    made = conversations(tmp_path / "made.npz")
    rollouts.main(["--quick", "--data", str(made), "--out", str(tmp_path)])
    result = json.loads((tmp_path / "rollouts.json").read_text())
    speed = result["throughput"]
    for name in ("ours", "bare", "gateway"):
        assert speed["tokens_per_second"][name]["min"] > 0 and speed["client_cpu_seconds"][name]["min"] > 0
    (own,), (other,), (through,) = (speed["tokens_per_second"][name]["runs"] for name in ("ours", "bare", "gateway"))
    assert speed["ratio"]["median"] == pytest.approx(own / other)
    assert speed["gateway_ratio"]["median"] == pytest.approx(through / own)
    for method in ("distributed", "disk", "tensor"):
        row = result["downtime"]["methods"][method]
        assert row["updates"] == 1 and 0 < row["update_s"]["min"] <= row["downtime_s"]["min"]
    runs = result["runs"]["settings"]
    assert list(runs) == ["synchronous, dense-leaf", "synchronous, tree", "asynchronous, tree"]
    for row in runs.values():
        parts = sum(row[name]["median"] for name in ("wait", "prepare", "tree", "optimizer", "sync", "other"))
        assert parts == pytest.approx(row["wall"]["median"], rel=0.05) and row["failed"]["max"] == 0
        same = next(iter(runs.values()))
        for tokens in ("tokens_dense", "tokens_leaf", "tokens_tree"):
            assert row[tokens]["median"] == pytest.approx(same[tokens]["median"], rel=0.2)
    text = (tmp_path / "rollouts.md").read_text()
    assert (
        text.count("\n## ") == 4
        and "load averages" in text
        and (tmp_path / "rollouts_latency.png").stat().st_size > 5000
    )


def test_finished_fits_are_put_side_by_side(tmp_path: Path) -> None:
    for engine, last in (("datamodules.inference.EmbeddedEngine", 0.875), ("datamodules.inference.sglang.X", 0.5)):
        run = tmp_path / engine
        run.mkdir()
        (run / "config.yaml").write_text(f"data: {{init_args: {{engine: {{class_path: {engine}}}}}}}\n")
        (run / "summary.json").write_text(json.dumps({"steps": 100, "seconds": 12.4}))
        (run / "metrics.csv").write_text(f"step,loss,val/accuracy\n0,,0.25\n0,1.0,\n99,1.0,\n100,,{last}\n")
    rollouts.main(["--quickstart", *map(str, sorted(tmp_path.iterdir())), "--out", str(tmp_path / "out")])
    text = (tmp_path / "out" / "rollouts.md").read_text()
    assert "| engine | steps | seconds | after 0 | after 100 |" in text
    assert "| EmbeddedEngine | 100 | 12 | 0.250 | 0.875 |" in text and "| X | 100 | 12 | 0.250 | 0.500 |" in text
