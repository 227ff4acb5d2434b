"""Does a teacher get a small model further than its reward alone, and how fast?

    python -m benchmarks.learning.distill --steps 200 --out benchmarks/results/learning     # an hour
    python -m benchmarks.learning.distill --out DIR --seeds 1 --steps 10 --warm_steps 20    # a try

The quickstart's sums. The student is the quickstart's own warm start, which knows about four in ten; the teacher is
half as wide again and imitates right answers until it knows them. From there, three seeds each, same prompts, batches
and learning rate: GRPO on the reward (Dr.GRPO, the quickstart's), the teacher alone (advantage `distill`), and both
(task 1). Held-out accuracy of greedy answers; steps and generated tokens to 0.85, interpolated.
Writes a JSON file and a page into --out after every run; one that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.records import write_json
from benchmarks.learning.__main__ import ROOT, curve, finished, run, steps_to

TARGET = 0.85
TEACHER = {"hidden_size": 192, "intermediate_size": 576, "num_attention_heads": 6}
EPISODES = 64 * 8  # of a step: the quickstart's batch_size x group_size
TEACHER_STEPS = 10.0
"""Of the warm steps; the student takes them once. At four times the teacher itself knew 0.773, and nobody passed it."""
TAUGHT = {
    "advantage": "distill",
    "regularisers": [{"name": "kl", "coef": 1.0, "where": "reward", "options": {"estimator": "k1"}}],
}
CASES: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "teacher": TAUGHT,
    "teacher and reward": {**TAUGHT, "advantage_options": {"task": 1.0}},
}


def warm_config(name: str, steps: int) -> dict[str, Any]:
    """The quickstart's imitation, of a model of the size of `name`."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs/quickstart_sft.yaml").read_text())
    config["model"]["init_args"]["model"]["config"] |= TEACHER if name == "teacher" else {}
    length = steps if name == "student" else round(steps * TEACHER_STEPS)
    config["trainer"] |= {"max_steps": length, "accelerator": "cpu"}
    if name == "teacher":
        options = config["model"]["init_args"]
        options["lr_scheduler"] = {
            "class_path": "torch.optim.lr_scheduler.LinearLR",
            "init_args": {"start_factor": 1.0, "end_factor": 0.02, "total_iters": length},
        }
    return config


def rl_config(case: str, seed: int, student: Path, teacher: Path, steps: int) -> dict[str, Any]:
    """The quickstart's second part on the student; held-out accuracy ten times."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    config["seed_everything"] = seed
    config["trainer"] |= {
        "max_steps": steps,
        "val_check_interval": max(1, steps // 10),
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "callbacks": [],
    }
    options = config["model"]["init_args"]
    options |= {"model": {"path": str(student)}} | CASES[case]
    if CASES[case]:
        options["reference"] = {"path": str(teacher)}
    options["lr_scheduler"]["init_args"]["total_iters"] = steps
    data = config["data"]["init_args"]
    data["seed"] = seed
    data["prompts"]["init_args"]["seed"] = 1000 + seed
    return config


def result(case: str, seed: int, run_dir: Path, seconds: float) -> dict[str, Any]:
    with (run_dir / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("reward")]
    points, lengths = curve(run_dir), [float(row["rollouts/length"]) for row in rows if row.get("rollouts/length")]
    reached = steps_to(TARGET, points)
    return {
        "case": case,
        "seed": seed,
        "curve": points,
        "steps_to_target": reached,
        "tokens_to_target": None if reached is None else reached * EPISODES * statistics.mean(lengths),
        "seconds": seconds,
        "seconds_a_step": statistics.median(float(row["time/step"]) - float(row["time/wait"]) for row in rows),
    }


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for case in dict.fromkeys(one["case"] for one in results):
        mine = [one for one in results if one["case"] == case]
        reached = [one for one in mine if one["steps_to_target"] is not None]
        rows.append(
            {
                "case": case,
                "reached": f"{len(reached)} of {len(mine)}",
                "steps": [round(one["steps_to_target"]) for one in reached],
                "tokens": round(statistics.median(one["tokens_to_target"] for one in reached)) if reached else None,
                "start": statistics.median(one["curve"][0][1] for one in mine),
                "final": [round(one["curve"][-1][1], 3) for one in mine],
                "seconds_a_step": statistics.median(one["seconds_a_step"] for one in mine),
            }
        )
    return rows


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# A teacher",
        "",
        f"`{report['command']}` on {report['hardware']}: the quickstart's model, warm-started by {report['warm_steps']}"
        f" steps of imitation, then {report['steps']} steps of 512 episodes with its reward,"
        f" with a teacher half as wide again (held-out accuracy {report['teacher']:.3f}) that marks every token,"
        " and with both. Held-out: greedy answers to 256 sums outside of training. Seconds: a step less its wait.",
        "",
        f"| case | held-out before | after, by seed | reached {TARGET} | steps to it, by seed | generated tokens to it"
        " | seconds a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["summary"]:
        final, steps = (", ".join(map(str, row[name])) or "-" for name in ("final", "steps"))
        tokens = "-" if row["tokens"] is None else f"{row['tokens']:,}"
        lines.append(
            f"| {row['case']} | {row['start']:.3f} | {final} | {row['reached']} | {steps} | {tokens} |"
            f" {row['seconds_a_step']:.2f} |"
        )
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of every run")
    parser.add_argument("--warm_steps", type=int, default=500, help="of the student's imitation")
    parser.add_argument("--name", default="distill", help="of the files")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning_distill", help="where the runs write")
    parser.add_argument("--deadline_s", type=float, default=1800.0, help="seconds one run may take")
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    args = parser.parse_args(argv)
    command = f"python -m benchmarks.learning.distill --steps {args.steps} --warm_steps {args.warm_steps}"
    command += ("" if args.seeds == 3 else f" --seeds {args.seeds}") + (
        "" if args.name == "distill" else f" --name {args.name}"
    )
    written, page = (args.out / f"{args.name}.{kind}" for kind in ("json", "md"))
    results = finished(written, command)
    args.out.mkdir(parents=True, exist_ok=True)
    models = {}
    for name in ("teacher", "student"):
        models[name] = args.runs / f"{name}_{args.warm_steps}"
        if not (models[name] / "summary.json").exists():  # written last
            shutil.rmtree(models[name], ignore_errors=True)
            run(warm_config(name, args.warm_steps), models[name], args.deadline_s)
    report: dict[str, Any] = {
        "command": command,
        "hardware": args.hardware,
        "steps": args.steps,
        "warm_steps": args.warm_steps,
        "teacher": _accuracy(models["teacher"] / "model", args.runs / "teacher_scored", args.deadline_s),
    }
    runs = args.runs / time.strftime("%Y-%m-%d_%H-%M-%S")
    for seed in range(args.seeds):
        for case in CASES:
            if any((one["case"], one["seed"]) == (case, seed) for one in results):
                continue
            run_dir, began = runs / f"{case.replace(' ', '_')}_{seed}", time.monotonic()
            config = rl_config(case, seed, models["student"] / "model", models["teacher"] / "model", args.steps)
            run(config, run_dir, args.deadline_s)
            results.append(result(case, seed, run_dir, time.monotonic() - began))
            results.sort(key=lambda one: (list(CASES).index(one["case"]), one["seed"]))
            report |= {"summary": summary(results), "results": results}
            write_json(written, report)
            page.write_text(markdown(report))
            print(markdown(report), flush=True)
    return report


def _accuracy(model: Path, run_dir: Path, deadline_s: float) -> float:
    """Held-out accuracy of a model: the validation before the first of one step."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run(rl_config("GRPO", 0, model, model, 1), run_dir, deadline_s)
    return curve(run_dir)[0][1]


if __name__ == "__main__":
    main()
