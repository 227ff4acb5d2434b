"""Gradient errors of the tree engine, beside those that dense execution has of itself.

    python -m benchmarks.tree.error --out benchmarks/results/tree     # a small Qwen3; needs ARBORIST_DATA
    python -m benchmarks.tree.error --toy --out DIR              # seconds, synthetic

Writes tree_error.json and .md. The shortest sequences of a batch, in chunks small enough that paths, siblings, kept and
repeated chunks all occur; weights that bf16 represents exactly. float32: tree against dense in float32. bf16 (weights
and activations; gradients accumulate in float32 in both): tree and dense against dense in float64, over all parameters
and parameter by parameter, and against each other.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.measure import environment
from benchmarks.common.models import build_model, describe
from benchmarks.common.records import write_json
from benchmarks.common.systems import Settings, gradient_error, gradients, make_systems
from benchmarks.common.workloads import WORKLOADS, Case, add_run, conversations, make_case, parser_of

LIMIT, RATIO = 2e-6, 1.1
"""float32: largest difference over the largest gradient; bf16: error over dense's own, over all parameters."""


def measure_errors(case: Case, settings: Settings, toy: bool) -> dict[str, Any]:
    """Errors of dense and of the tree by dtype."""
    found: dict[tuple[str, torch.dtype], dict[str, Tensor]] = {}
    truth = build_model(toy=toy, dtype=torch.float64)
    with torch.no_grad():
        for parameter in truth.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = build_model(toy=toy, dtype=dtype)
        with torch.no_grad():
            for mine, drawn in zip(model.parameters(), truth.parameters(), strict=True):
                mine.copy_(drawn)
        for system in make_systems(model, case, settings):
            if system.name == "dense" or (system.name == "ours" and dtype != torch.float64):
                found[system.name, dtype] = gradients(model, system)
    exact = found["dense", torch.float64]
    single = gradient_error(found["ours", torch.float32], found["dense", torch.float32])
    half = {name: _low(found[name, torch.bfloat16], exact) for name in ("dense", "ours")}
    half["ours against dense"] = _low(found["ours", torch.bfloat16], found["dense", torch.bfloat16])
    return {
        "float32": single,
        "bfloat16": half,
        "over_dense": half["ours"]["norm"] / half["dense"]["norm"],
        "limits": {"float32_largest": LIMIT, "bfloat16_over_dense": RATIO},
        "ok": single["largest"] <= LIMIT and half["ours"]["norm"] <= RATIO * half["dense"]["norm"],
    }


def _low(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    each = [gradient_error({name: got[name]}, {name: want})["norm"] for name, want in expected.items()]
    return {
        **gradient_error(got, expected),
        "median_of_parameters": statistics.median(each),
        "worst_of_parameters": float(np.max(each)),
    }


def markdown(report: dict[str, Any]) -> str:
    env, found = report["environment"], report["errors"]
    model = ", ".join(f"{key} {value}" for key, value in report["model"].items() if key != "dtype")
    lines = [
        "# Gradient errors of the tree engine",
        "",
        f"`{report['command']}`; torch {env['torch']}, {env['device']}. Model: {model}, random weights. "
        f"{report['sequences']} sequences of {report['case']} ({report['source']}), {report['dense_tokens']:,} tokens, "
        f"{report['tree_tokens']:,} in the tree; chunk_tokens {report['chunk_tokens']:,}, live_tokens "
        f"{report['live_tokens']:,}.",
        "",
        f"float32, tree against dense: largest difference {found['float32']['largest']:.1e} of the largest gradient "
        f"(limit {LIMIT:.0e}), {found['float32']['norm']:.1e} in norm.",
        "",
        "| bf16 | error in norm | median of parameters | worst parameter |",
        "|---|---|---|---|",
    ]
    labels = {"dense": "dense, against float64", "ours": "tree, against float64"}
    for name, row in found["bfloat16"].items():
        lines.append(
            f"| {labels.get(name, 'tree against dense')} | {row['norm']:.2%} | {row['median_of_parameters']:.2%} "
            f"| {row['worst_of_parameters']:.2%} |"
        )
    lines += ["", f"The tree's error is {found['over_dense']:.3f} times dense's (limit {RATIO:g})."]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.tree.error", __doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default="think")
    parser.add_argument("--sequences", type=int, default=4, help="the shortest of these are compared")
    parser.add_argument("--chunk", type=int, default=256, help="chunk_tokens")
    parser.add_argument("--live", type=int, default=1024, help="live_tokens")
    add_run(parser, threads=1)
    return parser


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = _parser()
    args = parser.parse_args(argv)
    for name in ("sequences", "chunk", "live", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    torch.set_num_threads(args.threads)
    settings = Settings(32, 64) if args.toy else Settings(args.chunk, args.live)
    source, recorded = conversations(args.data, args.toy)
    model = build_model(toy=args.toy)
    case = make_case(source, recorded, args.workload, *args.size, model.config.vocab_size)
    case = case.pick(np.argsort(case.lengths, kind="stable")[: args.sequences].tolist())
    report = {
        "command": "python -m benchmarks.tree.error" + " --toy" * args.toy,
        "environment": environment(torch.device("cpu")),
        "model": describe(model, "float32"),
        "case": case.name,
        "source": source,
        "sequences": len(case.sequences),
        "dense_tokens": int(case.lengths.sum()),
        "tree_tokens": case.tree().num_tokens,
        "chunk_tokens": settings.chunk_tokens,
        "live_tokens": settings.live_tokens,
        "errors": measure_errors(case, settings, args.toy),
    }
    if args.out:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "tree_error.json", report)
        (folder / "tree_error.md").write_text(markdown(report))
    print(markdown(report))
    return report


if __name__ == "__main__":
    main()
