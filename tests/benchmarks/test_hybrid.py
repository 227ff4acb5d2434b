"""A hybrid beside a model of attention alone, over trees: the benchmark, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.tree import hybrid


@pytest.mark.slow
def test_both_families_are_measured_against_every_baseline(tmp_path: Path) -> None:
    hybrid.main(["--toy", "--repeats", "1", "--check", "2", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "hybrid.json").read_text())
    assert [result["family"] for result in report["results"]] == ["qwen3_5", "llama"] * len(hybrid.DRAWN)
    for result in report["results"]:
        assert result["systems"]["ours"]["gradient_error"]["largest"] < 1e-4
        ratios = hybrid.summary(result)
        assert set(ratios) == {"dense", "dense-leaf", "path-at-a-time"}
        assert ratios["dense"]["tokens"] > 1.5 and ratios["path-at-a-time"]["tokens"] == 1
        assert all(row["of_tokens"] == row["ratio"] / row["tokens"] for row in ratios.values())
    text = (tmp_path / "hybrid.md").read_text()
    assert text.count("| qwen3_5 | thoughts") == len(hybrid.DRAWN)


def test_thoughts_are_dropped_from_what_comes_later() -> None:
    """Every turn begins with all that was said before, and shares nothing of a thought; what it adds is scored."""
    case = hybrid.dropped_thoughts(2, 3, 100)
    assert len(case.sequences) == 6 and case.tree().num_leaf_tokens == case.tree().num_dense_tokens
    for tokens, mask in zip(case.sequences, case.scored, strict=True):
        assert len(tokens) == len(mask) and not mask[:300].any() and mask[-30:].all()
