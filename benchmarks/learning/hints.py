"""Does a policy learn more where it is shown, afterwards, what another sample of the same prompt did right?

    python -m benchmarks.learning.hints                      # 40 minutes on 2 cores; examples.smollm2.prepare first
    python -m benchmarks.learning.hints --seeds 1 --steps 2 --out DIR      # a try

examples/smollm2 (SmolLM2-135M adds two numbers, right about one time in twenty when it is sampled), from the same
weights, with the same questions, batches and learning rate: GRPO on the reward; the same reward beside hints, a reply
of the group that was right in `RLVRWorkflow.hint` for the policy as its own teacher (`forward_kl`, which follows at an
average); and hints alone that hold the answer, without a reward. Held-out accuracy of greedy answers, every five
steps. Every run is `python -m app fit` in a process of its own. Writes hints.json, .md and .png into --out after every
run; one that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.records import write_json
from benchmarks.learning.__main__ import ROOT, finished, run
from callbacks.pictures import read_metrics

HINT = "{{text}}\n\nA right answer:\n{{{}}}\n\nAnswer the question."
TEACHES = {
    "advantage": "distill",
    "objective": "reinforce",
    "regularisers": [{"name": "forward_kl", "coef": 1.0, "options": {"k": 20}}],
    "reference": "initial",
}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "GRPO": ({}, ""),
    "GRPO and right replies": (
        TEACHES | {"advantage_options": {"task": 1.0, "std": "group"}, "reference_refresh": {"every": 1, "ema": 0.9}},
        "solved",
    ),
    "answers alone": (TEACHES | {"reference_refresh": {"every": 1}}, "answer"),
}
"""By name: options of the module, and what the hint holds."""


def config(case: str, seed: int, made: Path, steps: int) -> dict[str, Any]:
    """The example's run on the model and the questions in `made`."""
    given: dict[str, Any] = yaml.safe_load((ROOT / "examples/smollm2/grpo.yaml").read_text())
    given["seed_everything"] = seed
    given["trainer"] |= {"max_steps": steps, "val_check_interval": min(5, steps), "accelerator": "cpu"}
    given["trainer"] |= {"callbacks": [], "enable_checkpointing": False}
    options, place = CASES[case]
    given["model"]["init_args"] |= options | {"model": {"path": str(made / "model")}}
    data = given["data"]["init_args"]
    data |= {"tokenizer": str(made / "model"), "seed": seed}
    data["prompts"]["init_args"]["path"] = str(made / "train.jsonl")
    data["validation"]["prompts"]["init_args"]["path"] = str(made / "held_out.jsonl")
    if place:
        data["workflow"]["init_args"]["hint"] = HINT.format(place)
    return given


def result(case: str, seed: int, run_dir: Path) -> dict[str, Any]:
    logged = read_metrics(run_dir / "metrics.csv")
    taught, (steps, accuracy) = logged.get("taught", ([], []))[1], logged["val/accuracy"]
    return {
        "case": case,
        "seed": seed,
        "curve": [(int(step), value) for step, value in zip(steps, accuracy, strict=True)],
        "taught": [round(one, 4) for one in taught],
        "seconds_a_step": statistics.median(logged["time/step"][1]),
    }


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """By case the held-out accuracy after each number of steps, by seed."""
    found: dict[str, Any] = {}
    for case in dict.fromkeys(one["case"] for one in results):
        mine = [one for one in results if one["case"] == case]
        steps = [step for step, _ in mine[0]["curve"]]
        by_step = {step: [dict(one["curve"])[step] for one in mine] for step in steps}
        found[case] = {"accuracy": by_step, "seconds_a_step": statistics.median(one["seconds_a_step"] for one in mine)}
    return found


def markdown(report: dict[str, Any]) -> str:
    steps = list(next(iter(report["summary"].values()))["accuracy"])
    lines = [
        "# Hints from the group",
        "",
        f"`{report['command']}` on {report['hardware']}: SmolLM2-135M adds two numbers, 8 questions x 8 replies a step;"
        " held-out accuracy (128 greedy answers) after so many steps, by seed. Seconds: the median step, other work"
        " beside.",
        "",
        "| case | " + " | ".join(map(str, steps)) + " | seconds a step |",
        "|---" * (len(steps) + 2) + "|",
    ]
    for case, row in report["summary"].items():
        cells = [", ".join(f"{one:.3f}" for one in row["accuracy"][step]) for step in steps]
        lines.append(f"| {case} | {' | '.join(cells)} | {row['seconds_a_step']:.1f} |")
    return "\n".join([*lines, ""])


def draw(report: dict[str, Any], file: Path) -> None:
    """Held-out accuracy over steps, a line a run."""
    from matplotlib.figure import Figure

    figure = Figure((6, 3.5), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(CASES, ("tab:gray", "tab:blue", "tab:orange"), strict=True))
    for one in report["results"]:
        label = (
            one["case"]
            if one["seed"] == min(r["seed"] for r in report["results"] if r["case"] == one["case"])
            else None
        )
        axes.plot(*zip(*one["curve"]), color=colours[one["case"]], label=label)
    axes.set(xlabel="optimizer steps", ylabel="held-out accuracy", ylim=(0, 1))
    axes.legend()
    figure.savefig(file, dpi=110)


def arguments(about: str | None, runs: str, steps: int, argv: Sequence[str] | None) -> argparse.Namespace:
    """Of a benchmark on examples/smollm2; ends the program where that was not prepared."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/learning"))
    parser.add_argument("--made", type=Path, default=ROOT / "runs/smollm2", help="what examples.smollm2.prepare wrote")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / runs, help="where the runs write")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps of every run")
    parser.add_argument("--deadline_s", type=float, default=3600.0, help="seconds one run may take")
    parser.add_argument("--hardware", default=f"{os.cpu_count()} cores", help="what the report says the machine is")
    args = parser.parse_args(argv)
    if not (args.made / "model" / "config.json").exists():
        parser.error(f"--made: no model in {args.made}: python -m examples.smollm2.prepare {args.made}")
    args.out.mkdir(parents=True, exist_ok=True)
    args.runs.mkdir(parents=True, exist_ok=True)
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = arguments(__doc__, "learning_hints", 20, argv)
    command = f"python -m benchmarks.learning.hints --seeds {args.seeds} --steps {args.steps}"
    results = finished(args.out / "hints.json", command)
    report: dict[str, Any] = {"command": command, "hardware": args.hardware}
    for seed in range(1, args.seeds + 1):
        for case in CASES:
            if any((one["case"], one["seed"]) == (case, seed) for one in results):
                continue
            run_dir = args.runs / f"{case.replace(' ', '_')}_{seed}"
            run(config(case, seed, args.made, args.steps), run_dir, args.deadline_s)
            results.append(result(case, seed, run_dir))
            results.sort(key=lambda one: (list(CASES).index(one["case"]), one["seed"]))
            report |= {"summary": summary(results), "results": results}
            write_json(args.out / "hints.json", report)
            (args.out / "hints.md").write_text(markdown(report))
            draw(report, args.out / "hints.png")
            print(markdown(report), flush=True)
    return report


if __name__ == "__main__":
    main()
