"""The Triton kernels as the GPU suite looks at them, without a GPU: compiled, and interpreted beside plain code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from app.tree.attention import interval
from benchmarks.gpu.interval import check_interval


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("capability", "options"),
    [("9.0", []), ("9.0", ["--window", "512", "--softcap", "30"]), ("8.6", ["--window", "512"]), ("10.0", [])],
)
def test_kernels_compile_for_gpus(tmp_path, capability: str, options: list[str]) -> None:
    """To machine code, which needs no GPU: types, layouts and shared memory. On Hopper little spilling where there is
    neither window nor soft-capping (none but in the gradients of keys), and room for what its matrix units do."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.gpu.compiled", "--capability", capability, "--out", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, timeout=880)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split(" | ") for line in (tmp_path / "compiled.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 3 * 4
    if capability == "9.0" and not options:
        spilled = [(row[2], int(row[5])) for row in rows[1:] if int(row[1]) <= 128]
        assert all(count <= (40 if name.startswith("keys") else 0) for name, count in spilled)
        assert all(float(row[9].rstrip(" |")) > 0.8 for row in rows[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_what_the_gpu_suite_asks_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the blocks of a GPU, and whole ones among them."""
    monkeypatch.setattr(interval, "blocks_of", lambda q, window: interval.fitting(128, (9, 0), window))
    found = check_interval(torch.device("cpu"), (16,))
    assert [len(row["over_sdpa"]) for row in found] == [6, 6] and all(row["ok"] for row in found)
    monkeypatch.setattr(interval._operators(), "INTERPRETED", False)
    assert all(
        "needs a CUDA device" in row["left_out"] and row["ok"] for row in check_interval(torch.device("cpu"), (16,))
    )
