"""Faults that end a run started from the command line: signals, a second run in its directory, a disk that is full.

Promises: the run ends with the exit code and the words that were promised and leaves no process; going on by the
command it printed (or from its last checkpoint), the accounts of both parts together are exact. Needs no servers.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from app.strategies.checkpoint.trainer_state import put_together
from tests.faults.fit import BATCH, GROUP, MODEL, accounts
from tests.faults.outcome import Outcome, Place
from tests.faults.traces import Traces

ROOT = Path(__file__).resolve().parents[2]
_WINDOW_S = 1.5  # the moment is drawn from this long after the first step
_LIMIT_S = 300.0
_MORE_STEPS = 3
_GO_ON = "go on with: "
# Lightning puts these into the environment of a process that has trained; another trainer chooses its own.
_OURS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")


class _Run:
    """One run directory, its books, and the processes that worked in it."""

    def __init__(self, directory: Path, seed: int, saving_minutes: float | None = None) -> None:
        directory.mkdir(parents=True)
        self.directory, self.run_dir = directory, directory / "run"
        self.books, self.config = directory / "trained.jsonl", directory / "config.yaml"
        self.config.write_text(yaml.safe_dump(_configuration(self.books, seed, saving_minutes)))
        self.number = 0

    @contextmanager
    def started(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """`python -m app`, as the leader of a process group of its own; what it says is in `said`."""
        self.number += 1
        own = {name: value for name, value in os.environ.items() if name not in _OURS} | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "app", *words]
        with (self.directory / f"log{self.number}").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def fit(self) -> list[str]:
        return ["fit", "--config", str(self.config), "--run_dir", str(self.run_dir)]

    def said(self, number: int) -> str:
        return (self.directory / f"log{number}").read_text(errors="replace")

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(row) for row in self.books.read_text().splitlines()] if self.books.exists() else []

    def saved(self) -> dict[str, Any]:
        """The last checkpoint."""
        return put_together(self.run_dir / "checkpoints" / "last.ckpt")

    def wait(self, what: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        ends = time.monotonic() + _LIMIT_S
        while not what():
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"the run did not get there: {self.said(self.number)[-1500:]}")
            time.sleep(0.02)


def _configuration(books: Path, seed: int, saving_minutes: float | None) -> dict[str, Any]:
    callbacks: list[Any] = [
        "callbacks.WeightSync",
        {"class_path": "tests.faults.fit.Ledger", "init_args": {"file": str(books)}},
    ]
    if saving_minutes is not None:
        callbacks.append({"class_path": "callbacks.SaveLast", "init_args": {"minutes": saving_minutes}})
    prompts = {"digits": 2, "operators": "+", "seed": seed}
    data = {
        "prompts": {"class_path": "datamodules.prompts.ArithmeticPrompts", "init_args": prompts},
        "workflow": {"class_path": "datamodules.workflows.RLVRWorkflow", "init_args": {"max_new_tokens": 48}},
        "engine": {
            "class_path": "datamodules.inference.EmbeddedEngine",
            "init_args": {"kv_cache_tokens": 4096, "num_threads": 1},
        },
        "reward": "datamodules.rewards.exact_match",
        "tokenizer": "char:0123456789+-*=",
        "batch_size": BATCH,
        "group_size": GROUP,
        "max_staleness": 1,
        "batches_per_epoch": 100_000,
        "seed": seed,
    }
    model = {"model": {"config": MODEL}, "advantage": "dr_grpo"}
    return {
        "seed_everything": seed,
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 100_000, "callbacks": callbacks},
        "model": {"class_path": "modules.PolicyModule", "init_args": model},
        "data": {"class_path": "datamodules.RolloutDataModule", "init_args": data},
    }


def _go_on(run: _Run, outcome: Outcome, words: list[str], rows: int) -> None:
    """Trains a few more steps, and settles the accounts: the first `rows` up to the checkpoint, and all later ones."""
    step = int(run.saved()["global_step"])
    outcome.after_steps, outcome.steps = step, step + _MORE_STEPS
    began = time.monotonic()
    with run.started(*words, "--trainer.max_steps", str(outcome.steps)) as process:
        run.wait(lambda: len(run.rows()) > rows, process)
        outcome.stall_s = time.monotonic() - began
        code = process.wait(_LIMIT_S)
    if code != 0:
        raise RuntimeError(f"going on ended with code {code}: {run.said(run.number)[-1500:]}")
    found = run.rows()
    counted = [row for row in found[:rows] if row["step"] <= step] + found[rows:]
    if [row["step"] for row in counted] != list(range(1, outcome.steps + 1)):
        outcome.wrong.append(f"steps are missing or there twice: {[row['step'] for row in counted]}")
    trained = [group for row in counted for group in row["groups"]]
    outcome.accounts = accounts(trained, run.saved()["RolloutDataModule"])
    outcome.wrong += outcome.accounts.pop("wrong")


def _asked_to_end(place: Place, rng: random.Random, name: str, number: signal.Signals, everyone: bool) -> Outcome:
    run, outcome = _Run(place.fresh(name), rng.randrange(1000)), Outcome(name, rng.uniform(0.0, _WINDOW_S))
    with run.started(*run.fit()) as process:
        run.wait(lambda: bool(run.rows()), process)
        time.sleep(outcome.moment_s)
        traces, began = Traces(place.pids, root=process.pid), time.monotonic()
        if everyone:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        code = process.wait(_LIMIT_S)
        outcome.healed_s = time.monotonic() - began
    said, rows = run.said(1), len(run.rows())
    outcome.wrong += traces.left()
    if code != 128 + number or "Traceback" in said:
        outcome.wrong.append(f"exit code {code}: {said[-1500:]}")
    if int(run.saved()["global_step"]) != rows:
        outcome.wrong.append(f"{rows} steps were trained, the checkpoint has {run.saved()['global_step']}")
    command = shlex.split(next(line for line in said.splitlines() if line.startswith(_GO_ON)).removeprefix(_GO_ON))
    _go_on(run, outcome, command[3:], rows)
    return outcome


def ctrl_c(place: Place, rng: random.Random) -> Outcome:
    """SIGINT to all processes of the run, as a terminal sends it; the printed command goes on."""
    return _asked_to_end(place, rng, "ctrl_c", signal.SIGINT, everyone=True)


def sigterm(place: Place, rng: random.Random) -> Outcome:
    """SIGTERM to the trainer, as a scheduler sends it; the printed command goes on."""
    return _asked_to_end(place, rng, "sigterm", signal.SIGTERM, everyone=False)


def two_runs(place: Place, rng: random.Random) -> Outcome:
    """A second run is started in the directory of one that lives: it is refused, and the first notices nothing."""
    run = _Run(place.fresh("two_runs"), rng.randrange(1000), saving_minutes=0.001)
    outcome = Outcome("two_runs", rng.uniform(0.0, _WINDOW_S))
    with run.started(*run.fit()) as first:
        run.wait((run.run_dir / "checkpoints" / "last.ckpt").exists, first)
        time.sleep(outcome.moment_s)
        began = time.monotonic()
        with run.started(*run.fit(), "--ckpt_path", "last") as second:
            code = second.wait(_LIMIT_S)
        outcome.healed_s = time.monotonic() - began
        if code != 2 or f"in use by process {first.pid}" not in run.said(2) or "Traceback" in run.said(2):
            outcome.wrong.append(f"the second run ended with code {code}: {run.said(2)[-1500:]}")
        rows = len(run.rows())
        run.wait(lambda: len(run.rows()) > rows + 1, first)
        first.terminate()
        first.wait(_LIMIT_S)
    if (run.run_dir / "metrics_1.csv").exists():
        outcome.wrong.append("the second run renamed the first one's metrics")
    _go_on(run, outcome, [*run.fit(), "--ckpt_path", "last"], len(run.rows()))
    return outcome


def metrics_full(place: Place, rng: random.Random) -> Outcome:
    """No file of the run can grow further (a limit on their size: a full disk would have to be one of its own): a line
    says which; with space again, the last checkpoint goes on."""
    run = _Run(place.fresh("metrics_full"), rng.randrange(1000), saving_minutes=0.001)
    outcome = Outcome("metrics_full", rng.uniform(0.0, _WINDOW_S))
    with run.started(*run.fit()) as process:
        run.wait((run.run_dir / "checkpoints" / "last.ckpt").exists, process)
        time.sleep(outcome.moment_s)
        traces, began = Traces(place.pids, root=process.pid), time.monotonic()
        size = (run.run_dir / "metrics.csv").stat().st_size
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))
        code = process.wait(_LIMIT_S)
        outcome.healed_s = time.monotonic() - began
    said = run.said(1)
    outcome.wrong += traces.left()
    if code != 2 or "File too large" not in said or "Traceback" in said:
        outcome.wrong.append(f"exit code {code}: {said[-1500:]}")
    _go_on(run, outcome, [*run.fit(), "--ckpt_path", "last"], len(run.rows()))
    return outcome


ENDINGS: dict[str, Callable[[Place, random.Random], Outcome]] = {
    one.__name__: one for one in (ctrl_c, sigterm, two_runs, metrics_full)
}
