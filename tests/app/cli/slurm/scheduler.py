"""As much of SLURM as a batch script meets: jobs, their steps, the signal before time is up, requeueing.

    scheduler.py sbatch SPOOL SCRIPT ARGS...   plays a job until it ends without having asked to be queued again
    scheduler.py srun|scontrol|scancel ...     what the job calls; SPOOL comes by the environment

A file SPOOL/serving_nodes makes it a heterogeneous job whose second part has the nodes that the file names.
Time is up when there is a file SPOOL/time_is_up, which the job's program writes; then the signal of the script's own
`--signal` goes to its shell, and after the seconds that it names the job is killed, as SLURM does.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 300.0


def sbatch(spool: Path, script: Path, arguments: list[str]) -> int:
    """Exit code of the job's last start. Raises RuntimeError for a script that promises no way to go on."""
    asked = re.search(r"^#SBATCH --signal=B:(\w+)@(\d+)$", script.read_text(), re.MULTILINE)
    if asked is None or "\n#SBATCH --requeue\n" not in script.read_text():
        raise RuntimeError(f"{script}: neither --signal=B:NAME@SECONDS nor --requeue: the end of its time loses steps")
    for start in range(3):
        for left in ("requeued", "step.pid"):
            (spool / left).unlink(missing_ok=True)
        job = {"SLURM_JOB_ID": "77", "SLURM_GPUS_ON_NODE": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "arborist",
               "SLURM_RESTART_COUNT": str(start)}  # fmt: skip
        if (spool / "serving_nodes").exists():
            job |= {"SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_JOB_NODELIST_HET_GROUP_0": "node0"}
            job |= {"SLURM_JOB_NODELIST_HET_GROUP_1": (spool / "serving_nodes").read_text()}
        else:
            job |= {"SLURM_JOB_NODELIST": "node0", "SLURM_NNODES": "1"}
        process = subprocess.Popen(["bash", str(script), *arguments], env={**os.environ, **job}, start_new_session=True)
        end, told = time.monotonic() + PATIENCE_S, False
        while process.poll() is None:
            if not told and (spool / "time_is_up").exists():
                (spool / "time_is_up").unlink()
                process.send_signal(signal.Signals[f"SIG{asked[1]}"])
                end, told = time.monotonic() + int(asked[2]), True
            if time.monotonic() > end:
                os.killpg(process.pid, signal.SIGKILL)
                raise TimeoutError(f"{script}: start {start} did not end in time")
            time.sleep(0.05)
        if not (spool / "requeued").exists():
            return process.returncode
    raise RuntimeError(f"{script}: queued again and again")


def srun(spool: Path, words: list[str]) -> int:
    """Runs one task of a step on this "node", and hands SIGTERM on to it."""
    own = ("--kill-on-bad-exit", "--cpus-per-task", "--no-kill", "--het-group")
    process = subprocess.Popen([word for word in words if not word.startswith(own)])
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    written = spool / f"{process.pid}.pid"
    written.write_text(str(process.pid))
    written.replace(spool / ("servers.pid" if "--het-group=1" in words else "step.pid"))
    return process.wait()


def scontrol(spool: Path, words: list[str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        print("localhost" if words[2] == "node0" else words[2].replace(",", "\n"))
        return 0
    assert words == ["requeue", "77"], words
    (spool / "requeued").touch()
    return 0


def scancel(spool: Path, words: list[str]) -> int:
    """Without --batch, steps get the signal and the script's shell does not."""
    assert words == ["--signal=TERM", "77.0"], words
    step, end = spool / "step.pid", time.monotonic() + 60.0
    while not step.exists() and time.monotonic() < end:  # it has begun, and its `srun` is about to say so
        time.sleep(0.01)
    os.kill(int(step.read_text()), signal.SIGTERM)
    return 0


def install(folder: Path, spool: Path) -> dict[str, str]:
    """Commands of these names in `folder`, and the environment in which a script finds them."""
    folder.mkdir()
    for name in ("srun", "scontrol", "scancel"):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        (folder / name).chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "RANK", "LOCAL_RANK"))}
    return {**clean, "PATH": f"{folder}:{clean['PATH']}", "FAKE_SLURM_SPOOL": str(spool)}


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    if name == "sbatch":
        assert shutil.which("srun"), "install() makes the commands that a script calls"
        sys.exit(sbatch(Path(given[0]), Path(given[1]), given[2:]))
    sys.exit(
        {"srun": srun, "scontrol": scontrol, "scancel": scancel}[name](Path(os.environ["FAKE_SLURM_SPOOL"]), given)
    )
