"""What does it spare to let prompts sit out that taught nothing, and does it cost anything that is learned?

    python -m benchmarks.learning.rest                      # 40 minutes on 2 cores; examples.smollm2.prepare first
    python -m benchmarks.learning.rest --seeds 1 --steps 2 --out DIR      # a try

examples/smollm2 (SmolLM2-135M adds two numbers) on 96 of its questions, so that each comes several times; groups whose
rewards are all equal are left out (`NoSignal`). With `data.limits.rest` and without, from the same weights and order
of questions, the same number of optimizer steps: groups played and left out, wall seconds of the run, held-out accuracy
of greedy answers. Every run is `python -m app fit` in a process of its own. Writes rest.json and .md into --out after
every run; one that was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.common.records import write_json
from benchmarks.learning import hints
from benchmarks.learning.__main__ import FILTER, finished, run
from callbacks.pictures import read_metrics

QUESTIONS = 96
RESTS = (0, 7, 63)
"""`data.limits.rest`: turns that a prompt sits out at most; 0 stands for none."""


def config(rest: int, seed: int, made: Path, questions: Path, steps: int) -> dict[str, Any]:
    given = hints.config("GRPO", seed, made, steps)
    data = given["data"]["init_args"]
    data["prompts"]["init_args"]["path"] = str(questions)
    return given | {"data": given["data"] | {"init_args": data | {"filter": FILTER, "limits": {"rest": rest or None}}}}


def result(rest: int, seed: int, run_dir: Path) -> dict[str, Any]:
    logged = read_metrics(run_dir / "metrics.csv")
    last = {name.removeprefix("rollouts/"): int(values[-1]) for name, (_, values) in logged.items() if values}
    return {
        "rest": rest,
        "seed": seed,
        "trained": last["trained"],
        "played": last["accepted"] + last["dropped_filtered"],
        "left_out": last["dropped_filtered"],
        "rested": last.get("rested", 0),
        "seconds": round(sum(logged["time/step"][1]), 1),
        "curve": [(int(step), value) for step, value in zip(*logged["val/accuracy"], strict=True)],
    }


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Prompts that sit out",
        "",
        f"`{report['command']}` on {report['hardware']}: SmolLM2-135M adds two numbers, {QUESTIONS} questions, 8 groups"
        " of 8 replies a step, groups of equal rewards left out. Seconds: of all steps, their waits for rollouts"
        " included, other work beside.",
        "",
        "| rest | seed | groups trained | played | left out | sat out | seconds | held-out accuracy at the end |",
        "|---" * 8 + "|",
    ]
    for one in report["results"]:
        counts = f"{one['trained']} | {one['played']} | {one['left_out']} | {one['rested']} | {one['seconds']:.0f}"
        lines.append(f"| {one['rest']} | {one['seed']} | {counts} | {one['curve'][-1][1]:.3f} |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = hints.arguments(__doc__, "learning_rest", 30, argv)
    command = f"python -m benchmarks.learning.rest --seeds {args.seeds} --steps {args.steps}"
    questions = args.runs / "questions.jsonl"
    with (args.made / "train.jsonl").open() as lines:
        questions.write_text("".join(islice(lines, QUESTIONS)))
    results = finished(args.out / "rest.json", command)
    report: dict[str, Any] = {"command": command, "hardware": args.hardware}
    for seed in range(1, args.seeds + 1):
        for rest in RESTS:
            if any((one["rest"], one["seed"]) == (rest, seed) for one in results):
                continue
            run_dir = args.runs / f"{rest}_{seed}"
            run(config(rest, seed, args.made, questions, args.steps), run_dir, args.deadline_s)
            results.append(result(rest, seed, run_dir))
            results.sort(key=lambda one: (one["rest"], one["seed"]))
            report["results"] = results
            write_json(args.out / "rest.json", report)
            (args.out / "rest.md").write_text(markdown(report))
            print(markdown(report), flush=True)
    return report


if __name__ == "__main__":
    main()
