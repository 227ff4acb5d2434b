"""Does every algorithm learn, from the same warm start, and how many steps does it take?

    python -m benchmarks.learning --out benchmarks/results/learning                    # about an hour on 2 cores
    python -m benchmarks.learning --out DIR --only grpo,rloo --seeds 1 --steps 40 --warm_steps 50    # a try

Every run is `python -m app fit` on a configuration of this file's making, in a process of its own. On the quickstart's
task each case has to reach a held-out accuracy of 0.85; "sync" and "stale_4" are Dr.GRPO at max_staleness 0 and 4. On
the branching task (`benchmarks.learning.branching`) advantages from the tree meet advantages from whole episodes. Steps
to a target are read off the held-out accuracy, interpolated between validations. Writes learning.json, .md, .png into
--out after every run; one that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.records import write_json

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"sums": 0.85, "steps": 0.75}
WARM = {"sums": 1.0, "steps": 0.16}  # part of the warm steps that leaves a task about a third learned
LEARNING_RATE = 5e-4  # half of the quickstart's: with it four versions of staleness are as good as none
FILTER = {"class_path": "datamodules.filters.NoSignal"}
PPO = {"critic": "initial", "critic_lr": 0.001, "critic_warmup": 10, "value_clip": 0.2}
# Clip ranges of sequence ratios are made for the small learning rates of large models.
WIDE = {"clip_low": 0.1, "clip_high": 0.1}

# Case -> (task, options of the module, options of the data, class of the module).
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "grpo": ("sums", {"advantage": "grpo"}, {}, "PolicyModule"),
    "rloo": ("sums", {"advantage": "rloo"}, {}, "PolicyModule"),
    "gspo": ("sums", {"objective": "gspo", "objective_options": WIDE}, {}, "PolicyModule"),
    "ppo_critic": ("sums", {"advantage": "gae", **PPO}, {}, "ActorCriticModule"),
    "decoupled_stale_4": ("sums", {"objective": "decoupled_ppo"}, {"max_staleness": 4}, "PolicyModule"),
    # Half as many prompts, all with signal, out of about as many that are rolled out.
    "dapo": ("sums", {"objective": "dapo", "advantage": "grpo"}, {"filter": FILTER, "batch_size": 32}, "PolicyModule"),
    "sync": ("sums", {}, {"max_staleness": 0}, "PolicyModule"),
    "stale_4": ("sums", {}, {"max_staleness": 4}, "PolicyModule"),
    "branching_dr_grpo": ("steps", {"advantage": "dr_grpo"}, {}, "PolicyModule"),
    "branching_tree": ("steps", {"advantage": "tree"}, {}, "PolicyModule"),
}


def task_data(task: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `RolloutDataModule`, and of `SupervisedDataModule` for the warm start."""
    config = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())["data"]["init_args"]
    warm = yaml.safe_load((ROOT / "configs/quickstart_sft.yaml").read_text())["data"]["init_args"]
    config["seed"] = seed
    if task == "sums":
        config["prompts"]["init_args"]["seed"] = 1000 + seed
        return config, warm
    source = "benchmarks.learning.branching.StepPrompts"
    config |= {
        "prompts": {"class_path": source, "init_args": {"seed": 1000 + seed}},
        "validation": {"prompts": {"class_path": source, "init_args": {"split": "validation", "size": 256, "seed": 3}}},
        "workflow": {"class_path": "benchmarks.learning.branching.StepsWorkflow"},
        "batch_size": 16,
    }
    del config["reward"]
    return config, {**warm, "prompts": {"class_path": source, "init_args": {"seed": 1}}}


def warm_config(task: str, steps: int) -> dict[str, Any]:
    config = yaml.safe_load((ROOT / "configs/quickstart_sft.yaml").read_text())
    config["data"]["init_args"] = task_data(task, 0)[1]
    config["trainer"] |= {"max_steps": max(1, round(steps * WARM[task])), "accelerator": "cpu"}
    return config


def rl_config(case: str, seed: int, model: Path, steps: int, every: int) -> dict[str, Any]:
    """The quickstart's second part with what the case changes; held-out accuracy every `every` steps."""
    task, module, data, kind = CASES[case]
    config = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    config["seed_everything"] = seed
    config["trainer"] |= {
        "max_steps": steps,
        "val_check_interval": every,
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "callbacks": [],
    }
    config["model"]["class_path"] = f"modules.{kind}"
    options = config["model"]["init_args"] | module | {"model": {"path": str(model)}}
    options["lr_scheduler"]["init_args"]["total_iters"] = steps
    options["optimizer"]["init_args"]["lr"] = LEARNING_RATE
    config["model"]["init_args"] = options
    config["data"]["init_args"] = task_data(task, seed)[0] | data
    return config


def run(config: dict[str, Any], run_dir: Path, deadline_s: float) -> None:
    """One fit in a process of its own; its output goes into the run directory, which begins empty: what is there is of
    a run that was cut."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    (run_dir / "given.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "app", "fit", "--config", str(run_dir / "given.yaml"), "--run_dir", str(run_dir)]
    with (run_dir / "output.log").open("w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=deadline_s)
    if done.returncode:
        raise RuntimeError(f"{run_dir}: fit ended with exit code {done.returncode}; see output.log in it")


def finished(file: Path, command: str) -> list[dict[str, Any]]:
    """Results of the same command that was stopped before its end."""
    report = json.loads(file.read_text()) if file.exists() else {}
    return report["results"] if report.get("command") == command else []


def curve(run_dir: Path) -> list[tuple[int, float]]:
    """(optimizer steps taken, held-out accuracy) of every validation."""
    with (run_dir / "metrics.csv").open() as file:
        rows = [(int(row["step"]), row.get("val/accuracy")) for row in csv.DictReader(file)]
    return sorted({step: float(value) for step, value in rows if value}.items())


def steps_to(target: float, points: Sequence[tuple[int, float]]) -> float | None:
    """Where the accuracy first reaches `target`, by linear interpolation; None when it never does."""
    for (before, low), (after, high) in zip([(0, points[0][1]), *points], points):
        if high >= target:
            return float(after) if high == low else before + (after - before) * (target - low) / (high - low)
    return None


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a case: over its seeds, steps to the target (median and range), and final accuracies."""
    rows = []
    for case in dict.fromkeys(result["case"] for result in results):
        mine = [result for result in results if result["case"] == case]
        reached = [result["steps_to_target"] for result in mine if result["steps_to_target"] is not None]
        rows.append(
            {
                "case": case,
                "target": mine[0]["target"],
                "reached": f"{len(reached)} of {len(mine)}",
                "steps": statistics.median(reached) if reached else None,
                "range": [min(reached), max(reached)] if reached else None,
                "start": statistics.median(result["curve"][0][1] for result in mine),
                "final": [round(result["curve"][-1][1], 3) for result in mine],
                "seconds": round(statistics.median(result["seconds"] for result in mine), 1),
            }
        )
    return rows


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Learning",
        "",
        f"`{report['command']}`: held-out accuracy (greedy) from one warm start a task, over seeds. A step is 512"
        " episodes (dapo: 256), on the branching task 128 episodes of four turns.",
        "",
        "| case | target | reached by | steps to it: median (range) | at the start | at the end, by seed | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["summary"]:
        steps = "-" if row["steps"] is None else f"{row['steps']:.0f} ({row['range'][0]:.0f} to {row['range'][1]:.0f})"
        ends = ", ".join(map(str, row["final"]))
        cells = (row["case"], row["target"], row["reached"], steps, f"{row['start']:.3f}", ends, row["seconds"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


def picture(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for axis, (task, target) in zip(axes, TARGETS.items()):
        cases = [case for case in dict.fromkeys(r["case"] for r in results) if CASES[case][0] == task]
        for number, case in enumerate(cases):
            for i, result in enumerate(r for r in results if r["case"] == case):
                axis.plot(*zip(*result["curve"]), color=f"C{number}", alpha=0.7, label=case if i == 0 else None)
        axis.axhline(target, color="grey", linewidth=0.8, linestyle="--")
        axis.set(xlabel="optimizer steps", title={"sums": "sums of two numbers", "steps": "branching"}[task])
        if cases:
            axis.legend(fontsize=8)
    axes[0].set_ylabel("held-out accuracy")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of every run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--every", type=int, default=40, help="steps between validations")
    parser.add_argument("--warm_steps", type=int, default=500, help="supervised steps of the warm starts")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning", help="where the runs write")
    parser.add_argument("--deadline_s", type=float, default=1800.0, help="seconds one run may take")
    given = parser.parse_args(argv)
    names = given.only.split(",")
    for name in names:
        if name not in CASES:
            parser.error(f"--only: no case '{name}'; choose from {', '.join(CASES)}")
    runs = given.runs / time.strftime("%Y-%m-%d_%H-%M-%S")
    models = {}
    for task in dict.fromkeys(CASES[name][0] for name in names):
        run(warm_config(task, given.warm_steps), runs / f"warm_{task}", given.deadline_s)
        models[task] = runs / f"warm_{task}" / "model"

    def learn(seed: int, name: str) -> dict[str, Any]:
        task = CASES[name][0]
        run_dir = runs / f"{name}_{seed}"
        began = time.monotonic()
        run(rl_config(name, seed, models[task], given.steps, given.every), run_dir, given.deadline_s)
        points = curve(run_dir)
        seconds, reached = time.monotonic() - began, steps_to(TARGETS[task], points)
        print(f"{name}, seed {seed}: {points[0][1]:.3f} -> {points[-1][1]:.3f}, {seconds:.0f} s", flush=True)
        found = {"case": name, "seed": seed, "target": TARGETS[task], "curve": points}
        return found | {"steps_to_target": reached, "seconds": seconds}

    command = (
        f"python -m benchmarks.learning --seeds {given.seeds} --steps {given.steps} --warm_steps {given.warm_steps}"
    )
    results = finished(given.out / "learning.json", command)
    done = {(result["seed"], result["case"]) for result in results}
    runs_of = [(seed, name) for seed in range(given.seeds) for name in names if (seed, name) not in done]
    report = {"command": command, "summary": summary(results), "results": results}
    given.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.jobs) as pool:  # of processes: a thread waits for each
        for future in as_completed([pool.submit(learn, *one) for one in runs_of]):
            results.append(future.result())
            results.sort(key=lambda result: (result["seed"], list(CASES).index(result["case"])))
            report["summary"] = summary(results)
            write_json(given.out / "learning.json", report)
            (given.out / "learning.md").write_text(markdown(report))
    picture(results, given.out / "learning.png")
    return report


if __name__ == "__main__":
    main()
