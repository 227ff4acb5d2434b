"""Peak memory of the tree engine: against the tokens that run twice, and against the size of the batch.

    python -m benchmarks.tree.memory --out benchmarks/results/tree      # a small Qwen3 in float32; needs ARBORIST_DATA
    python -m benchmarks.tree.memory --toy --out DIR               # seconds, synthetic

Writes tree_memory.json, .md and .png. *Curve*: one batch at falling `live_tokens`, beside dense with and without
checkpointing (on the batch's longest sequence, which is what its peak comes from), path-at-a-time and sparse.
*Working set*: batches of growing size at the same budgets, two pairs of them; also without the path cache, which
follows the longest path and not the batch. *Windows*: the curve's batch, all layers but one with windows of several
sizes, beside what is estimated. Bytes are of tensors above model and gradients, counted in the allocator
(benchmarks.common.memory): exact, so one run each.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from app.tree import TreeEngine
from app.tree.memory import pass_memory
from app.tree.planning.cost import ModelShape
from app.tree.planning.plan import path_rows
from benchmarks.common.measure import environment
from benchmarks.common.memory import peak_bytes
from benchmarks.common.models import build_model, describe
from benchmarks.common.records import write_json
from benchmarks.common.systems import (
    PathEngine,
    Settings,
    SparseEngine,
    attach_gradients,
    make_systems,
    weighted_loss,
    zero_gradients,
)
from benchmarks.common.workloads import WORKLOADS, Case, add_run, conversations, make_case, parse_size, parser_of

FRACTIONS = (1.0, 0.75, 0.5, 0.3, 0.15)
"""`live_tokens` of the curve, as parts of the longest path; full retention comes first."""

WINDOWS = (1024, 512, 128)
"""Of Gemma 3 and others, and of GPT-OSS."""

TARGET_FRACTION, TARGET = 0.3, 0.4
"""At this part of the longest path, at most this part of dense's peak."""


def measure_engine(engine: TreeEngine, case: Case) -> dict[str, Any]:
    """Counts of the plan and peak bytes of one backward pass."""
    model = engine.model
    device = next(model.parameters()).device
    tree = case.tree()
    execution, loss_fn = engine.plan(tree), weighted_loss(case, device)
    zero_gradients(model)
    peak = peak_bytes(lambda: engine.backward(tree, loss_fn, batched=True), device)
    return {
        "chunk_tokens": execution.chunk_tokens,
        "live_tokens": execution.live_tokens,
        "peak_live_tokens": execution.peak_live_tokens,
        "chunks": len(execution.chunks),
        "tree_tokens": tree.num_tokens,
        "longest_path": execution.longest_path,
        "extra_forward_tokens": execution.extra_forward_tokens,
        "anchor_tokens_again": sum(0 if chunk.keep else chunk.anchor_tokens for chunk in execution.chunks),
        "checkpointed_tokens": sum(chunk.tokens for chunk in execution.chunks if chunk.checkpoint),
        "peak_bytes": peak,
    }


def curve(
    model: PreTrainedModel, case: Case, chunk_tokens: int, head_tokens: int, fractions: Sequence[float] = FRACTIONS
) -> dict[str, Any]:
    """Peak memory and tokens that run twice at each budget, and of the other systems. `head_tokens`: rows of logits
    at a time; how many does not matter to the curve's shape, so few of them leave the rest to be seen."""
    device = next(model.parameters()).device
    longest = int(case.lengths.argmax())
    alone = case.pick([longest])
    others: dict[str, dict[str, Any]] = {}
    for name, checkpoint in (("dense", False), ("dense, checkpointing", True)):
        dense = make_systems(model, alone, Settings(chunk_tokens, chunk_tokens, 0, checkpoint))[0]
        zero_gradients(model)
        others[name] = {"peak_bytes": peak_bytes(dense.run, device), "extra_forward_tokens": 0}
        _progress(name, others[name])
    total = case.tree().num_tokens
    common: dict[str, Any] = {"head_tokens": head_tokens, "self_check": False}
    budgets = {"chunk_tokens": chunk_tokens, "live_tokens": chunk_tokens, **common}
    others["path-at-a-time"] = measure_engine(PathEngine(model, **budgets), case)
    _progress("path-at-a-time", others["path-at-a-time"])
    whole = {"chunk_tokens": total, "live_tokens": total, **common}
    others["sparse"] = measure_engine(SparseEngine(model, **whole), case)
    _progress("sparse", others["sparse"])
    points = []
    path = int(case.lengths[longest])
    for fraction in (None, *fractions):
        live = total if fraction is None else max(1, int(fraction * path))
        engine = TreeEngine(model, chunk_tokens=min(chunk_tokens, live), live_tokens=live, **common)
        points.append({"fraction": fraction, **measure_engine(engine, case)})
        points[-1]["of_dense"] = points[-1]["peak_bytes"] / others["dense"]["peak_bytes"]
        _progress("all" if fraction is None else f"{fraction:g} of the longest path", points[-1])
    return {
        "case": case.name,
        "source": case.source,
        "longest": path,
        "chunk_tokens": chunk_tokens,
        "head_tokens": head_tokens,
        "others": others,
        "points": points,
    }


def working_set(model: PreTrainedModel, cases: Sequence[Case], chunk_tokens: int, live_tokens: int) -> dict[str, Any]:
    """Peak memory of batches of growing size at the same budgets, without what grows with tokens by design: the
    batch's ids and the outputs and their gradients of every token."""
    shape, parameter = ModelShape.of(model.config), next(model.parameters())
    accumulated = max(4, parameter.element_size())
    rows = []
    for case in cases:
        engine = TreeEngine(model, chunk_tokens=chunk_tokens, live_tokens=live_tokens, self_check=False)
        row = measure_engine(engine, case)
        held = row["tree_tokens"] * (8 + 2 * accumulated)
        key_values = 2 * shape.key_values()
        row |= {
            "case": case.name,
            "working_set_bytes": row["peak_bytes"] - held,
            "path_cache_bytes": row["longest_path"] * key_values * (parameter.element_size() + accumulated),
        }
        rows.append(row)
        _progress(case.name, row)
    return {"chunk_tokens": chunk_tokens, "live_tokens": live_tokens, "rows": rows}


def windowed(
    model: PreTrainedModel, case: Case, live_tokens: int, head_tokens: int, windows: Sequence[int]
) -> dict[str, Any]:
    """Peak memory of one batch where all layers of such a model but the last have a window, and what is estimated;
    chunks are as large as the live tokens."""
    rows = []
    for window in (None, *windows):
        config = copy.deepcopy(model.config)
        kind = "full_attention" if window is None else "sliding_attention"
        config.layer_types = [kind] * (config.num_hidden_layers - 1) + ["full_attention"]
        config.sliding_window = window
        one = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
        attach_gradients(one)
        tree = case.tree()
        engine = TreeEngine(one, live_tokens, live_tokens, head_tokens=head_tokens, self_check=False)
        execution = engine.plan(tree)
        row = measure_engine(engine, case)
        estimate = pass_memory(one, live_tokens, row["peak_live_tokens"], tree, head_tokens, execution.chunks)
        kept = path_rows(execution.chunks, row["longest_path"] if window is None else window - 1)
        rows.append({**row, "window": window, "rows": kept, "estimate": estimate.total, "path": estimate.path_cache})
        _progress("no window" if window is None else f"windows of {window}", row)
    return {"live_tokens": live_tokens, "head_tokens": head_tokens, "rows": rows}


def markdown(report: dict[str, Any]) -> str:
    env, found = report["environment"], report["curve"]
    model = ", ".join(f"{key} {value}" for key, value in report["model"].items())
    others = {name: row["peak_bytes"] for name, row in found["others"].items()}
    lines = [
        "# Peak memory of the tree engine",
        "",
        f"`{report['command']}`; torch {env['torch']}, {env['device']}. Model: {model}, random weights. Bytes of "
        "tensors above model and gradients, counted in the allocator.",
        "",
        "![peak memory against tokens that run twice](tree_memory.png)",
        "",
        f"## {found['case']} at falling `live_tokens` (longest path {found['longest']:,} tokens, chunk_tokens "
        f"{found['chunk_tokens']:,}, head_tokens {found['head_tokens']:,})",
        "",
        "; ".join(f"{name}: {size / 2**20:,.0f} MiB" for name, size in others.items()) + ".",
        "",
        "| live_tokens | of the longest path | peak (MiB) | of dense | extra forward tokens | of the tree "
        "| anchors again | checkpointed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in found["points"]:
        share = "all" if point["fraction"] is None else f"{point['fraction']:g}"
        again = point["extra_forward_tokens"]
        lines.append(
            f"| {point['live_tokens']:,} | {share} | {point['peak_bytes'] / 2**20:,.0f} | {point['of_dense']:.2f} "
            f"| {again:,} | {again / point['tree_tokens']:.2f} | {point['anchor_tokens_again']:,} "
            f"| {point['checkpointed_tokens']:,} |"
        )
    for sizes in report["working_sets"]:
        lines += [
            "",
            f"## Batches of growing size (chunk_tokens {sizes['chunk_tokens']:,}, live_tokens "
            f"{sizes['live_tokens']:,})",
            "",
            "What stays follows the tokens live at once and, in the path cache, the longest path; not the batch.",
            "",
            "| batch | tree tokens | longest path | live at once | peak (MiB) | working set: without ids and outputs "
            "of tokens | of the first | and without the path cache | of the first |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        first = sizes["rows"][0]
        for row in sizes["rows"]:
            net, bare = (
                [one["working_set_bytes"] - cache * one["path_cache_bytes"] for one in (row, first)] for cache in (0, 1)
            )
            lines.append(
                f"| {row['case']} | {row['tree_tokens']:,} | {row['longest_path']:,} | {row['peak_live_tokens']:,} "
                f"| {row['peak_bytes'] / 2**20:,.1f} | {net[0] / 2**20:,.1f} | {net[0] / net[1]:.3f} "
                f"| {bare[0] / 2**20:,.1f} | {bare[0] / bare[1]:.3f} |"
            )
    found = report["windows"]
    lines += [
        "",
        f"## Windows in all layers but one ({report['curve']['case']}, chunk_tokens and live_tokens "
        f"{found['live_tokens']:,}, head_tokens {found['head_tokens']:,})",
        "",
        "A layer with a window keeps of each piece of the path what a token behind it can see.",
        "",
        "| window | rows of the path there | of the longest path | path cache, estimated (MiB) | peak (MiB) "
        "| estimated |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        lines.append(
            f"| {row['window'] or 'none'} | {row['rows']:,} | {row['longest_path']:,} | {row['path'] / 2**20:,.1f} "
            f"| {row['peak_bytes'] / 2**20:,.1f} | {row['estimate'] / 2**20:,.1f} |"
        )
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """Peak memory over the part of the tree that runs twice, one point a budget; the others as marks and lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = report["curve"]
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    points = sorted(found["points"], key=lambda point: (point["extra_forward_tokens"], -point["peak_bytes"]))
    x = [100 * point["extra_forward_tokens"] / point["tree_tokens"] for point in points]
    y = [point["peak_bytes"] / 2**20 for point in points]
    axes.plot(x, y, "o-", color="#3b7a57", label="ours, by live_tokens")
    for at, height, point in zip(x, y, points, strict=True):
        axes.annotate(f"{point['live_tokens']:,}", (at, height), (4, 4), textcoords="offset points", fontsize="x-small")
    for name, style in (("dense", "-"), ("dense, checkpointing", "--")):
        height = found["others"][name]["peak_bytes"] / 2**20
        axes.axhline(height, color="#4c6a92", linestyle=style, linewidth=1, label=name)
    for name, mark, colour in (("path-at-a-time", "s", "#c98a4b"), ("sparse", "^", "#8c8c8c")):
        row = found["others"][name]
        at = 100 * row["extra_forward_tokens"] / row["tree_tokens"]
        axes.plot([at], [row["peak_bytes"] / 2**20], mark, color=colour, label=name)
    axes.set_xlabel("tokens that go forward twice, % of the tree")
    axes.set_ylabel("peak memory above model and gradients, MiB")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{found['case']} ({found['source']})", fontsize="medium")
    axes.legend(frameon=False, fontsize="small")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _progress(name: str, row: dict[str, Any]) -> None:
    print(f"{name}: {row['peak_bytes'] / 2**20:,.0f} MiB, {row['extra_forward_tokens']:,} again", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.tree.memory", __doc__, "of the curve: ")
    parser.add_argument("--workload", choices=WORKLOADS, default="turns")
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=[(1, 4), (2, 4), (8, 4)], help="working sets")
    parser.add_argument("--chunk", type=int, default=256, help="chunk_tokens of the curve")
    parser.add_argument("--head", type=int, default=64, help="head_tokens of the curve")
    parser.add_argument(
        "--budgets",
        type=parse_size,
        nargs="+",
        default=[(1024, 2048), (2048, 8192)],
        help="of the working sets: chunk_tokens x live_tokens",
    )
    add_run(parser, threads=1)
    return parser


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = _parser()
    args = parser.parse_args(argv)
    for name in ("chunk", "head", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    torch.set_num_threads(args.threads)
    fractions, chunk, budgets, windows = FRACTIONS, args.chunk, args.budgets, WINDOWS
    if args.toy:
        fractions, chunk, budgets, windows = FRACTIONS[-2:], 32, [(32, 64)], (8,)
    source, recorded = conversations(args.data, args.toy)
    model = build_model(toy=args.toy)
    vocabulary = model.config.vocab_size
    cases = [make_case(source, recorded, args.workload, *size, vocabulary) for size in (args.size, *args.sizes)]
    report = {
        "command": "python -m benchmarks.tree.memory" + " --toy" * args.toy,
        "environment": environment(torch.device("cpu")),
        "model": describe(model, "float32"),
        "target": {"fraction": TARGET_FRACTION, "of_dense": TARGET},
        "curve": curve(model, cases[0], chunk, args.head, fractions),
        "working_sets": [working_set(model, cases[1:], *pair) for pair in budgets],
        "windows": windowed(model, cases[0], 4 * chunk, args.head, windows),
    }
    if args.out:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "tree_memory.json", report)
        (folder / "tree_memory.md").write_text(markdown(report))
        plot(report, folder / "tree_memory.png")
    print(markdown(report))
    return report


if __name__ == "__main__":
    main()
