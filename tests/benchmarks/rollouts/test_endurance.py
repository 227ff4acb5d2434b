"""What a long run holds: growth is told from noise, and one case at toy size, from the warm start to the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rollouts import endurance


def looks(mib: list[float]) -> list[dict]:
    """A look every ten steps: a trainer that holds `mib`, and two workers that hold 5 each."""
    workers = [[pid, "worker", 5.0, 3, 1] for pid in (2, 3)]
    return [
        {"step": 10 * i, "seconds": 2.0 * i, "count": 3, "processes": [[1, "trainer", one, 20 + i // 40, 4], *workers]}
        for i, one in enumerate(mib)
    ]


def test_growth_is_that_of_the_last_third() -> None:
    """What the first steps load, and a single large batch, are not taken for a leak."""
    loading = [100.0 + 10 * min(i, 30) for i in range(80)]
    found = endurance.outcome(looks([*loading[:60], 900.0, *loading[61:]]))
    assert found["kinds"]["trainer"]["mib_per_1000_steps"] == 0.0
    assert found["kinds"]["worker"]["processes"] == 2 and found["kinds"]["worker"]["mib_end"] == 10.0
    assert found["seconds_a_step"] == pytest.approx([0.2] * 4, abs=0.01)


def test_a_leak_is_found_in_noise() -> None:
    leaking = [100.0 + 0.05 * i + (3.0 if i % 7 == 0 else 0.0) for i in range(80)]
    row = endurance.outcome(looks(leaking))["kinds"]["trainer"]
    assert row["mib_per_1000_steps"] == pytest.approx(5.0, rel=0.1)
    assert (row["files_before"], row["files_end"]) == (21, 21)


@pytest.mark.slow
def test_a_case_at_toy_size(tmp_path: Path) -> None:
    small = ["--minutes", "0.6", "--look_s", "1", "--every", "10", "--warm_steps", "20"]
    out = tmp_path / "out"
    report = endurance.main(["--only", "sums", *small, "--runs", str(tmp_path / "runs"), "--out", str(out)])
    found = report["cases"]["sums"]
    assert found["steps"] > 20 and found["kinds"]["trainer"]["mib_end"] > 100
    assert (out / "endurance.md").read_text() == endurance.markdown(report) and (out / "endurance.png").exists()
