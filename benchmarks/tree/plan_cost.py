"""Does the planner's predicted time rank plans as measured time does?

    python -m benchmarks.tree.plan_cost --threads 1 --out benchmarks/results/tree  # needs ARBORIST_DATA; about a minute
    python -m benchmarks.tree.plan_cost --threads 1 --hybrid --out benchmarks/results/tree --name plan_cost_hybrid
    python -m benchmarks.tree.plan_cost --toy --out DIR                            # seconds, synthetic

Plans of several workloads under a spread of budgets, packings and checkpointing, the path-at-a-time plan among them,
each executed forward and backward in interleaved rounds; the median CPU seconds (or, on a GPU, wall seconds) against
the prediction. Spearman's rank correlation within each workload and over all plans; writes NAME.json and NAME.md.
`--calibrate` predicts with rates measured on this machine instead of the defaults; `--hybrid` takes a Qwen3.5 of three
gated delta rules and one attention (as `benchmarks.tree.hybrid`), whose scans the prediction counts as well.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from app.tree import PrefixTree, TreeEngine
from app.tree.attention import choose_backend
from app.tree.calibrate import measure_rates
from app.tree.planning.cost import ModelShape
from app.tree.planning.packing import Packing
from app.tree.planning.plan import ExecutionPlan
from app.tree.planning.planner import plan
from app.tree.planning.timing import CPU_RATES, GPU_RATES, TimeModel
from benchmarks.common.measure import environment, seconds
from benchmarks.common.records import write_json
from benchmarks.common.systems import path_plan, qwen3, weighted_loss, zero_gradients
from benchmarks.common.workloads import WORKLOADS, Case, add_run, conversations, make_case, parser_of
from benchmarks.tree import hybrid

TOY_SHAPE = {"hidden": 32, "layers": 2, "heads": 4, "key_value_heads": 2, "head_dim": 8}


class FixedPlan(TreeEngine):
    """The tree engine with a plan made elsewhere."""

    execution: ExecutionPlan

    def plan(self, tree: PrefixTree) -> ExecutionPlan:
        return self.execution


def spread_of_plans(tree: PrefixTree, longest: int, share: float) -> dict[str, ExecutionPlan]:
    """Plans by name: chunk sizes from a thirty-second of the longest path to everything, live budgets from a chunk to
    everything, joined or not, checkpointed or not, and one piece of a path at a time."""
    everything = tree.num_tokens
    plans: dict[str, ExecutionPlan] = {}
    for part in (32, 8, 3):
        chunk = max(1, longest // part)
        plans[f"path at a time, {chunk:,}"] = path_plan(tree, chunk)
        for live in (chunk, longest // 2, everything):
            live = max(chunk, live)
            plans[f"chunk {chunk:,}, live {live:,}"] = plan(tree, chunk, live, packing=Packing(chunk))
        plans[f"chunk {chunk:,}, live {chunk:,}, apart"] = plan(tree, chunk, chunk, packing=Packing(chunk, join=False))
    plans[f"chunk {everything:,}"] = plan(tree, everything, everything, packing=Packing(everything))
    live = int(everything * share) + 1
    plans[f"chunk {everything:,}, live {live:,}, checkpointed"] = plan(
        tree, everything, live, share=share, packing=Packing(everything)
    )
    return plans


def run_case(model: PreTrainedModel, case: Case, time_model: TimeModel, repeats: int) -> dict[str, Any]:
    """Predicted and measured seconds of each plan of one case."""
    device = next(model.parameters()).device
    tree, loss_fn, engine = case.tree(), weighted_loss(case, device), FixedPlan(model, self_check=False)
    plans = spread_of_plans(tree, int(case.lengths.max()), ModelShape.of(model.config).checkpoint_share())
    clock = 0 if device.type == "cuda" else 1
    taken: dict[str, list[float]] = {name: [] for name in plans}
    for repeat in range(repeats + 1):  # the first round warms up
        names = list(plans)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            engine.execution = plans[name]
            zero_gradients(model)
            elapsed = seconds(lambda: engine.backward(tree, loss_fn, batched=True), device)[clock]
            if repeat:
                taken[name].append(elapsed)
    rows = [
        {
            "plan": name,
            "chunks": len(execution.chunks),
            "extra_forward_tokens": execution.extra_forward_tokens,
            "predicted_seconds": time_model.predict(tree, execution.chunks),
            "measured_seconds": statistics.median(taken[name]),
        }
        for name, execution in plans.items()
    ]
    return {
        "case": case.name,
        "source": case.source,
        "tree_tokens": tree.num_tokens,
        "spearman": _of(rows),
        "plans": rows,
    }


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation of two equally long lists, ties sharing their mean rank."""
    ranks = []
    for values in (np.asarray(a), np.asarray(b)):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        upper = np.cumsum(counts)
        ranks.append((upper - (counts - 1) / 2)[inverse])
    return float(np.corrcoef(*ranks)[0, 1])


def _of(rows: list[dict[str, Any]]) -> float:
    return spearman([row["predicted_seconds"] for row in rows], [row["measured_seconds"] for row in rows])


def markdown(report: dict[str, Any]) -> str:
    env = report["environment"]
    lines = [
        "# Predicted against measured time of plans",
        "",
        f"`{report['command']}` on {report['hardware']}; torch {env['torch']}, threads: {env['torch_threads']}. "
        f"Rates: {report['rates_from']}. Spearman's rank correlation over all {report['plans']} plans: "
        f"**{report['spearman']:.3f}**; per workload "
        + ", ".join(f"{case['case']} {case['spearman']:.3f}" for case in report["cases"])
        + ".",
    ]
    for case in report["cases"]:
        lines += ["", f"## {case['case']} ({case['tree_tokens']:,} tree tokens, {case['source']})", ""]
        lines += [
            "| plan | chunks | extra forward tokens | predicted s | measured s | ratio |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['plan']} | {row['chunks']} | {row['extra_forward_tokens']:,} | {row['predicted_seconds']:.3g} | "
            f"{row['measured_seconds']:.3g} | {row['measured_seconds'] / row['predicted_seconds']:.2f} |"
            for row in case["plans"]
        ]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.tree.plan_cost", __doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["turns", "think"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--key-value-heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hybrid", action="store_true", help="a Qwen3.5 of that benchmark's shape, on CPU")
    parser.add_argument("--name", default="plan_cost", help="of the files")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine's rates first")
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    add_run(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.threads or args.toy:
        torch.set_num_threads(args.threads or 1)
    device = torch.device(args.device)
    shape = {name: getattr(args, name) for name in ("hidden", "layers", "heads", "key_value_heads", "head_dim")}
    vocabulary = 512 if args.toy else args.vocabulary
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if args.hybrid:
        if device.type != "cpu":
            parser.error(f"--hybrid runs on the CPU, not on --device {args.device}; leave one of them out")
        widths = {} if args.toy else {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden}
        model = hybrid.build("qwen3_5", args.toy, vocab_size=vocabulary, **widths)
    else:
        model = qwen3(**(TOY_SHAPE if args.toy else shape), vocabulary=vocabulary, dtype=dtype, device=device)
    rates = GPU_RATES if device.type == "cuda" else CPU_RATES
    if args.calibrate:
        rates = measure_rates(model)
    time_model = TimeModel(
        ModelShape.of(model.config), rates, choose_backend("auto", model), next(model.parameters()).element_size()
    )
    source, recorded = conversations(args.data, args.toy)
    cases = [
        run_case(model, make_case(source, recorded, workload, *args.size, vocabulary), time_model, args.repeats)
        for workload in args.workloads
    ]
    rows = [row for case in cases for row in case["plans"]]
    given = [f"--{name.replace('_', '-')}" for name in ("hybrid", "calibrate", "toy") if getattr(args, name)]
    given += [f"--size {args.size[0]}x{args.size[1]}"] * (args.size != (1, 2))
    given += [
        f"--{name.replace('_', '-')} {value}" for name, value in shape.items() if value != parser.get_default(name)
    ]
    report = {
        "command": " ".join(["python -m benchmarks.tree.plan_cost", *given]),
        "hardware": args.hardware,
        "environment": environment(device),
        "rates_from": "measured on this machine" if args.calibrate else "defaults",
        "rates": asdict(rates),
        "plans": len(rows),
        "spearman": _of(rows),
        "cases": cases,
    }
    text = markdown(report)
    print(text)
    if args.out:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{args.name}.json", report)
        (folder / f"{args.name}.md").write_text(text)
    return report


if __name__ == "__main__":
    main()
