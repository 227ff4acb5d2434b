"""The benchmark of agents' processes at toy size: every installed agent is played both ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rollouts import agents


@pytest.mark.slow
def test_the_whole_page(tmp_path: Path) -> None:
    report = agents.main(["--quick", "--out", str(tmp_path)])
    assert report["rows"].keys() | set(report["left_out"]) == agents.AGENTS.keys() and "openai" in report["rows"]
    rows = report["rows"].values()
    assert all(row[kind][which][0] > 0 for row in rows for kind in ("alone", "forked") for which in ("cpu", "wall"))
    assert (tmp_path / "agents.md").read_text() == agents.markdown(report)
