"""Ranks of a real two-process run are killed at random moments: it goes on, loses nothing, leaves nothing behind.

    python -m tests.faults.soak_ranks [--kills 10] [--steps 60] [--seed 0] [--modes whole groups shards]
        [--out benchmarks/results/faults]

Runs `arborist fit` (supervised warm start of the quickstart, float32, checkpoint every step) under torchrun with
restarts, in each mode: once undisturbed, then again while one rank after another gets SIGKILL, each at a random moment
of training after the one before was overcome. torchrun has to name the rank, and every step's loss, however often it
was trained, must equal the undisturbed run's to the last digit. Exit code 1 otherwise. Writes soak_ranks.json and
soak_ranks.md.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.records import write_json

ROOT = Path(__file__).parents[2]
_PATIENCE = 600.0  # seconds for a start, a restart or the rest of a run
_CHECKPOINTS = "lightning.pytorch.callbacks.ModelCheckpoint"
MODES: dict[str, list[str]] = {
    "whole": [],
    "groups": ["--trainer.strategy.group_size=2"],
    "shards": ["--trainer.strategy.group_size=2", "--trainer.strategy.shard_parameters=true"],
}
"""Options of the strategy by mode: each rank a part of the tree, both one plan, and that with parameters in shards."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and ranks")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--out", type=Path, help="directory for soak_ranks.json and soak_ranks.md")
    arguments = parser.parse_args()
    choice = random.Random(arguments.seed)
    result: dict[str, Any] = {"modes": {}, "passed": True}
    result["command"] = "python -m tests.faults.soak_ranks " + " ".join(sys.argv[1:])
    for mode in arguments.modes:
        result["modes"][mode] = soak(mode, arguments.steps, arguments.kills, choice)
        result["passed"] &= result["modes"][mode]["passed"]
        if arguments.out is not None:  # after every mode, which takes many minutes
            write_json(arguments.out / "soak_ranks.json", result)
            (arguments.out / "soak_ranks.md").write_text(_markdown(result))
    print(_markdown(result))
    raise SystemExit(0 if result["passed"] else 1)


def soak(mode: str, steps: int, kills: int, choice: random.Random) -> dict[str, Any]:
    """What `kills` kills did to a run of `steps` steps in one of `MODES`, at moments and of ranks by `choice`."""
    with tempfile.TemporaryDirectory() as scratch:
        calm, killed = Path(scratch) / "calm", Path(scratch) / "killed"
        _wait(_start(calm, mode, steps, 0), calm)
        done = _disturb(killed, mode, steps, kills, choice)
        result = _compare(calm, killed, steps) | {"kills": done, "left_behind": _left_behind(killed)}
    named = all(kill["named"] for kill in done)
    return result | {"passed": named and not result["left_behind"] and not result["different"] and len(done) == kills}


def _start(run_dir: Path, mode: str, steps: int, restarts: int) -> subprocess.Popen[bytes]:
    run = ["--config", "configs/quickstart_sft.yaml", "--run_dir", str(run_dir), "--ckpt_path", "last"]
    run += ["--trainer.max_steps", str(steps), "--trainer.devices", "2", "--trainer.accelerator", "cpu"]
    run += ["--trainer.enable_checkpointing", "true", f"--trainer.callbacks+={_CHECKPOINTS}"]
    run += ["--trainer.callbacks.every_n_train_steps=1", "--trainer.callbacks.save_last=true"]
    run += ["--trainer.strategy=app.strategies.DTAStrategy", "--trainer.strategy.calibrate=false", *MODES[mode]]
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    run_dir.parent.mkdir(exist_ok=True)
    with (run_dir.parent / f"{run_dir.name}.log").open("wb") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, *agent, "-m", "app", "fit", *run]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _disturb(run_dir: Path, mode: str, steps: int, kills: int, choice: random.Random) -> list[dict[str, Any]]:
    process = _start(run_dir, mode, steps, kills)
    log = run_dir.parent / f"{run_dir.name}.log"
    done: list[dict[str, Any]] = []
    for number in range(kills):
        # Kills are spread over the run, each after a step that was not reached before.
        _await(lambda goal=1 + number * (steps - 2) // kills: _steps_done(run_dir) >= goal, process, run_dir)
        time.sleep(choice.uniform(0.0, 0.5))
        ranks = [p for p in psutil.Process(process.pid).children() if p.status() != psutil.STATUS_ZOMBIE]
        if len(ranks) < 2:
            raise SystemExit(f"kill {number + 1}: the run has {len(ranks)} ranks; see {run_dir.parent}")
        victim = choice.randrange(2)
        step, start, before = _steps_done(run_dir), time.monotonic(), log.stat().st_size
        os.kill(sorted(rank.pid for rank in ranks)[victim], signal.SIGKILL)
        _await(lambda step=step: _steps_done(run_dir) > step, process, run_dir)
        seconds = time.monotonic() - start
        told = log.read_bytes()[before:].decode(errors="replace")
        named = f"failed (exitcode: -9) local_rank: {victim} " in told
        done.append({"rank": victim, "after_step": step, "named": named, "seconds_until_next_step": seconds})
    _wait(process, run_dir)
    return done


def _await(condition: Any, process: subprocess.Popen[bytes], run_dir: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            log = (run_dir.parent / f"{run_dir.name}.log").read_text(errors="replace")
            raise SystemExit(f"{log[-5000:]}\nthe run did not go on (exit code {process.poll()})")
        time.sleep(0.1)  # looking costs processor time that the run needs


def _wait(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    _await(lambda: process.poll() is not None and process.returncode == 0, process, run_dir)


def _losses(run_dir: Path) -> list[tuple[int, str]]:
    """(step, loss as it was written), of all attempts in order."""
    found = []
    files = [run_dir / f"metrics_{number}.csv" for number in range(1, 1000)]
    for file in [*(f for f in files if f.exists()), run_dir / "metrics.csv"]:
        if file.exists():
            with file.open(newline="") as rows:
                found += [(int(row["step"]), row["loss"]) for row in csv.DictReader(rows) if row.get("loss")]
    return found


def _steps_done(run_dir: Path) -> int:
    return max((step + 1 for step, _ in _losses(run_dir)), default=0)


def _compare(calm: Path, killed: Path, steps: int) -> dict[str, Any]:
    expected, seen = dict(_losses(calm)), _losses(killed)
    different = [(step, loss, expected.get(step)) for step, loss in seen if loss != expected.get(step)]
    missing = sorted(set(range(steps)) - {step for step, _ in seen})
    return {"steps": steps, "trained_again": len(seen) - len({s for s, _ in seen}), "different": different + missing}


def _left_behind(run_dir: Path) -> list[str]:
    processes = [p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in (p.info["cmdline"] or [])]
    hidden = (run_dir / "checkpoints").glob(".*")
    return [f"process {p.pid}" for p in processes] + [path.name for path in hidden]


def _markdown(result: dict[str, Any]) -> str:
    lines = [f"`{result['command'].strip()}`", ""]
    for mode, found in result["modes"].items():
        lines += [
            f"{mode}: {'passed' if found['passed'] else 'FAILED'}, {found['steps']} steps on two ranks,"
            f" {len(found['kills'])} kills; {found['trained_again']} steps were trained again from a checkpoint; losses"
            f" that differ from the undisturbed run: {len(found['different'])}; left behind:"
            f" {len(found['left_behind'])}.",
            "",
        ]
    lines += [
        "| mode | kill | rank | named | after step | seconds until the next new step |",
        "|---|---|---|---|---|---|",
    ]
    for mode, found in result["modes"].items():
        for number, kill in enumerate(found["kills"], 1):
            named, seconds = "yes" if kill["named"] else "NO", kill["seconds_until_next_step"]
            lines.append(f"| {mode} | {number} | {kill['rank']} | {named} | {kill['after_step']} | {seconds:.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
