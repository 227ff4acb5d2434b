"""Does a small model that sees learn to count, from nothing, by imitation and then by GRPO over trees with pictures?

    python -m benchmarks.learning.vision --out benchmarks/results/learning         # a quarter of an hour of CPU time
    python -m benchmarks.learning.vision --out DIR --seeds 1 --steps 10            # a try

The two parts of `make quickstart-vision` from three seeds, which decide weights, pictures and draws: a Qwen3-VL of
0.26M parameters, tower and all, imitates, then learns by GRPO with the embedded engine. Held-out accuracy is that of
greedy answers on pictures whose arrangements training never draws, before and after GRPO; beside it what the commonest
answer alone would get. Writes vision.json and vision.md into --out after every run; one that was stopped goes on where
it was.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.records import write_json
from benchmarks.learning.__main__ import ROOT, curve, finished, run
from datamodules.prompts import SquaresPrompts
from examples.vision.make_model import SPREAD, write

TOKENS = ("tokens/dense", "tokens/leaf", "tokens/tree")


def warm_config(seed: int, model: Path) -> dict[str, Any]:
    """The imitation of the quickstart."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs/vision_quickstart_sft.yaml").read_text())
    config["seed_everything"] = seed
    config["trainer"]["accelerator"] = "cpu"
    config["model"]["init_args"]["model"]["path"] = str(model)
    config["data"]["init_args"]["tokenizer"] = str(model)
    config["data"]["init_args"]["prompts"]["init_args"]["seed"] = 500 + seed
    return config


def rl_config(seed: int, model: Path, steps: int) -> dict[str, Any]:
    """Its GRPO from `model`; held-out accuracy every quarter of the steps."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs/vision_quickstart.yaml").read_text())
    config["seed_everything"] = seed
    config["trainer"] |= {
        "max_steps": steps,
        "val_check_interval": max(1, steps // 4),
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "callbacks": [],
    }
    config["model"]["init_args"]["model"]["path"] = str(model)
    data = config["data"]["init_args"]
    data["tokenizer"], data["seed"] = str(model), seed
    data["prompts"]["init_args"]["seed"] = 1000 + seed
    return config


def commonest() -> float:
    """Share of the held-out questions that the commonest answer is right about."""
    config = rl_config(0, Path(), 1)["data"]["init_args"]["validation"]["prompts"]["init_args"]
    answers = Counter(prompt.answer for prompt in SquaresPrompts(**config).samples())
    return max(answers.values()) / answers.total()


def result(seed: int, run_dir: Path, seconds: float) -> dict[str, Any]:
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    means = {name: statistics.mean(float(row[name]) for row in rows if row.get(name)) for name in TOKENS}
    return {"seed": seed, "curve": curve(run_dir), "tokens": means, "seconds": seconds}


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# A model learns to see",
        "",
        f"`{report['command']}` on {report['hardware']}: `make quickstart-vision` from {len(report['results'])} seeds,"
        f" imitation of {report['warm_steps']} steps, then GRPO of {report['steps']} steps (63 questions on 21"
        " pictures, 8 samples each). Held-out: greedy answers to 255 questions about 85 pictures that training never"
        f" draws; the commonest answer alone is right about {report['commonest']:.3f} of them. Tokens: mean of a step,"
        " dense : dense-leaf : tree.",
        "",
        "| seed | held-out after imitation | by step of GRPO | held-out after GRPO | tokens | seconds, GRPO |",
        "|---|---|---|---|---|---|",
    ]
    for one in report["results"]:
        curve_text = ", ".join(f"{step}: {value:.3f}" for step, value in one["curve"][1:-1])
        dense, leaf, tree = (one["tokens"][name] for name in TOKENS)
        tokens = f"{dense:.0f} : {leaf:.0f} : {tree:.0f} = {dense / tree:.1f} : {leaf / tree:.1f} : 1"
        lines.append(
            f"| {one['seed']} | {one['curve'][0][1]:.3f} | {curve_text} | {one['curve'][-1][1]:.3f} | {tokens} |"
            f" {one['seconds']:.0f} |"
        )
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of GRPO")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning_vision", help="where the runs write")
    parser.add_argument("--deadline_s", type=float, default=3600.0, help="seconds one run may take")
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    args = parser.parse_args(argv)
    command = f"python -m benchmarks.learning.vision --steps {args.steps}"
    results = finished(args.out / "vision.json", command)
    runs = args.runs / time.strftime("%Y-%m-%d_%H-%M-%S")
    report: dict[str, Any] = {
        "command": command,
        "hardware": args.hardware,
        "steps": args.steps,
        "warm_steps": warm_config(0, Path())["trainer"]["max_steps"],
        "commonest": commonest(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        if any(one["seed"] == seed for one in results):
            continue
        model, warm = runs / f"model_{seed}", runs / f"warm_{seed}"
        write(model, seed=seed, spread=SPREAD)
        run(warm_config(seed, model), warm, args.deadline_s)
        began = time.monotonic()
        run(rl_config(seed, warm / "model", args.steps), runs / f"grpo_{seed}", args.deadline_s)
        results.append(result(seed, runs / f"grpo_{seed}", time.monotonic() - began))
        report |= {"results": sorted(results, key=lambda one: one["seed"])}
        write_json(args.out / "vision.json", report)
        (args.out / "vision.md").write_text(markdown(report))
        print(markdown(report), flush=True)
    return report


if __name__ == "__main__":
    main()
