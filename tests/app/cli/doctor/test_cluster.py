"""`arborist doctor --cluster`: real jobs of two processes, under torchrun and with SLURM's variables; what is wrong."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import main

ROOT = Path(__file__).resolve().parents[4]
HIDDEN = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS")
DEADLINE_S = 240.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(command: list[str], **more: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key not in HIDDEN}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, "-m", *command], env=environment | more, cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def slurm_task(rank: int, port: int, *options: str) -> subprocess.Popen[str]:
    """A task as srun starts it."""
    variables = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "JOB_NAME": "doctor", "JOB_ID": 4711, "NODELIST": "127.0.0.1"}
    variables |= {"PROCID": rank, "LOCALID": rank, "NODEID": 0}
    slurm = {f"SLURM_{name}": str(value) for name, value in variables.items()}
    return start(["app", "doctor", "--cluster", *options], MASTER_PORT=str(port), **slurm)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output = process.communicate(timeout=DEADLINE_S)[0]
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.slow
def test_two_ranks_of_torchrun_are_examined(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    torchrun = [
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    ]
    code, printed = ended(start([*torchrun, "-m", "app", "doctor", "--cluster", "--folder", str(folder)]))
    assert code == 0, printed
    assert re.search(rf"^ok +ranks +all 2 came: 2 on {re.escape(socket.gethostname())}$", printed, re.MULTILINE), (
        printed
    )
    assert re.search(r"^ok +torch +\S+ on every rank$", printed, re.MULTILINE)
    assert re.search(r"^ok +folder +.*runs: what a rank writes, all see, within ", printed, re.MULTILINE)
    found = re.search(
        r"^ok +clocks +at most (\S+) s from rank 0's \(rank 1, known to (\S+) s\)$", printed, re.MULTILINE
    )
    assert found and abs(float(found[1])) <= float(found[2]) + 1e-3  # one clock, read between a question and its answer
    found = re.search(r"(ok|note) +sums by gloo +64 MiB summed over 2 ranks in (\S+) ms, (\S+) GB/s", printed)
    assert found and float(found[3]) == pytest.approx(2**26 / float(found[2]) / 1e6, rel=0.02)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_tasks_of_slurm_whose_folders_are_two_and_whose_server_is_not_there(tmp_path: Path) -> None:
    port, nobody = free_port(), free_port()
    options = ("--servers", f"http://127.0.0.1:{nobody}", "--deadline", "20")
    tasks = [slurm_task(rank, port, "--folder", str(tmp_path / str(rank)), *options) for rank in range(2)]
    (code, printed), (other, silent) = map(ended, tasks)
    assert (code, other) == (1, 1) and "BAD" not in silent, printed + silent
    assert re.search(r"^BAD +folder +.*: rank 1 does not see what rank 0 wrote; .*--run_dir\)$", printed, re.MULTILINE)
    assert re.search(rf"^BAD +server +.*127\.0\.0\.1:{nobody}.*arborist serve", printed, re.MULTILINE)
    assert printed.splitlines()[-1].startswith("2 of ")
    assert not list(tmp_path.glob("*/.doctor*"))


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    code, printed = ended(slurm_task(0, free_port(), "--folder", str(tmp_path), "--deadline", "3"))
    assert code == 1
    assert re.search(
        r"^BAD +ranks +1 of 2 came within 3 s \(1 on .*\), missing: rank 1; its own output", printed, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cluster"], "this process is no rank of a job: start it as a run is started, torchrun"),
        (["--servers", "http://127.0.0.1:1"], "--servers has no effect without --cluster"),
        (["--deadline", "0"], "--deadline: must be above 0 seconds, got 0"),
    ],
)
def test_mistakes(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *options])
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_options_of_srun_that_runs_refuse_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in (("SLURM_NTASKS", "2"), ("SLURM_JOB_NAME", "doctor"), ("SLURM_PROCID", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--cluster"])
    assert caught.value.code == 2 and "--ntasks-per-node=2" in capsys.readouterr().err


def test_what_differs_is_named_by_rank() -> None:
    from app.cli.doctor.cluster import _alike

    assert _alike("torch", ["2.13.0", "2.13.0"], "bad", "x").level == "ok"
    finding = _alike("torch", ["2.13.0", "2.12.0", "2.13.0"], "bad", "install the same everywhere")
    assert finding.text == "2.13.0 on rank 0, 2; 2.12.0 on rank 1: install the same everywhere"
