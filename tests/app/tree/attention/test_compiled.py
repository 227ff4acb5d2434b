"""The Triton kernels as the GPU suite looks at them, without a GPU: compiled, and interpreted beside plain code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from app.tree import PrefixTree
from app.tree.attention import interval
from app.tree.planning.planner import plan
from benchmarks.gpu.interval import check_interval


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("capability", "options"),
    [("9.0", []), ("9.0", ["--window", "512", "--softcap", "30"]), ("8.6", ["--window", "512"]), ("10.0", [])],
)
def test_kernels_compile_for_gpus(tmp_path, capability: str, options: list[str]) -> None:
    """To machine code, which needs no GPU: types, layouts and shared memory. On Hopper next to no spilling where there
    is neither window nor soft-capping, and room for what its matrix units do."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.gpu.compiled", "--capability", capability, "--out", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, timeout=880)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split(" | ") for line in (tmp_path / "compiled.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 3 * 4
    if capability == "9.0" and not options:
        assert all(int(row[5]) <= 8 for row in rows[1:] if int(row[1]) <= 128)
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


@pytest.mark.usefixtures("interpreted")
def test_what_is_timed_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kernel, gradients of keys too, which Triton has made wrong code of: a shape whose results are others."""
    from benchmarks.gpu import blocks

    shapes = (interval.Shape(16, 16, 4, 2), interval.Shape(16, 16, 4, 3))
    monkeypatch.setattr(blocks, "milliseconds", lambda run: (run(), 1.0)[1])
    monkeypatch.setattr(blocks, "SHAPES", dict.fromkeys(blocks.SHAPES, shapes))
    tree = PrefixTree.build([[*range(9), i, *range(5)] for i in range(2)])
    chunks = [blocks.Chunk(tree, one, (2, 1), 16, torch.device("cpu")) for one in plan(tree, 12, 12).chunks]
    right = blocks.Chunk.run

    def wrong(chunk: blocks.Chunk, kernel: str, shape: interval.Shape) -> None:
        right(chunk, kernel, shape)
        if shape is shapes[1]:
            own = {"f": [chunk.out], "q": [chunk.grad_q]}.get(kernel[0], [*chunk.grads, *chunk.path_grads])
            for made in own:
                made.mul_(1.5)

    monkeypatch.setattr(blocks.Chunk, "run", wrong)
    for kernel in blocks.SHAPES:
        first, second = blocks.measured(chunks, kernel)
        assert first["difference"] == 0.0 and second["difference"] == pytest.approx(0.5, rel=0.05)
