"""What do a few hundred worked answers give before the rewards, and what do the rewards give after them?

    python -m examples.sft_then_grpo.prepare runs/sft_then_grpo
    python -m benchmarks.learning.sft_then_grpo --out benchmarks/results/learning      # two hours, two busy cores
    python -m benchmarks.learning.sft_then_grpo --out DIR --seeds 1 --steps 4 --every 2       # a try

The two files of examples/sft_then_grpo as they stand, but for seeds: imitation once a seed, then GRPO from what it
left; beside it GRPO from the model as it came. Held-out accuracy of greedy answers. Seconds of a step are medians.
Writes sft_then_grpo.json, .md and .png into --out after every run; one that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.records import write_json
from benchmarks.learning.__main__ import ROOT, curve, finished, run

EXAMPLE = ROOT / "examples" / "sft_then_grpo"
CASES = ("SFT, then GRPO", "GRPO alone")


def sft_config(seed: int) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((EXAMPLE / "sft.yaml").read_text())
    config["seed_everything"] = seed
    config["trainer"] |= {"accelerator": "cpu", "enable_checkpointing": False}
    config["data"]["init_args"]["prompts"]["init_args"]["seed"] = seed
    return config


def grpo_config(seed: int, model: Path | None, steps: int, every: int) -> dict[str, Any]:
    """From `model`, or from the one that the example fetches."""
    config: dict[str, Any] = yaml.safe_load((EXAMPLE / "grpo.yaml").read_text())
    config["seed_everything"] = seed
    config["trainer"] |= {"accelerator": "cpu", "enable_checkpointing": False, "callbacks": []}
    config["trainer"] |= {"max_steps": steps, "val_check_interval": every}
    if model is not None:
        config["model"]["init_args"]["model"] = {"path": str(model)}
    config["data"]["init_args"]["seed"] = seed
    config["data"]["init_args"]["prompts"]["init_args"]["seed"] = seed
    return config


def result(case: str, seed: int, run_dir: Path, sft_seconds: float | None, seconds: float) -> dict[str, Any]:
    """Of a run of GRPO. Seconds: of the whole processes."""
    with (run_dir / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("time/step")]
    return {
        "case": case,
        "seed": seed,
        "curve": curve(run_dir),
        "sft_seconds": sft_seconds,
        "seconds": seconds,
        "seconds_a_step": statistics.median(float(row["time/step"]) for row in rows),
        "tokens": {name: sum(float(row[f"tokens/{name}"]) for row in rows) for name in ("dense", "leaf", "tree")},
        "length": statistics.mean(float(row["rollouts/length"]) for row in rows if row["rollouts/length"]),
    }


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        mine = [one for one in results if one["case"] == case]
        if mine:
            imitation = [one["sft_seconds"] for one in mine if one["sft_seconds"] is not None]
            rows.append(
                {
                    "case": case,
                    "before": [round(one["curve"][0][1], 3) for one in mine],
                    "after": [round(one["curve"][-1][1], 3) for one in mine],
                    "sft_minutes": round(statistics.median(imitation) / 60, 1) if imitation else None,
                    "minutes": round(statistics.median(one["seconds"] for one in mine) / 60, 1),
                    "seconds_a_step": round(statistics.median(one["seconds_a_step"] for one in mine), 2),
                    "length": round(statistics.mean(one["length"] for one in mine), 1),
                }
            )
    return rows


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Imitation, then rewards",
        "",
        f"`{report['command']}` on {report['hardware']}. SmolLM2-135M on sums of three two-digit numbers: 30 steps of"
        f" imitation of 480 worked answers, {report['steps']} steps of GRPO (8 prompts x 8 replies of at most 48"
        " tokens), float32; held-out accuracy is of greedy answers to 128 sums, before and after GRPO.",
        "",
        "| case | seeds | held-out before | after | minutes of imitation | minutes of GRPO, validation included |"
        " seconds a step, median | tokens a reply |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["summary"]:
        before, after = (", ".join(map(str, row[name])) for name in ("before", "after"))
        imitation = "-" if row["sft_minutes"] is None else row["sft_minutes"]
        lines.append(
            f"| {row['case']} | {len(row['after'])} | {before} | {after} | {imitation} | {row['minutes']} |"
            f" {row['seconds_a_step']:.2f} | {row['length']} |"
        )
    ours = [one["tokens"] for one in report["results"]]
    dense, leaf, tree = (sum(one[name] for one in ours) for name in ("dense", "leaf", "tree"))
    lines += [
        "",
        f"Tokens of GRPO: {dense / tree:.1f} times fewer than one sequence a turn, {leaf / tree:.1f} times fewer than"
        " without prefixes of others (an episode is one turn here).",
    ]
    return "\n".join([*lines, ""])


def picture(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4))
    for one in results:
        first = one["seed"] == min(other["seed"] for other in results if other["case"] == one["case"])
        color = f"C{CASES.index(one['case'])}"
        axis.plot(*zip(*one["curve"]), color=color, alpha=0.8, label=one["case"] if first else None)
    axis.set(xlabel="steps of GRPO", ylabel="held-out accuracy", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between validations")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "sft_then_grpo_benchmark", help="where runs write")
    parser.add_argument("--deadline_s", type=float, default=3600.0, help="seconds one run may take")
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    given = parser.parse_args(argv)
    if not (ROOT / "runs/sft_then_grpo/model").exists():
        parser.error(
            "runs/sft_then_grpo/model: run `python -m examples.sft_then_grpo.prepare runs/sft_then_grpo` first"
        )
    command = f"python -m benchmarks.learning.sft_then_grpo --steps {given.steps} --every {given.every}"
    given.out.mkdir(parents=True, exist_ok=True)
    results = finished(given.out / "sft_then_grpo.json", command)
    report: dict[str, Any] = {"command": command, "hardware": given.hardware, "steps": given.steps}
    for seed in range(1, given.seeds + 1):
        for case in given.cases:
            if any((one["case"], one["seed"]) == (case, seed) for one in results):
                continue
            model, imitation = None, None
            if case == CASES[0]:
                warm, began = given.runs / f"sft_{seed}", time.perf_counter()
                run(sft_config(seed), warm, given.deadline_s)
                model, imitation = warm / "model", time.perf_counter() - began
            place, began = given.runs / f"grpo_{CASES.index(case)}_{seed}", time.perf_counter()
            run(grpo_config(seed, model, given.steps, given.every), place, given.deadline_s)
            results.append(result(case, seed, place, imitation, time.perf_counter() - began))
            results.sort(key=lambda one: (CASES.index(one["case"]), one["seed"]))
            report |= {"summary": summary(results), "results": results}
            write_json(given.out / "sft_then_grpo.json", report)
            (given.out / "sft_then_grpo.md").write_text(markdown(report))
            picture(results, given.out / "sft_then_grpo.png")
            print(markdown(report), flush=True)
    return report


if __name__ == "__main__":
    main()
