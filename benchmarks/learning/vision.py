"""Does a small model that sees learn, from nothing, by imitation and then by GRPO over trees with pictures?

    python -m benchmarks.learning.vision --out benchmarks/results/learning                       # ten minutes
    python -m benchmarks.learning.vision --task easy_vqa --steps 120 --out benchmarks/results/learning      # forty
    python -m benchmarks.learning.vision --task navigation --out benchmarks/results/learning     # forty, busy
    python -m benchmarks.learning.vision --out DIR --seeds 1 --steps 10            # a try

`squares`: the two parts of `make quickstart-vision` from three seeds, which decide weights, pictures and draws: a
Qwen3-VL of 0.26M parameters, tower and all, imitates, then learns by GRPO with the embedded engine. `easy_vqa`: the
same on the questions of the package easy-vqa about its PNG files, held out as the package does. `navigation`: worlds of
the package minigrid, a picture a turn; it imitates shortest ways, then walks by itself, rewarded 1 for the goal.
Held-out: greedy answers, or episodes, before and after GRPO; beside it what needs no eyes: the commonest answer alone,
or steps at random. Writes vision.json and vision.md (vision_easy_vqa, vision_navigation) into --out after every run;
one that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import random
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
from datamodules.prompts.base import Prompt
from datamodules.workflows.adapters.minigrid_prompts import GridWorld, MiniGridPrompts
from examples.vision.make_model import SPREAD, write

TOKENS = ("tokens/dense", "tokens/leaf", "tokens/tree")


SEEN = "datamodules.prompts.EasyVqaPrompts"
HELD_OUT = 1000  # questions of easy-vqa's test split
SHAPES: dict[str, dict[str, int]] = {
    "squares": {},
    "easy_vqa": {"patch": 8, "merge": 2, "tower": 64},
    "navigation": {"patch": 8, "max_position_embeddings": 1024},
}
"""Of the model, by task. easy-vqa's pictures of 64 x 64 are 16 tokens, of 2 x 2 patches each; a view of 5 x 5 tiles is
25 tokens, one a tile."""
WARM_STEPS = {"easy_vqa": 700, "navigation": 300}
LONGEST = 12  # tokens of an answer of easy-vqa, its end included

WORLDS = "datamodules.workflows.adapters.minigrid_prompts.MiniGridPrompts"
WALKS = "datamodules.workflows.adapters.minigrid_workflow.MiniGridWorkflow"
WORLD: dict[str, Any] = {
    "environment": "MiniGrid-Empty-Random-6x6-v0",
    "view": 5,
    "tile": 8,
    "actions": ["L", "R", "F"],
    "task": "{actions}",
}
EPISODES, TURNS = 256, 12  # episodes held out, the turns an episode may take
FIRST = 10_000_000  # seed of the first episode held out; training's are below


def warm_config(task: str, seed: int, model: Path) -> dict[str, Any]:
    """The imitation of the quickstart, of easy-vqa's answers, or of the steps of shortest ways."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs/vision_quickstart_sft.yaml").read_text())
    config["seed_everything"] = seed
    config["trainer"]["accelerator"] = "cpu"
    config["trainer"]["max_steps"] = WARM_STEPS.get(task, config["trainer"]["max_steps"])
    config["model"]["init_args"]["model"]["path"] = str(model)
    data = config["data"]["init_args"]
    data["tokenizer"] = str(model)
    if task == "navigation":
        data["prompts"] = {"class_path": WORLDS, "init_args": WORLD | {"steps": 4, "first": 100_000 * seed}}
        return config
    if task == "easy_vqa":
        data["prompts"] = {"class_path": SEEN, "init_args": {}}
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
    if task == "navigation":
        worlds = WORLD | {"first": 500_000 + 100_000 * seed}  # none that was imitated
        data["prompts"] = {"class_path": WORLDS, "init_args": worlds}
        data["validation"]["prompts"] = {"class_path": WORLDS, "init_args": WORLD | {"first": FIRST, "size": EPISODES}}
        data["workflow"] = {"class_path": WALKS, "init_args": {"max_turns": TURNS, "max_new_tokens": 2}}
        data |= {"reward": None, "batch_size": 16}
        return config
    if task == "easy_vqa":
        policy = config["model"]["init_args"]
        policy["optimizer"]["init_args"]["lr"] = 1e-4  # at 3e-4 it is sure of all it says in 40 steps, right or wrong
        policy["regularisers"] = [{"name": "entropy", "coef": 0.01}]
        data["prompts"] = {"class_path": SEEN, "init_args": {}}
        data["validation"]["prompts"] = {
            "class_path": SEEN,
            "init_args": {"split": "test", "size": HELD_OUT, "shuffle": False},
        }
        data["workflow"]["init_args"]["max_new_tokens"] = LONGEST
    data["prompts"]["init_args"]["seed"] = 1000 + seed
    return config


def blind(task: str) -> float:
    """Held-out accuracy without eyes: that of the commonest answer, or of steps at random (ten walks each)."""
    if task == "navigation":
        draw = random.Random(0)
        return statistics.mean(walked(prompt, draw) for prompt in dealt(held_out(task)) * 10)
    answers = Counter(prompt.answer for prompt in dealt(held_out(task)))
    return max(answers.values()) / answers.total()


def held_out(task: str) -> PromptSource:
    options = rl_config(task, 0, Path(), 1)["data"]["init_args"]["validation"]["prompts"]["init_args"]
    return {"navigation": MiniGridPrompts, "easy_vqa": EasyVqaPrompts, "squares": SquaresPrompts}[task](**options)


def dealt(source: PromptSource) -> list[Prompt]:
    assert source.size is not None
    return [source.deal(index) for index in range(source.size)]


def walked(prompt: Prompt, draw: random.Random) -> bool:
    """Whether steps at random reach the goal within the turns."""
    world = GridWorld.of(prompt)
    for _ in range(TURNS):
        world.act(draw.choice(WORLD["actions"]))
    return world.success


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
    "navigation": "MiniGrid-Empty-Random-6x6-v0 of the package minigrid from {seeds} seeds, a Qwen3-VL from nothing,"
    " imitation of {warm_steps} steps of 96 moves of shortest ways (the goal often out of sight), then GRPO of {steps}"
    " steps (16 worlds, 8 walks each of at most {turns} moves, a picture a move). Held-out: greedy walks in {episodes}"
    " worlds that training never draws",
}
BLIND = {"navigation": "steps at random reach the goal in {share:.3f} of them"}


def markdown(report: dict[str, Any]) -> str:
    numbers = {"held_out": HELD_OUT, "turns": TURNS, "episodes": EPISODES, "seeds": len(report["results"])}
    about = ABOUT[report["task"]].format(**numbers, **report)
    beside = BLIND.get(report["task"], "the commonest answer alone is right about {share:.3f} of them")
    lines = [
        "# A model learns to see",
        "",
        f"`{report['command']}` on {report['hardware']}: {about};"
        f" {beside.format(share=report['blind'])}. Tokens: mean of a step, dense : dense-leaf : tree.",
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
        "blind": blind(args.task),
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
