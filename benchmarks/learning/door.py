"""Does an agent learn through the gateway what the same task, written as a workflow, learns without it?

    python -m benchmarks.learning.door                      # 16 minutes on 2 cores
    python -m benchmarks.learning.door --quick --out DIR    # toy size, figures without meaning

The agent is examples/agents/plain_openai/agent.py, which is written with the `openai` package alone and knows nothing
of training; a process calls it for each episode, and it calls the gateway. The workflow is a `ToolWorkflow` with the
same tool. Both begin with one warm start, which imitates demonstrations of which half leave a number out, and have the
same questions, batches and optimizer (`benchmarks.learning.calculator` has the task). Every run is `python -m app fit`
on a configuration of this file's making, in a process of its own, one at a time. Writes door.json, .md, .png into --out
after every run; one that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.records import write_json
from benchmarks.learning.__main__ import ROOT, finished, run
from benchmarks.learning.calculator import chat_tokenizer, demonstrations
from callbacks.pictures import read_metrics

TASK = "benchmarks.learning.calculator"
REPLY = {"max_new_tokens": 24}
WAYS: dict[str, dict[str, Any]] = {
    "agent": {
        "class_path": "datamodules.workflows.gateway.AgentWorkflow",
        "init_args": {"agent": "examples.agents.plain_openai.agent.solve", **REPLY},
    },
    "workflow": {
        "class_path": "datamodules.workflows.ToolWorkflow",
        "init_args": {
            "tools": {"class_path": f"{TASK}.Calculator"},
            "parser": f"{TASK}.readable_calls",
            "max_turns": 6,  # as the agent
            **REPLY,
        },
    },
}
PER_STEP = {
    "wall_s": "clock/wall",
    "cpu_s": "clock/cpu",
    "sequences": "clock/sequences",
    "dense": "tokens/dense",
    "leaf": "tokens/leaf",
    "tree": "tokens/tree",
}


def warm_config(start: Path, success: float, steps: int) -> dict[str, Any]:
    """Imitation of the demonstrations in `start`, by the quickstart's model with this task's vocabulary."""
    config = yaml.safe_load((ROOT / "configs/quickstart_sft.yaml").read_text())
    config["trainer"] |= {"max_steps": steps, "accelerator": "cpu", "gradient_clip_val": 1.0}
    stop = {"success": success, "every": 5, "tokenizer": str(start / "tokenizer")}
    config["trainer"]["callbacks"].append({"class_path": f"{TASK}.StopAt", "init_args": stop})
    tokenizer = chat_tokenizer()
    config["model"]["init_args"]["model"]["config"] |= {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config["data"] = {
        "class_path": "datamodules.RecordedDataModule",
        "init_args": {
            "path": str(start / "demonstrations.jsonl"),
            "tokenizer": str(start / "tokenizer"),
            "workload": "whole",
            "tasks_per_batch": 64,
        },
    }
    return config


def rl_config(way: str, seed: int, start: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The quickstart's second part, with this task and the model in `start`."""
    config = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    config["seed_everything"] = seed
    config["trainer"] |= {
        "max_steps": given.steps,
        "val_check_interval": given.every,
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "callbacks": [{"class_path": f"{TASK}.StepClock"}],
    }
    options = config["model"]["init_args"]
    options["model"] = {"path": str(start)}
    options["optimizer"]["init_args"]["lr"] = given.lr
    options["lr_scheduler"]["init_args"]["total_iters"] = given.steps
    source = f"{TASK}.SumQuestions"
    held_out = {"split": "validation", "size": given.held_out, "seed": 3}
    config["data"]["init_args"] |= {
        "prompts": {"class_path": source, "init_args": {"seed": 1000 + seed}},
        "validation": {"prompts": {"class_path": source, "init_args": held_out}, "temperature": 1.0},
        "workflow": WAYS[way],
        "tokenizer": str(start),
        "batch_size": given.batch_size,
        "group_size": given.group_size,
        "seed": seed,
    }
    return config


def warm_start(given: argparse.Namespace) -> Path:
    """The directory of the model that all runs begin with; made where it is not."""
    start = given.runs / f"warm_{given.warm_success}_{given.warm_steps}"
    if not (start / "model" / "config.json").exists():
        shutil.rmtree(start, ignore_errors=True)
        made = given.runs / "demonstrations"
        made.mkdir(parents=True, exist_ok=True)
        chat_tokenizer().save_pretrained(made / "tokenizer")
        lines = (
            json.dumps(one) + "\n" for one in demonstrations(min(100, given.warm_steps) * 64, seed=1, careless=0.5)
        )
        (made / "demonstrations.jsonl").write_text("".join(lines))
        run(warm_config(made, given.warm_success, given.warm_steps), start, given.deadline_s)
    return start / "model"


def outcome(run_dir: Path) -> dict[str, Any]:
    """Of a finished run: held-out success by step, what the median step took, groups that failed."""
    logged = read_metrics(run_dir / "metrics.csv")
    steps, success = logged["val/accuracy"]
    curve = [[int(step), value] for step, value in dict(zip(steps, success)).items()]
    medians = {name: statistics.median(logged[key][1]) for name, key in PER_STEP.items()}
    return {"curve": curve, "failed": logged["rollouts/failed"][1][-1], **medians}


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """A row a way, over its seeds, and how far the ways are apart beside how far the seeds are."""
    rows = {}
    for way in dict.fromkeys(one["way"] for one in results):
        mine = [one for one in results if one["way"] == way]
        ends = [one["curve"][-1][1] for one in mine]
        rows[way] = {
            "before": statistics.median(one["curve"][0][1] for one in mine),
            "after": statistics.median(ends),
            "by_seed": ends,
            **{name: statistics.median(one[name] for one in mine) for name in PER_STEP},
            "failed": sum(one["failed"] for one in mine),
        }
    found: dict[str, Any] = {"ways": rows}
    if len(rows) == len(WAYS):
        spread = max(max(row["by_seed"]) - min(row["by_seed"]) for row in rows.values())
        apart = rows["agent"]["after"] - rows["workflow"]["after"]
        found |= {"apart": apart, "spread_of_seeds": spread, "equal": abs(apart) <= spread}
    return found


def markdown(report: dict[str, Any]) -> str:
    shape, found = report["shape"], report["summary"]
    lines = [
        "# Learning through the door",
        "",
        f"`{report['command']}`: held-out success ({shape['held_out']} questions, sampled at temperature 1) before"
        f" and after {shape['steps']} steps of {shape['batch_size']} questions x {shape['group_size']} samples, from"
        " one warm start; medians over the seeds. Seconds, sequences and tokens are those of a step, CPU seconds with"
        " all processes of the run. Runs were made one at a time, beside other work on the machine.",
        "",
        "| written as | before | after | after, by seed | wall s | CPU s | sequences | dense tokens | tree tokens"
        " | failed groups |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for way, row in found["ways"].items():
        ends = ", ".join(f"{one:.3f}" for one in row["by_seed"])
        cells = (
            way,
            f"{row['before']:.3f}",
            f"{row['after']:.3f}",
            ends,
            f"{row['wall_s']:.2f}",
            f"{row['cpu_s']:.2f}",
            f"{row['sequences']:,.0f}",
            f"{row['dense']:,.0f}",
            f"{row['tree']:,.0f}",
            f"{row['failed']:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    if "equal" in found:
        word = "equal" if found["equal"] else "not equal"
        lines += [
            "",
            f"Agent less workflow: {found['apart']:+.3f}; the seeds of one way are up to"
            f" {found['spread_of_seeds']:.3f} apart: {word} within the seeds' spread.",
        ]
    lines += ["", "| written as | seed | success after 0, " + f"{shape['every']}, ... steps |", "|---|---|---|"]
    for one in report["results"]:
        curve = ", ".join(f"{value:.3f}" for _, value in one["curve"])
        lines.append(f"| {one['way']} | {one['seed']} | {curve} |")
    return "\n".join([*lines, ""])


def picture(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    seen = set[str]()
    for one in results:
        way = one["way"]
        label = None if way in seen else {"agent": "agent (openai package)", "workflow": "workflow"}[way]
        axes.plot(*zip(*one["curve"]), color=f"C{list(WAYS).index(way)}", alpha=0.7, marker=".", label=label)
        seen.add(way)
    axes.set(xlabel="optimizer steps", ylabel="held-out success", ylim=(0, 1))
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write(report: dict[str, Any], out: Path) -> None:
    report["summary"] = summary(report["results"])
    write_json(out / "door.json", report)
    (out / "door.md").write_text(markdown(report))
    picture(report["results"], out / "door.png")


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning.door",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/learning")
    parser.add_argument("--quick", action="store_true", help="toy size, figures without meaning")
    parser.add_argument("--only", default=",".join(WAYS), help="ways, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of every run")
    parser.add_argument("--every", type=int, default=10, help="steps between validations")
    parser.add_argument("--warm_success", type=float, default=0.4, help="success at which imitation ends")
    parser.add_argument("--warm_steps", type=int, default=400, help="most steps of imitation")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--batch_size", type=int, default=16, help="questions a step")
    parser.add_argument("--group_size", type=int, default=8, help="samples of each")
    parser.add_argument("--held_out", type=int, default=256, help="questions of each validation")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "door", help="where the runs write")
    parser.add_argument("--deadline_s", type=float, default=1800.0, help="seconds one run may take")
    given = parser.parse_args(argv)
    for way in given.only.split(","):
        if way not in WAYS:
            parser.error(f"--only: no way '{way}'; choose from {', '.join(WAYS)}")
    if given.quick:
        small = {"seeds": 1, "steps": 2, "every": 2, "warm_steps": 2, "batch_size": 2, "group_size": 2, "held_out": 4}
        vars(given).update(small)
    return given


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    given = options(argv)
    names = ("seeds", "steps", "every", "warm_success", "warm_steps", "lr", "batch_size", "group_size", "held_out")
    shape = {name: getattr(given, name) for name in names}
    usual = vars(options([]))
    changed = "".join(f" --{name} {value}" for name, value in shape.items() if value != usual[name])
    command = "python -m benchmarks.learning.door" + (" --quick" if given.quick else changed)
    results = finished(given.out / "door.json", command)
    done = {(one["way"], one["seed"]) for one in results}
    report = {"command": command, "cores": os.cpu_count(), "shape": shape, "results": results}
    given.out.mkdir(parents=True, exist_ok=True)
    for seed in range(given.seeds):
        for way in given.only.split(","):
            if (way, seed) in done:
                continue
            start = warm_start(given)
            run_dir = given.runs / f"{way}_{seed}"
            shutil.rmtree(run_dir, ignore_errors=True)  # of one that was stopped
            run(rl_config(way, seed, start, given), run_dir, given.deadline_s)
            found = {"way": way, "seed": seed, **outcome(run_dir)}
            print(found, flush=True)
            results.append(found)
            results.sort(key=lambda one: (list(WAYS).index(one["way"]), one["seed"]))
            write(report, given.out)
    write(report, given.out)
    return report


if __name__ == "__main__":
    main()
