"""`fit` under torchrun with `--nnodes MIN:MAX`: a node is lost, and the run goes on with the others."""

from __future__ import annotations

import csv
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.ports import free_port

ROOT = Path(__file__).resolve().parents[4]
STEPS = 60
DEADLINE = 240.0

pytestmark = pytest.mark.slow  # agents, ranks, and a rendezvous that waits for who is lost

CONFIG = f"""
trainer:
  max_steps: {STEPS}
  accelerator: cpu
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{every_n_train_steps: 5, save_last: true}}
data: {{init_args: {{batch_size: 8}}}}
"""


# torchrun, which says that it is there once it has imported what takes long, and begins when it is told to.
AGENT = """
import sys, time
from pathlib import Path
from torch.distributed import run
Path(sys.argv[1]).touch()
while not Path(sys.argv[2]).exists():
    time.sleep(0.02)
run.main(sys.argv[3:])
"""


def agent(directory: Path, port: int, there: str, begins: str) -> subprocess.Popen[str]:
    hidden = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    rendezvous = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
    rendezvous += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=1", "--rdzv-conf=last_call_timeout=8"]
    fit = ["fit", "--config", str(ROOT / "configs/quickstart_sft.yaml"), "--config", "more.yaml"]
    command = [sys.executable, "-c", AGENT, there, begins, *rendezvous, "-m", "app", *fit]
    return subprocess.Popen(
        [*command, "--run_dir=run", "--ckpt_path=last", "--trainer.devices=1"],
        env=environment,
        cwd=directory,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def steps(file: Path) -> list[int]:
    if not file.exists():
        return []
    with file.open() as rows:
        return [int(row["step"]) for row in csv.DictReader(rows) if row.get("grad_norm")]


def test_a_lost_node_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(CONFIG)
    port = free_port()
    # The first goes on alone where nobody joins it within 8 s, far less than an import may take on a busy machine.
    first, second = agent(tmp_path, port, "first", "second"), agent(tmp_path, port, "second", "listening")
    log = tmp_path / "run" / "metrics.csv"
    try:
        reached = socket.socket()
        end = time.monotonic() + DEADLINE
        while reached.connect_ex(("127.0.0.1", port)):  # who listens is the rendezvous, and must not be the one lost
            assert time.monotonic() < end and first.poll() is None, "the first agent does not listen"
            time.sleep(0.05)
        reached.close()
        (tmp_path / "listening").touch()
        end = time.monotonic() + DEADLINE
        while len(steps(log)) < 12:
            assert time.monotonic() < end and first.poll() is None, "two nodes do not train"
            time.sleep(0.02)
        lost = [psutil.Process(second.pid), *psutil.Process(second.pid).children(recursive=True)]
        for process in lost:
            process.send_signal(signal.SIGKILL)
        said = first.communicate(timeout=DEADLINE)[0]
    finally:
        for one in (first, second):
            one.kill()
            one.communicate()
    assert first.returncode == 0, said
    before, after = steps(tmp_path / "run" / "metrics_1.csv"), steps(log)
    assert before == list(range(len(before))) and after == list(range(after[0], STEPS))
    assert 5 <= after[0] <= len(before), "it goes on from the last checkpoint"
