"""The scaling tables: formulas by hand, and the command at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.scaling import BETWEEN, NODE, Model, shards, zero1


def test_bytes_and_seconds_by_hand() -> None:
    model = Model("x", parameters=1_000, layers=800, width=1)
    assert zero1(model, 8) == (7_500, pytest.approx(6 * 1_000 * 7 / 8 / NODE))
    assert zero1(model, 64) == (6_187.5, pytest.approx(6 * 1_000 * 63 / 64 / BETWEEN))
    held, inside, between = shards(model, 64, chunks=3.0)
    assert held == 2_000
    assert inside == pytest.approx(3 * 8 * 800 * 7 / 8 / NODE)
    assert between == pytest.approx(8 * 1_000 / 8 * 7 / 8 / BETWEEN)
    assert shards(model, 8, chunks=3.0)[2] == 0


@pytest.mark.slow
def test_toy_run(tmp_path: Path) -> None:
    report = scaling.main(["--toy", "--sizes", "2x2", "--gpus", "8", "16", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "scaling.json").read_text()) == report
    by_place = {(one["gpus"], one["group"]): one for one in report["splits"]}
    assert by_place[8, 8]["slowest"] == by_place[8, 8]["all"] == 1.0  # a group runs the whole tree
    assert by_place[8, 1]["slowest"] > by_place[16, 8]["slowest"] > 1.0
    eight = Model.of("8B")
    assert 8.1e9 < eight.parameters < 8.3e9 and eight.layers < eight.parameters - 2 * 151936 * 4096 + 5e3
    assert "| 70B | 16 |" in (tmp_path / "scaling.md").read_text()
