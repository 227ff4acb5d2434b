"""A search over the quickstart's learning rate, group size and clipping on this machine alone: no account, no server.

    python -m examples.sweep.search runs/sweep                     # 12 trials
    python -m examples.sweep.search runs/sweep --trials 24         # goes on, with what is known by then

Optuna proposes, `fit` trains, and a trial whose held-out accuracy falls below the median of the earlier ones at the
same step is asked to end (SIGINT: it saves, and can be gone on with). Every trial has a run directory of its own; what
is searched beats the file of `--more`. After each one DIR/trials.md (a table, best first) and DIR/trials.png (held-out
accuracy by step) are written anew. A search that was stopped goes on with the same command; its books are
DIR/trials.log. One search at a time has DIR, and all its trials begin with one warm start.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before anything asks for a screen
import optuna
from matplotlib import pyplot
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from app.cli.runs.run_directory import RunDirectory, RunDirectoryError

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 1.0
METRIC = "val/accuracy"


def options(trial: Trial) -> dict[str, object]:
    """What is searched: dotted names of the command line."""
    return {
        "--model.optimizer.init_args.lr": trial.suggest_float("lr", 1e-4, 3e-3, log=True),
        "--data.group_size": trial.suggest_categorical("group_size", [4, 8, 16]),
        "--trainer.gradient_clip_val": trial.suggest_float("clip", 0.1, 2.0, log=True),
    }


def fit(log: Path, *arguments: object) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        command = [sys.executable, "-m", "app", "fit", *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)


def ended(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.wait():
        raise RuntimeError(f"fit ended with exit code {process.returncode}; its output is in {log}")


def held_out(run_dir: Path) -> dict[int, float]:
    """By the index of the step before the validation."""
    file = run_dir / "metrics.csv"
    if not file.exists():
        return {}
    whole = file.read_text().rpartition("\n")[0]  # a line without its end is being written
    return {int(row["step"]): float(row[METRIC]) for row in csv.DictReader(whole.splitlines()) if row.get(METRIC)}


def play(trial: Trial, given: argparse.Namespace) -> float:
    """The last held-out accuracy. Raises TrialPruned where the trial was asked to end."""
    out, name = given.out.absolute(), f"trial_{trial.number:02d}"
    flags = [part for pair in options(trial).items() for part in pair]
    more = ["--config", given.more.absolute()] if given.more else []  # before the flags: what comes later wins
    log = out / f"{name}.log"
    process = fit(
        log,
        *("--config", "configs/quickstart.yaml", *more, "--model.model.path", out / "warm_start" / "model"),
        *("--trainer.max_steps", given.steps, "--trainer.val_check_interval", given.every),
        *("--model.lr_scheduler.init_args.total_iters", given.steps, *flags, "--run_dir", out / name),
    )
    told: set[int] = set()
    try:
        while True:
            over = process.poll() is not None
            for step, value in sorted(held_out(out / name).items()):
                if step not in told:
                    told.add(step)
                    trial.report(value, step)
            if over:
                break
            if trial.should_prune():
                process.send_signal(signal.SIGINT)
                process.wait()
                raise optuna.TrialPruned
            time.sleep(POLL_S)
        ended(process, log)
    finally:
        process.kill()
    values = held_out(out / name)
    return values[max(values)]


def write(study: optuna.Study, out: Path) -> None:
    done = [one for one in study.trials if one.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    done.sort(key=lambda one: (one.state != TrialState.COMPLETE, -last(one)))
    lines = [
        "# Trials",
        "",
        f"{len(done)} trials of `python -m examples.sweep.search`, best first: held-out accuracy (greedy, 256 sums) at"
        " the last validation of each.",
        "",
        "| trial | learning rate | group size | clipping | held-out | steps |",
        "|---|---|---|---|---|---|",
    ]
    for one in done:
        lr, size, clip = (one.params[name] for name in ("lr", "group_size", "clip"))
        steps = max(one.intermediate_values) + 1
        steps = f"{steps}" if one.state == TrialState.COMPLETE else f"ended after {steps}"
        lines.append(f"| {one.number} | {lr:.2g} | {size} | {clip:.2f} | {last(one):.3f} | {steps} |")
    (out / "trials.md").write_text("\n".join([*lines, ""]))
    figure, axis = pyplot.subplots(figsize=(7, 4))
    for one in done:
        steps, values = zip(*sorted(one.intermediate_values.items()))
        pruned = one.state == TrialState.PRUNED
        axis.plot(steps, values, marker=".", alpha=0.4 if pruned else 0.9, linestyle=":" if pruned else "-",
                  label=f"{one.number}: lr {one.params['lr']:.2g}, {one.params['group_size']} a group")  # fmt: skip
    axis.set(xlabel="optimizer steps", ylabel="held-out accuracy", ylim=(0, 1))
    axis.legend(fontsize=6, ncols=2)
    figure.tight_layout()
    figure.savefig(out / "trials.png", dpi=110)
    pyplot.close(figure)


def last(trial: FrozenTrial) -> float:
    return trial.intermediate_values[max(trial.intermediate_values)]


def main(argv: Sequence[str] | None = None) -> optuna.Study:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--trials", type=int, default=12, help="in all, those of earlier starts included")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of a trial")
    parser.add_argument("--every", type=int, default=25, help="steps between validations")
    parser.add_argument("--warm_steps", type=int, default=500, help="of the imitation that all begin with")
    parser.add_argument("--more", type=Path, metavar="YAML", help="laid over the quickstart's configuration")
    given = parser.parse_args(argv)
    try:
        directory = RunDirectory(given.out)
    except RunDirectoryError as error:
        sys.exit(f"error: {error}")
    try:
        return search(given)
    finally:
        directory.close()


def search(given: argparse.Namespace) -> optuna.Study:
    warm = given.out.absolute() / "warm_start"
    if not (warm / "summary.json").exists():  # written last
        shutil.rmtree(warm, ignore_errors=True)  # of one that was stopped
        log = warm.with_suffix(".log")
        flags = ("--trainer.max_steps", given.warm_steps, "--run_dir", warm)
        ended(fit(log, "--config", "configs/quickstart_sft.yaml", *flags), log)
    warmed = json.loads((warm / "summary.json").read_text())["steps"]
    if warmed != given.warm_steps:
        sys.exit(f"error: --warm_steps: {given.warm_steps}, but {warm} has {warmed}; name these, or another directory")
    study = optuna.create_study(
        direction="maximize",
        study_name="search",
        load_if_exists=True,
        storage=JournalStorage(JournalFileBackend(str(given.out / "trials.log"))),
        sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=4),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=given.every),
    )
    over = sum(one.state in (TrialState.COMPLETE, TrialState.PRUNED) for one in study.trials)
    if over < given.trials:
        study.optimize(
            lambda trial: play(trial, given),
            n_trials=given.trials - over,
            callbacks=[lambda study, _: write(study, given.out)],
        )
    print((given.out / "trials.md").read_text())
    return study


if __name__ == "__main__":
    main()
