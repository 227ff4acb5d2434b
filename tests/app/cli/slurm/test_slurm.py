"""configs/cluster/slurm.sbatch under a scheduler that plays SLURM's part: the end of the time limit loses nothing, and
servers on nodes of their own are found, have a key, and end with the run."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.batch import StepHandle
from tests.app.cli.slurm import scheduler
from tests.helpers.tiny_run import TinyData, make_batch

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = ROOT / "configs" / "cluster" / "slurm.sbatch"
STEPS = 40


class Slow(TinyData):
    """Batches that take their time; the fourth step of the first start finds that the job's time is up."""

    def steps(self) -> Iterator[StepHandle]:
        trainer = self.trainer
        assert trainer is not None
        for number in range(self.batches):
            if trainer.global_step == 4 and os.environ["SLURM_RESTART_COUNT"] == "0":
                (Path(os.environ["FAKE_SLURM_SPOOL"]) / "time_is_up").touch()
            if os.environ["SLURM_RESTART_COUNT"] == "0" and trainer.global_step >= 4:
                time.sleep(0.5)
            yield StepHandle(make_batch([0.0, 1.0], number), 0, 1)


CONFIG = f"""
model: {{class_path: tests.app.cli.signals.Interruptible}}
data: {{class_path: tests.app.cli.slurm.test_slurm.Slow, init_args: {{batches: {STEPS}, validate: false}}}}
trainer:
  max_steps: {STEPS}
  accelerator: cpu
  limit_val_batches: 0
"""


def submit(folder: Path, program: str = f'exec "{sys.executable}" "$@"') -> subprocess.CompletedProcess[str]:
    """Submits the script in `folder`, whose interpreter is the shell script `program`; waits until the job is over."""
    (folder / "toy.yaml").write_text(CONFIG)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").write_text(f"#!/bin/bash\n{program}\n")
    (folder / ".venv" / "bin" / "python").chmod(0o755)
    environment = scheduler.install(folder / "commands", folder) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, scheduler.__file__, "sbatch", str(folder), str(SCRIPT), "toy.yaml"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=550)


@pytest.mark.slow
def test_the_end_of_the_time_limit_loses_nothing(tmp_path: Path) -> None:
    done = submit(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "toy" / "job-77"
    first, second = (list(csv.DictReader(path.open())) for path in (run / "metrics_1.csv", run / "metrics.csv"))
    steps = [[int(row["step"]) for row in rows if row.get("reward")] for rows in (first, second)]
    assert len(steps[0]) >= 4 and len(steps[0]) < STEPS, "it was ended on the way"
    assert steps[0] + steps[1] == list(range(STEPS)), "no step is lost, none is made twice"
    assert "SIGTERM" in done.stderr and "starting from the beginning" in done.stderr


# A program in place of the run: what the script makes of its end.


def test_a_run_that_is_asked_to_end_is_queued_again_and_then_ends(tmp_path: Path) -> None:
    saves = "trap 'echo saved; exit 1' TERM; touch time_is_up; while true; do sleep 0.05; done"
    done = submit(tmp_path, f'echo "$@"; [ "$SLURM_RESTART_COUNT" = 1 ] && exit 0; {saves}')
    assert done.returncode == 0, done.stderr
    first, saved, second = done.stdout.splitlines()
    assert saved == "saved" and first == second, "the same command goes on"
    assert "fit --config toy.yaml --run_dir runs/toy/job-77 --ckpt_path last" in first


def test_a_run_that_finishes_just_then_is_not_queued_again(tmp_path: Path) -> None:
    done = submit(tmp_path, "echo start; trap 'exit 0' TERM; touch time_is_up; while true; do sleep 0.05; done")
    assert (done.returncode, done.stdout) == (0, "start\n") and not (tmp_path / "requeued").exists()


def test_a_failure_is_not_queued_again(tmp_path: Path) -> None:
    done = submit(tmp_path, "echo start; exit 3")
    assert (done.returncode, done.stdout) == (3, "start\n") and not (tmp_path / "requeued").exists()


def test_servers_on_nodes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBORIST_MODEL", "models/one")
    monkeypatch.setenv("ARBORIST_SERVERS_PER_NODE", "2")
    monkeypatch.delenv("ARBORIST_SGLANG_API_KEY", raising=False)
    (tmp_path / "serving_nodes").write_text("node1,node2")
    serves = "trap 'echo ended >> served; exit 0' TERM; touch serving; while true; do sleep 0.05; done"
    trains = "while [ ! -e serving ]; do sleep 0.05; done"
    told = 'echo "$@" >> words; echo "$ARBORIST_SGLANG_API_KEY" >> keys'
    done = submit(tmp_path, f'{told}; case "$*" in *" serve "*) {serves};; *) {trains};; esac')
    assert done.returncode == 0, done.stderr
    serving, training = sorted((tmp_path / "words").read_text().splitlines(), key=lambda line: " fit " in line)
    port = 20000 + 77
    assert serving.endswith(f"serve --model models/one --host 0.0.0.0 --port {port} --replicas 2 --tensor_parallel 1")
    urls = [f"http://node{node}:{port + server}" for node in (1, 2) for server in (0, 1)]
    assert f"--data.engine.init_args.urls [{','.join(urls)}]" in training and "--nnodes 1:1" in training
    one, other = (tmp_path / "keys").read_text().split()
    assert one == other and len(one) == 48 and one not in serving + training
    assert (tmp_path / "served").read_text() == "ended\n", "the servers end with the run"


def test_servers_without_a_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARBORIST_MODEL", raising=False)
    (tmp_path / "serving_nodes").write_text("node1")
    done = submit(tmp_path, "echo start")
    assert done.returncode != 0 and "ARBORIST_MODEL: name the model directory" in done.stderr and not done.stdout


def test_servers_are_there_until_the_run_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBORIST_MODEL", "models/one")
    (tmp_path / "serving_nodes").write_text("node1")
    serves = "trap 'echo served >> ended; exit 0' TERM; touch serving; while true; do sleep 0.05; done"
    saves = "trap 'sleep 0.5; echo saved >> ended; exit 1' TERM; while [ ! -e serving ]; do sleep 0.05; done"
    again = '[ "$SLURM_RESTART_COUNT" = 1 ] && exit 0'
    trains = f"{again}; {saves}; touch time_is_up; while true; do sleep 0.05; done"
    done = submit(tmp_path, f'case "$*" in *" serve "*) {serves};; *) {trains};; esac')
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ended").read_text().split()[:2] == ["saved", "served"]
