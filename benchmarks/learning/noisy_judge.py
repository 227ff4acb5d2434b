"""What does the noise of a judge cost, and what do ranking and asking twice give back?

    python -m benchmarks.learning.noisy_judge --out benchmarks/results/learning           # about a quarter of an hour
    python -m benchmarks.learning.noisy_judge --out DIR --seeds 1 --steps 10 --warm_steps 50     # a try

The quickstart's sums from one warm start, GRPO, with rewards by a judge that sees the truth of every reply and takes it
for its opposite with a known probability, each time anew. Three ways to ask it, by the judges of `datamodules`: each
reply alone (`RubricJudge`, a yes or no), each reply twice and the mean, and the group side by side, once in each
direction (`RankingJudge`). Held-out accuracy is of greedy answers, by the truth. The judge stands where a judge's
client would: no HTTP, no model, so that its error rate is what the case says. Writes noisy_judge.json, .md and .png
into --out after every run; one that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common.records import write_json
from benchmarks.learning import hybrid
from benchmarks.learning.__main__ import ROOT, curve, finished, run, warm_config
from datamodules.rewards.functions import exact_match
from datamodules.rewards.judges import JudgeModel, RankingJudge, RubricJudge
from datamodules.rewards.judges.answers import verdict
from datamodules.rewards.judges.client import Question, Spent

_T = TypeVar("_T")
BATCH, GROUP = 32, 8
# Case -> (way to ask, error rate).
CASES: dict[str, tuple[str, float]] = {
    "single, 0%": ("single", 0.0),
    "single, 10%": ("single", 0.1),
    "single, 30%": ("single", 0.3),
    "twice, 30%": ("twice", 0.3),
    "ranked, 30%": ("ranked", 0.3),
}
_MODEL = JudgeModel(url="http://localhost/v1", name="noisy", temperature=1.0)  # which is never asked


class NoisyClient:
    """Answers in place of a server, with a verdict in JSON, from what a request would hold.

    Args:
        error: the chance that a reply is taken for the opposite of what it is, drawn anew for each that a question
            shows.
        seed: of the draws.
    """

    exhausted = ""

    def __init__(self, error: float, seed: int) -> None:
        self._error = error
        self._random = random.Random(seed)
        self.spent = Spent()

    def open(self) -> None: ...

    def close(self) -> None: ...

    async def ask(self, question: Question[_T]) -> _T:
        self.spent.calls += 1
        blocks = dict(question.blocks)
        first, second = blocks.pop("TASK").removesuffix("=").split("+")
        sum_ = str(int(first) + int(second))
        seen = [(text.strip() == sum_) != (self._random.random() < self._error) for text in blocks.values()]
        if "REPLY" in blocks:
            return verdict(json.dumps({"right": int(seen[0])}), question.read)
        places = [[at for at, right in enumerate(seen, 1) if right == which] for which in (True, False)]
        return verdict(json.dumps({"ranking": [place for place in places if place]}), question.read)


class NoisyRubric(RubricJudge):
    """Each reply alone, right or wrong. Args: error, seed: see `NoisyClient`. repeats: how often it is asked."""

    def __init__(self, error: float, seed: int, repeats: int = 1) -> None:
        criteria = {"right": "the sum is right"}
        super().__init__(_MODEL, criteria, scale=1, reasoning=False, repeats=repeats, verifier=exact_match)
        self._noise = error, seed

    def client(self) -> NoisyClient:
        return NoisyClient(*self._noise)


class NoisyRanking(RankingJudge):
    """A group side by side, in both directions. Args: as `NoisyRubric`."""

    def __init__(self, error: float, seed: int) -> None:
        super().__init__(_MODEL, "the right sum before wrong ones", verifier=exact_match)
        self._noise = error, seed

    def client(self) -> NoisyClient:
        return NoisyClient(*self._noise)


def rl_config(case: str, seed: int, model: Path, steps: int) -> dict[str, Any]:
    """The quickstart's second part with batches of 32 x 8 and a judge; held-out accuracy five times."""
    way, error = CASES[case]
    config = hybrid.rl_config(seed, model, steps)
    data = config["data"]["init_args"]
    data |= {"batch_size": BATCH, "group_size": GROUP}
    kind = "NoisyRanking" if way == "ranked" else "NoisyRubric"
    about = {"error": error, "seed": seed} | ({"repeats": 2} if way == "twice" else {})
    data["reward"] = {"class_path": f"benchmarks.learning.noisy_judge.{kind}", "init_args": about}
    return config


def result(case: str, seed: int, run_dir: Path, seconds: float) -> dict[str, Any]:
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row.get("rollouts/judge_calls")]
    drift = [float(row["reward/drift"]) for row in rows if row.get("reward/drift")]
    points = curve(run_dir)
    return {
        "case": case,
        "seed": seed,
        "curve": points,
        "calls_a_step": float(steps[-1]["rollouts/judge_calls"]) / points[-1][0],
        "drift": statistics.fmean(drift),
        "seconds": seconds,
    }


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for case in dict.fromkeys(one["case"] for one in results):
        mine = [one for one in results if one["case"] == case]
        start = statistics.fmean(one["curve"][0][1] for one in mine)
        ends = [one["curve"][-1][1] for one in mine]
        rows.append(
            {
                "case": case,
                "start": start,
                "halfway": statistics.fmean(one["curve"][len(one["curve"]) // 2][1] for one in mine),
                "final": [round(one, 3) for one in ends],
                "gain": statistics.fmean(ends) - start,
                "calls_a_step": statistics.fmean(one["calls_a_step"] for one in mine),
                "drift": statistics.fmean(one["drift"] for one in mine),
            }
        )
    return rows


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# A judge that errs",
        "",
        f"`{report['command']}` on {report['hardware']}, {len(report['summary'][0]['final'])} seeds: the quickstart's"
        f" sums from one warm start, {report['steps']} steps of {BATCH} prompts x {GROUP} replies, rewards by a judge"
        " that takes a reply for the opposite of what it is with the probability of the case. Held-out: greedy answers"
        " to 256 sums, by the truth; gain: over the start, mean of the seeds. Requests: questions to the judge. Drift:"
        " the judge's number less the truth's (of rankings: place less place).",
        "",
        "| judge | held-out before | after half of the steps, mean | after all, by seed | gain | of the perfect judge's"
        " | requests a step | drift |",
        "|---|---|---|---|---|---|---|---|",
    ]
    perfect = report["summary"][0]["gain"]
    for row in report["summary"]:
        ends = ", ".join(f"{one:.3f}" for one in row["final"])
        share = f"{row['gain'] / perfect:.2f}" if perfect > 0 else "-"
        lines.append(
            f"| {row['case']} | {row['start']:.3f} | {row['halfway']:.3f} | {ends} | {row['gain']:+.3f} | {share} |"
            f" {row['calls_a_step']:.0f} | {row['drift']:+.3f} |"
        )
    return "\n".join([*lines, ""])


def picture(results: list[dict[str, Any]], path: Path) -> None:
    """The mean curve of each case, between the lowest and the highest seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.5, 4.5))
    for number, case in enumerate(dict.fromkeys(one["case"] for one in results)):
        curves = [one["curve"] for one in results if one["case"] == case]
        steps = [step for step, _ in curves[0]]
        values = [[value for _, value in points] for points in zip(*curves)]
        axis.plot(steps, [statistics.fmean(one) for one in values], color=f"C{number}", label=case)
        axis.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=f"C{number}", alpha=0.12)
    axis.set(xlabel="optimizer steps", ylabel="held-out accuracy")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of every run")
    parser.add_argument("--warm_steps", type=int, default=500, help="supervised steps of the warm start")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "learning_noisy_judge", help="where the runs write"
    )
    parser.add_argument("--deadline_s", type=float, default=1800.0, help="seconds one run may take")
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    args = parser.parse_args(argv)
    command = f"python -m benchmarks.learning.noisy_judge --steps {args.steps} --warm_steps {args.warm_steps}"
    results = finished(args.out / "noisy_judge.json", command)
    args.out.mkdir(parents=True, exist_ok=True)
    warm = args.runs / f"warm_{args.warm_steps}"
    if not (warm / "summary.json").exists():  # written last
        run(warm_config("sums", args.warm_steps), warm, args.deadline_s)
    about = {"command": command, "hardware": args.hardware, "steps": args.steps, "warm_steps": args.warm_steps}
    report: dict[str, Any] = about | {"summary": summary(results), "results": results}
    runs = args.runs / time.strftime("%Y-%m-%d_%H-%M-%S")
    for seed in range(args.seeds):
        for case in CASES:
            if any((one["case"], one["seed"]) == (case, seed) for one in results):
                continue
            run_dir, began = runs / f"{case.replace(', ', '_').rstrip('%')}_{seed}", time.monotonic()
            run(rl_config(case, seed, warm / "model", args.steps), run_dir, args.deadline_s)
            results.append(result(case, seed, run_dir, time.monotonic() - began))
            print(f"{case}, seed {seed}: {results[-1]['seconds']:.0f} s", flush=True)
            results.sort(key=lambda one: (list(CASES).index(one["case"]), one["seed"]))
            report["summary"] = summary(results)
            write_json(args.out / "noisy_judge.json", report)
            (args.out / "noisy_judge.md").write_text(markdown(report))
            picture(results, args.out / "noisy_judge.png")
    return report


if __name__ == "__main__":
    main()
