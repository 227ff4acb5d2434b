"""Does a hybrid learn the quickstart's task as well as the quickstart's own model of attention alone?

    python -m benchmarks.learning.hybrid --out benchmarks/results/learning                  # half an hour, busy cores
    python -m benchmarks.learning.hybrid --out DIR --seeds 1 --steps 20 --warm_steps 20     # a try

The quickstart's two parts, twice: its Qwen3, and a Qwen3.5 of the same widths (two gated delta rules around one
attention). Only the warm start's length differs: the hybrid imitates faster and would have nothing left to learn. Then
the quickstart's GRPO with the embedded engine, from three seeds each; reward over the last tenth of the steps, at
temperature 1, and held-out accuracy of greedy answers. Writes hybrid.json and hybrid.md into --out after every run; one
that was stopped goes on where it was.
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
from benchmarks.learning.__main__ import ROOT, curve, finished, run

LAYERS = ["linear_attention", "full_attention", "linear_attention"]
SCANS = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"model_type": "qwen3_5_text", "layer_types": LAYERS, **SCANS},
    "qwen3": {},
}
WARM = {"qwen3_5_text": 0.68, "qwen3": 1.0}
"""Part of the warm steps that leaves a family about half of the sums to learn."""


def warm_config(family: str, steps: int) -> dict[str, Any]:
    """The quickstart's imitation, with the family's layers."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs/quickstart_sft.yaml").read_text())
    config["model"]["init_args"]["model"]["config"] |= FAMILIES[family]
    config["trainer"] |= {"max_steps": max(1, round(steps * WARM[family])), "accelerator": "cpu"}
    return config


def rl_config(seed: int, model: Path, steps: int) -> dict[str, Any]:
    """The quickstart's GRPO from `model`; held-out accuracy every fifth of the steps."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    config["seed_everything"] = seed
    config["trainer"] |= {
        "max_steps": steps,
        "val_check_interval": max(1, steps // 5),
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "callbacks": [],
    }
    options = config["model"]["init_args"]
    options["model"] = {"path": str(model)}
    options["lr_scheduler"]["init_args"]["total_iters"] = steps
    data = config["data"]["init_args"]
    data["seed"] = seed
    data["prompts"]["init_args"]["seed"] = 1000 + seed
    return config


def rewards(run_dir: Path) -> list[float]:
    """Mean reward of every optimizer step."""
    with (run_dir / "metrics.csv").open() as file:
        return [float(row["reward"]) for row in csv.DictReader(file) if row.get("reward")]


def result(family: str, seed: int, run_dir: Path, seconds: float) -> dict[str, Any]:
    found, points = rewards(run_dir), curve(run_dir)
    tenth = max(1, len(found) // 10)
    return {
        "family": family,
        "seed": seed,
        "reward_first": statistics.mean(found[:tenth]),
        "reward_last": statistics.mean(found[-tenth:]),
        "curve": points,
        "seconds": seconds,
    }


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for family in dict.fromkeys(one["family"] for one in results):
        mine = [one for one in results if one["family"] == family]
        rows.append(
            {
                "family": family,
                "held_out_before": statistics.median(one["curve"][0][1] for one in mine),
                "held_out_after": [round(one["curve"][-1][1], 3) for one in mine],
                "reward_before": statistics.median(one["reward_first"] for one in mine),
                "reward_after": [round(one["reward_last"], 3) for one in mine],
                "seconds": statistics.median(one["seconds"] for one in mine),
            }
        )
    return rows


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# A hybrid learns",
        "",
        f"`{report['command']}` on {report['hardware']}: the quickstart's imitation, then its GRPO of"
        f" {report['steps']} steps with the embedded engine, by seed. `qwen3_5_text` has the widths of the quickstart's"
        " `qwen3`, and gated delta rules in its first and last layer; it imitates for"
        f" {report['warm_steps']['qwen3_5_text']} steps, the other for {report['warm_steps']['qwen3']}. Reward: mean of"
        " the first and the last tenth of the steps. Held-out: greedy answers to 256 sums that training never draws.",
        "",
        "| model | reward before | reward after, by seed | held-out before | held-out after, by seed | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["summary"]:
        after, held_out = (", ".join(f"{x:.3f}" for x in row[name]) for name in ("reward_after", "held_out_after"))
        lines.append(
            f"| {row['family']} | {row['reward_before']:.3f} | {after} | {row['held_out_before']:.3f} | {held_out} |"
            f" {row['seconds']:.0f} |"
        )
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of every run")
    parser.add_argument("--warm_steps", type=int, default=500, help="of the quickstart's own warm start")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning_hybrid", help="where the runs write")
    parser.add_argument("--deadline_s", type=float, default=1800.0, help="seconds one run may take")
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    args = parser.parse_args(argv)
    command = f"python -m benchmarks.learning.hybrid --steps {args.steps} --warm_steps {args.warm_steps}"
    results = finished(args.out / "hybrid.json", command)
    runs = args.runs / time.strftime("%Y-%m-%d_%H-%M-%S")
    report: dict[str, Any] = {
        "command": command,
        "hardware": args.hardware,
        "steps": args.steps,
        "warm_steps": {name: warm_config(name, args.warm_steps)["trainer"]["max_steps"] for name in FAMILIES},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for family in args.families:
            if any((one["family"], one["seed"]) == (family, seed) for one in results):
                continue
            warm = args.runs / f"warm_{family}_{report['warm_steps'][family]}"
            if not (warm / "summary.json").exists():  # written last
                shutil.rmtree(warm, ignore_errors=True)
                run(warm_config(family, args.warm_steps), warm, args.deadline_s)
            run_dir, began = runs / f"{family}_{seed}", time.monotonic()
            run(rl_config(seed, warm / "model", args.steps), run_dir, args.deadline_s)
            results.append(result(family, seed, run_dir, time.monotonic() - began))
            results.sort(key=lambda one: (list(FAMILIES).index(one["family"]), one["seed"]))
            report |= {"summary": summary(results), "results": results}
            write_json(args.out / "hybrid.json", report)
            (args.out / "hybrid.md").write_text(markdown(report))
            print(markdown(report), flush=True)
    return report


if __name__ == "__main__":
    main()
