"""What really crosses the network in one optimizer step, counted by the operating system."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_step_moves_gradients_once_and_parameters_once(tmp_path: Path) -> None:
    if sys.platform != "linux" or subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0:
        pytest.skip("counting bytes needs a network namespace (Linux, root)")
    command = [sys.executable, "-m", "benchmarks.strategy", "--ranks", "2", "--parameters", "4", "--repeats", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "strategy_2.json").read_text())["rows"]
    ideals = {"DTAStrategy, bfloat16": 3.0, "DTAStrategy, float32": 4.0, "DTAStrategy, float32, Muon": 4.0}
    for name, ideal in ideals.items():  # half of it stays at home
        assert rows[name]["ideal_bytes"] == ideal
        assert rows[name]["bytes"] == pytest.approx(ideal, rel=0.05)
