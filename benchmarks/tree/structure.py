"""What happens before a model runs: building a tree, planning it, cutting it for ranks. Seconds, bytes and balance.

    python -m benchmarks.tree.structure --out benchmarks/results/tree    # needs ARBORIST_DATA; a minute on one core
    python -m benchmarks.tree.structure --toy --out DIR             # seconds, synthetic

*Build*: tokens a second and most memory held at once (of Python and NumPy) over the bytes of the token array, int64.
*Plan*, *partition*: recorded batches and 20,000 sequences made of them (other tasks: ids are moved apart). Balance is
(cost of the slowest part) x (parts) / (cost of the whole tree), cost being tokens + attention pairs / 8192: what ranks
lose to prefixes that each of them computes. Every figure is the median of `--repeats`, in CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.tree import PrefixTree, partition
from app.tree.attention import BACKENDS
from app.tree.planning.cost import ModelShape
from app.tree.planning.planner import plan
from app.tree.planning.timing import CPU_RATES, TimeModel
from benchmarks.common.measure import environment, spread
from benchmarks.common.models import build_model
from benchmarks.common.records import write_json
from benchmarks.common.workloads import DEFAULT_DATA, WORKLOADS, Case, conversations, make_case

MANY = 20_000
CHUNK, LIVE = 2048, 16_384
PARTS = {"8x4": (2, 4, 8), "50x4": (2, 4, 8, 16, 32, 64)}


def timed(run: Callable[[], Any], repeats: int) -> dict[str, Any]:
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return spread(taken)


def build(case: Case, repeats: int) -> dict[str, Any]:
    """Speed and memory of `PrefixTree.build`."""
    tokens = int(case.lengths.sum())
    taken = timed(case.tree, repeats)
    tracemalloc.start()
    tree = case.tree()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "case": case.name,
        "sequences": len(case.sequences),
        "tokens": tokens,
        "tree_tokens": tree.num_tokens,
        "cpu_seconds": taken,
        "tokens_per_second": tokens / taken["median"],
        "peak_over_tokens": peak / (8 * tokens),
    }


def many(case: Case, count: int) -> Case:
    """`count` sequences: the case again and again, each copy with ids of its own, so that copies share nothing."""
    span = max(int(s.max()) for s in case.sequences) + 1
    sequences = [case.sequences[i % len(case.sequences)] + span * (i // len(case.sequences)) for i in range(count)]
    scored = [case.scored[i % len(case.sequences)] for i in range(count)]
    weights = np.resize(case.weights, count)
    return Case(f"{case.workload}, {count:,} sequences", 0, 0, case.source, tuple(sequences), tuple(scored), weights)


def cost(tree: PrefixTree) -> float:
    return tree.num_tokens + tree.num_attention_pairs / 8192


def planned(case: Case, times: TimeModel, repeats: int) -> dict[str, Any]:
    tree = case.tree()
    taken = timed(lambda: plan(tree, CHUNK, LIVE, times, times.shape.checkpoint_share()), repeats)
    return {"case": case.name, "sequences": tree.num_sequences, "tree_tokens": tree.num_tokens, "cpu_seconds": taken}


def cut(case: Case, parts: int, repeats: int) -> dict[str, Any]:
    tree = case.tree()
    found = partition(tree, num_parts=parts)
    slowest = max(cost(case.pick(part).tree()) for part in found if part)
    return {
        "case": case.name,
        "sequences": tree.num_sequences,
        "parts": parts,
        "balance": slowest * parts / cost(tree),
        "cpu_seconds": timed(lambda: partition(tree, num_parts=parts), repeats),
    }


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Building, planning and cutting trees",
        "",
        f"Made by `{report['command']}` on {report['hardware']}, one thread; medians (least-most) of CPU seconds.",
        "",
        "## Build",
        "",
        "| batch | sequences | tokens | tree tokens | CPU s | million tokens/s | memory / token array |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['case']} | {row['sequences']:,} | {row['tokens']:,} | {row['tree_tokens']:,} |"
        f" {_seconds(row)} | {row['tokens_per_second'] / 1e6:.0f} | {row['peak_over_tokens']:.2f} |"
        for row in report["build"]
    ]
    lines += ["", f"## Plan (chunk_tokens {CHUNK:,}, live_tokens {LIVE:,})", ""]
    lines += ["| batch | sequences | tree tokens | CPU s |", "|---|---|---|---|"]
    lines += [
        f"| {row['case']} | {row['sequences']:,} | {row['tree_tokens']:,} | {_seconds(row)} |" for row in report["plan"]
    ]
    lines += ["", "## Partition", "", "| batch | sequences | parts | balance | CPU s |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['case']} | {row['sequences']:,} | {row['parts']} | {row['balance']:.3f} | {_seconds(row)} |"
        for row in report["partition"]
    ]
    return "\n".join(lines) + "\n"


def _seconds(row: dict[str, Any]) -> str:
    return "{median:.3f} ({min:.3f}-{max:.3f})".format(**row["cpu_seconds"])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tree.structure", description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", help=f"token arrays (default {DEFAULT_DATA}, else synthetic conversations)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    parser.add_argument("--toy", action="store_true", help="few synthetic conversations, in seconds")
    parser.add_argument("--out", type=Path, help="folder for structure.json and structure.md")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    source, recorded = conversations(args.data, args.toy)
    tasks, trials = len({c.task for c in recorded}), min(4, len({c.trial for c in recorded}))
    count, sizes = (200, (2, tasks)) if args.toy else (MANY, (8, tasks))
    cases = {f"{n}x{trials}": make_case(source, recorded, "turns", n, trials, 2**40) for n in sizes}
    model = build_model()
    times = TimeModel(ModelShape.of(model.config), CPU_RATES, BACKENDS["sdpa"])
    largest = make_case(source, recorded, "think", sizes[-1], trials, 2**40)
    short = Case("10-token answers", 0, 0, "synthetic", *_answers(count))
    crowd = many(cases[f"{sizes[0]}x{trials}"], count)
    report: dict[str, Any] = {
        "command": "python -m benchmarks.tree.structure" + " --toy" * args.toy,
        "hardware": args.hardware,
        "environment": environment(torch.device("cpu")),
        "build": [
            build(make_case(source, recorded, workload, sizes[-1], trials, 2**40), args.repeats)
            for workload in WORKLOADS
        ],
        "plan": [planned(case, times, args.repeats) for case in (*cases.values(), largest, short, crowd)],
        "partition": [
            cut(case, parts, args.repeats) for name, case in cases.items() for parts in PARTS.get(name, (2, 4))
        ]
        + [cut(largest, parts, args.repeats) for parts in PARTS.get(f"{sizes[-1]}x{trials}", (2, 4))]
        + [cut(crowd, 8, args.repeats)],
    }
    text = markdown(report)
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / "structure.json", report)
        (args.out / "structure.md").write_text(text)
    return report


def _answers(count: int) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """Prompts of 5 tokens with 8 answers of 5 each, as in the quickstart."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 15, (count // 8 + 1, 5)).repeat(8, 0)[:count]
    sequences = np.concatenate([prompts, rng.integers(0, 15, (count, 5))], 1)
    scored = np.arange(10) >= 5
    return tuple(sequences), (scored,) * count, np.ones(count)


if __name__ == "__main__":
    main()
