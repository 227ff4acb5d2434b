"""Runs under torchrun: several agents, and ranks that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.helpers.ports import free_port

ROOT = Path(__file__).parents[4]
SCRIPT = Path(__file__).with_name("resume_script.py")
DEADLINE = 150.0

pytestmark = pytest.mark.slow  # processes of processes, each of which imports everything


def _torchrun(directory: Path, steps: int, *options: str) -> subprocess.Popen[str]:
    hidden = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), str(directory), str(steps)]
    return subprocess.Popen(
        command, env=environment, cwd=directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def _finish(process: subprocess.Popen[str]) -> str:
    try:
        output = process.communicate(timeout=DEADLINE)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def _norms(directory: Path) -> list[tuple[int, float]]:
    file = directory / "norms.jsonl"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def _left_behind(directory: Path) -> list[Any]:
    """Processes of a run in this directory, and what it left in its checkpoints."""
    processes = [p.info for p in psutil.process_iter(["pid", "cmdline"]) if str(directory) in (p.info["cmdline"] or [])]
    return processes + list((directory / "checkpoints").glob(".*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps on two ranks that belong to two agents, as on two nodes."""
    directory = tmp_path_factory.mktemp("undisturbed")
    nodes = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    agents = [_torchrun(directory, 12, *nodes, f"--node-rank={rank}") for rank in range(2)]
    for agent in agents:
        _finish(agent)
    return directory


def test_two_agents_train_as_one_run(undisturbed: Path) -> None:
    assert [step for step, _ in _norms(undisturbed)] == list(range(1, 13))
    assert sorted(path.name for path in (undisturbed / "checkpoints").iterdir()) == [
        "epoch=0-step=12.ckpt",
        "last.ckpt",
    ]
    assert _left_behind(undisturbed) == []


def test_a_killed_rank_costs_nothing_but_time(undisturbed: Path, tmp_path: Path) -> None:
    """After any of the first eight of twelve steps; again, should this process have slept through the others."""
    after = random.SystemRandom().randint(1, 8)
    for attempt in range(5):
        run = tmp_path / str(attempt)
        run.mkdir()
        process = _torchrun(run, 12, "--standalone", "--nproc-per-node=2", "--max-restarts=1")
        end = time.monotonic() + DEADLINE
        while len(_norms(run)) < after and time.monotonic() < end and process.poll() is None:
            time.sleep(0.001)
        was_killed = False
        with suppress(ProcessLookupError):
            os.kill(int((run / "rank1.pid").read_text()), signal.SIGKILL)
            was_killed = len(_norms(run)) < 12
        _finish(process)
        if was_killed:
            break
    assert was_killed
    expected = dict(_norms(undisturbed))
    seen = _norms(run)
    assert {step for step, _ in seen} == set(expected)
    assert all(norm == expected[step] for step, norm in seen), f"killed after {after} steps"
    first = torch.load(undisturbed / "parameters.pt", weights_only=True)
    second = torch.load(run / "parameters.pt", weights_only=True)
    assert all(torch.equal(second[name], first[name]) for name in first)
    assert _left_behind(run) == []


def test_without_restarts_a_killed_rank_ends_the_run_by_name(tmp_path: Path) -> None:
    process = _torchrun(tmp_path, 100_000, "--standalone", "--nproc-per-node=2")
    end = time.monotonic() + DEADLINE
    while len(_norms(tmp_path)) < 3 and time.monotonic() < end and process.poll() is None:
        time.sleep(0.01)
    os.kill(int((tmp_path / "rank0.pid").read_text()), signal.SIGKILL)
    output = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode != 0
    assert "rank 0" in output and ("no longer answers" in output or "when it died" in output), output
    assert [p for p in _left_behind(tmp_path) if not isinstance(p, Path)] == []
