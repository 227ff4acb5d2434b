"""Does a small model that sees learn, from nothing, by imitation and then by GRPO over trees with pictures?

    python -m benchmarks.learning.vision --out benchmarks/results/learning                     # ten minutes
    python -m benchmarks.learning.vision --task easy_vqa --out benchmarks/results/learning     # not measured
    python -m benchmarks.learning.vision --out DIR --seeds 1 --steps 10            # a try

`squares`: the two parts of `make quickstart-vision` from three seeds, which decide weights, pictures and draws: a
Qwen3-VL of 0.26M parameters, tower and all, imitates, then learns by GRPO with the embedded engine. `easy_vqa`: the
same on the questions of the package easy-vqa about its PNG files, held out as the package does. Held-out accuracy is
that of greedy answers, before and after GRPO; beside it what the commonest answer alone would get. Writes vision.json
and vision.md (vision_easy_vqa.json and .md) into --out after every run; one that was stopped goes on where it was.
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
from datamodules.prompts import EasyVqaPrompts, PromptSource, SquaresPrompts
from examples.vision.make_model import SPREAD, write

TOKENS = ("tokens/dense", "tokens/leaf", "tokens/tree")


SEEN = "datamodules.prompts.EasyVqaPrompts"
HELD_OUT = 1000  # questions of easy-vqa's test split
SHAPES: dict[str, dict[str, int]] = {"squares": {}, "easy_vqa": {"patch": 8, "merge": 2, "tower": 64}}
"""Of the model, by task; easy-vqa's pictures of 64 x 64 are 16 tokens, of 2 x 2 patches each."""
WARM_STEPS = {"easy_vqa": 2500}
LONGEST = 12  # tokens of an answer of easy-vqa, its end included


def warm_config(task: str, seed: int, model: Path) -> dict[str, Any]:
    """The imitation of the quickstart, or of easy-vqa's answers."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs/vision_quickstart_sft.yaml").read_text())
    config["seed_everything"] = seed
    config["trainer"]["accelerator"] = "cpu"
    config["model"]["init_args"]["model"]["path"] = str(model)
    data = config["data"]["init_args"]
    data["tokenizer"] = str(model)
    if task == "easy_vqa":
        data["prompts"] = {"class_path": SEEN, "init_args": {}}
        config["trainer"]["max_steps"] = WARM_STEPS[task]
    data["prompts"]["init_args"]["seed"] = 500 + seed
    return config


def rl_config(task: str, seed: int, model: Path, steps: int) -> dict[str, Any]:
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
    if task == "easy_vqa":
        held_out = {"split": "test", "size": HELD_OUT, "shuffle": False}
        data["prompts"] = {"class_path": SEEN, "init_args": {}}
        data["validation"]["prompts"] = {"class_path": SEEN, "init_args": held_out}
        data["workflow"]["init_args"]["max_new_tokens"] = LONGEST
    data["prompts"]["init_args"]["seed"] = 1000 + seed
    return config


def held_out(task: str) -> PromptSource:
    config = rl_config(task, 0, Path(), 1)["data"]["init_args"]["validation"]["prompts"]["init_args"]
    return EasyVqaPrompts(**config) if task == "easy_vqa" else SquaresPrompts(**config)


def commonest(task: str) -> float:
    """Share of the held-out questions that the commonest answer is right about."""
    source = held_out(task)
    assert source.size is not None
    answers = Counter(source.deal(index).answer for index in range(source.size))
    return max(answers.values()) / answers.total()


def result(seed: int, run_dir: Path, warm_seconds: float, seconds: float) -> dict[str, Any]:
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    means = {name: statistics.mean(float(row[name]) for row in rows if row.get(name)) for name in TOKENS}
    found = {"seed": seed, "curve": curve(run_dir), "tokens": means}
    return found | {"warm_seconds": warm_seconds, "seconds": seconds}


ABOUT = {
    "squares": "`make quickstart-vision` from {seeds} seeds, imitation of {warm_steps} steps, then GRPO of {steps}"
    " steps (63 questions on 21 pictures, 8 samples each). Held-out: greedy answers to 255 questions about 85 pictures"
    " that training never draws",
    "easy_vqa": "easy-vqa from {seeds} seeds, a Qwen3-VL from nothing, imitation of {warm_steps} steps of 96 answers,"
    " then GRPO of {steps} steps (63 questions, 8 samples each). Held-out: greedy answers to {held_out} questions of"
    " the package's test split",
}


def markdown(report: dict[str, Any]) -> str:
    about = ABOUT[report["task"]].format(seeds=len(report["results"]), held_out=HELD_OUT, **report)
    lines = [
        "# A model learns to see",
        "",
        f"`{report['command']}` on {report['hardware']}: {about}; the commonest answer alone is right about"
        f" {report['commonest']:.3f} of them. Tokens: mean of a step, dense : dense-leaf : tree.",
        "",
        "| seed | held-out after imitation | by step of GRPO | held-out after GRPO | tokens | minutes of imitation | of"
        " GRPO, validation included |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in report["results"]:
        curve_text = ", ".join(f"{step}: {value:.3f}" for step, value in one["curve"][1:-1])
        dense, leaf, tree = (one["tokens"][name] for name in TOKENS)
        tokens = f"{dense:.0f} : {leaf:.0f} : {tree:.0f} = {dense / tree:.1f} : {leaf / tree:.1f} : 1"
        lines.append(
            f"| {one['seed']} | {one['curve'][0][1]:.3f} | {curve_text} | {one['curve'][-1][1]:.3f} | {tokens} |"
            f" {one['warm_seconds'] / 60:.1f} | {one['seconds'] / 60:.1f} |"
        )
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", choices=list(SHAPES), default="squares")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of GRPO")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning_vision", help="where the runs write")
    parser.add_argument("--deadline_s", type=float, default=3600.0, help="seconds one run may take")
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    args = parser.parse_args(argv)
    name = "vision" if args.task == "squares" else f"vision_{args.task}"
    command = f"python -m benchmarks.learning.vision --task {args.task} --steps {args.steps}"
    results = finished(args.out / f"{name}.json", command)
    runs = args.runs / time.strftime("%Y-%m-%d_%H-%M-%S")
    report: dict[str, Any] = {
        "command": command,
        "hardware": args.hardware,
        "task": args.task,
        "steps": args.steps,
        "warm_steps": warm_config(args.task, 0, Path())["trainer"]["max_steps"],
        "commonest": commonest(args.task),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        if any(one["seed"] == seed for one in results):
            continue
        model, warm, began = runs / f"model_{seed}", runs / f"warm_{seed}", time.monotonic()
        write(model, seed=seed, spread=SPREAD, **SHAPES[args.task])
        run(warm_config(args.task, seed, model), warm, args.deadline_s)
        imitated = time.monotonic()
        run(rl_config(args.task, seed, warm / "model", args.steps), runs / f"grpo_{seed}", args.deadline_s)
        results.append(result(seed, runs / f"grpo_{seed}", imitated - began, time.monotonic() - imitated))
        report |= {"results": sorted(results, key=lambda one: one["seed"])}
        write_json(args.out / f"{name}.json", report)
        (args.out / f"{name}.md").write_text(markdown(report))
        print(markdown(report), flush=True)
    return report


if __name__ == "__main__":
    main()
