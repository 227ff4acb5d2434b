"""A hybrid model over trees: a small Qwen3.5 beside a Llama of the same widths, against the same baselines.

    python -m benchmarks.tree.hybrid --out benchmarks/results/tree                            # a quarter of an hour
    python -m benchmarks.tree.hybrid --workloads think turns --sizes 1x4 --sample 2 --repeats 1 \\
        --name hybrid_recorded --out benchmarks/results/tree                                  # recorded; as long
    python -m benchmarks.tree.hybrid --families qwen3_5 --workloads think turns --sizes 8x4 --sample 2 --repeats 1 \\
        --name hybrid_recorded_8x4 --out benchmarks/results/tree                              # a quarter of an hour
    python -m benchmarks.tree.hybrid --toy --out DIR                                          # seconds

Without `--workloads`, cases are drawn from a seed: rollouts that share a system prompt, of turns whose thought the next
turn drops. Forward and backward of one batch, systems interleaved in one process (benchmarks.common.systems says what
they are). "Of tokens": how much of the ratio of tokens the ratio of CPU seconds reaches. Three quarters of the hybrid's
layers scan, so its time follows its tokens, where attention's follows pairs. Writes NAME.json and NAME.md after every
case.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.common.measure import environment, ratio
from benchmarks.common.models import build_model
from benchmarks.common.records import write_json
from benchmarks.common.systems import Settings
from benchmarks.common.workloads import WORKLOADS, Case, conversations, make_case, parse_size
from benchmarks.tree.__main__ import Budget, run_case

TARGET = 0.85
"""Of the ratio of tokens, what the hybrid's time is to reach against dense."""

_WIDTHS: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 65_536,
}
_TOY: dict[str, Any] = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
_SCANS: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"model_type": "qwen3_5_text", **_SCANS},  # three gated delta rules, then attention
    "llama": {"model_type": "llama"},
}
SYSTEMS = ("dense", "dense-leaf", "path-at-a-time", "ours")
DRAWN = ((4, 4),)
"""Rollouts x turns of the drawn cases."""


def build(family: str, toy: bool, **widths: Any) -> PreTrainedModel:
    """A model with random weights; `widths`: fields of its configuration that are otherwise."""
    fields = _WIDTHS | (_TOY if toy else {}) | FAMILIES[family] | widths
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "config.json"
        config.write_text(json.dumps(fields))
        return build_model(str(config))


def dropped_thoughts(rollouts: int, turns: int, vocabulary: int, shrink: int = 1, seed: int = 0) -> Case:
    """Rollouts of one prompt; each turn sees what was said before it, thinks, and speaks; both are scored."""
    random = np.random.default_rng(seed)

    def draw(least: int, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return random.integers(0, vocabulary, random.integers(least, most + 1) // shrink)

    prompt, sequences, scored = draw(300, 300), [], []
    for _ in range(rollouts):
        said = prompt
        for _ in range(turns):
            thought, reply, observed = draw(60, 180), draw(30, 100), draw(60, 200)
            sequences.append(np.concatenate([said, thought, reply]))
            scored.append(np.arange(len(sequences[-1])) >= len(said))
            said = np.concatenate([said, reply, observed])
    weights = random.normal(size=len(sequences)) / sum(int(mask.sum()) for mask in scored)
    return Case("thoughts", rollouts, turns, "drawn", tuple(sequences), tuple(scored), weights)


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Ratios of tokens and of CPU seconds to ours, by system."""
    ours = result["systems"]["ours"]
    rows = {}
    for name, found in result["against_ours"]["cpu_seconds"].items():
        tokens = result["systems"][name]["tokens"] / ours["tokens"]
        rows[name] = {"tokens": tokens, "of_tokens": found["ratio"] / tokens, **found}
    return rows


def markdown(report: dict[str, Any]) -> str:
    env = report["environment"]
    lines = [
        "# A hybrid model over trees",
        "",
        f"Made by `{report['command']}` on {report['hardware']}; torch {env['torch']}, threads: {env['torch_threads']},"
        f" transformers {env['transformers']}. float32, random weights; 4 layers of hidden size"
        f" {report['widths']['hidden_size']}: `qwen3_5` has three gated delta rules"
        f" ({report['scans']['linear_num_value_heads']} heads of"
        f" {report['scans']['linear_key_head_dim']} x {report['scans']['linear_value_head_dim']}) and one attention,"
        " `llama` attends in all.",
        "",
        'Ratios are of CPU seconds, formed within a repeat: median (least to most). "Of tokens": how much of the'
        f" ratio of tokens it reaches; the aim against dense is {TARGET}. Path-at-a-time runs every inner piece twice.",
        "",
        "| model | case | tree tokens | dense tokens / tree | ours, CPU s | dense / ours | of tokens |"
        " dense-leaf / ours | of tokens | path-at-a-time / ours | gradient error | repeats |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in report["results"]:
        ours, ratios = result["systems"]["ours"], summary(result)
        dense, leaf, path = (ratios[name] for name in ("dense", "dense-leaf", "path-at-a-time"))
        error = ours["gradient_error"]
        cells = [
            result["family"],
            result["case"],
            f"{ours['tokens']:,}",
            f"{dense['tokens']:.2f}",
            f"{ours['cpu_seconds']['median']:.2f}",
            ratio(dense),
            f"{dense['of_tokens']:.2f}",
            ratio(leaf),
            f"{leaf['of_tokens']:.2f}",
            ratio(path),
            "-" if error is None else f"{error['largest']:.1e}",
            str(result["repeats"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    add("--workloads", nargs="+", choices=WORKLOADS, help="of recorded conversations, instead of drawn cases")
    add("--sizes", type=parse_size, nargs="+", default=[(1, 4)], help="of recorded conversations: tasks x trials")
    add("--data", metavar="FILE", help="recorded conversations (npz)")
    add("--repeats", type=int, default=5)
    add("--sample", type=int, default=0, help="sequences that stand for all in dense and dense-leaf (0: run all)")
    add("--check", type=int, default=3, help="sequences on which gradients are compared with dense (0: not)")
    add("--minutes", type=float, default=60.0, help="a case that would not end in this time is refused")
    add("--hardware", default="a CPU", help="what the report says the machine is")
    add("--toy", action="store_true")
    add("--out", type=Path, required=True)
    add("--name", default="hybrid")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    deadline = time.perf_counter() + 60 * args.minutes
    makers: list[Callable[[int], Case]] = []
    if args.workloads:
        source, recorded = conversations(args.data, args.toy)
        for size in args.sizes:
            makers += [lambda v, w=w, s=size: make_case(source, recorded, w, *s, v) for w in args.workloads]
    else:
        shrink = 10 if args.toy else 1
        makers = [lambda v, s=size: dropped_thoughts(*s, v, shrink) for size in DRAWN]
    given = [f"--families {' '.join(args.families)}"] * (args.families != list(FAMILIES))
    given += [f"--workloads {' '.join(args.workloads or ())}"] * bool(args.workloads)
    given += ["--sizes " + " ".join(f"{a}x{b}" for a, b in args.sizes)] * bool(args.workloads)
    given += [f"--sample {args.sample}"] * bool(args.sample)
    given += [f"--repeats {args.repeats}"] * (args.repeats != parser.get_default("repeats"))
    given += [f"--name {args.name}"] * (args.name != parser.get_default("name"))
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.tree.hybrid", *given, *["--toy"] * args.toy]),
        "hardware": args.hardware,
        "environment": environment(torch.device("cpu")),
        "widths": _WIDTHS | (_TOY if args.toy else {}),
        "scans": _SCANS,
        "results": [],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    budgets: dict[str, Any] = {"chunk_tokens": 64, "live_tokens": 96} if args.toy else {}
    settings = Settings(**budgets, sample=args.sample, systems=SYSTEMS)
    for make in makers:
        for family in args.families:
            model = build(family, args.toy)
            case = make(model.config.vocab_size)

            def progress(line: str, name: str = f"{family} {case.name}") -> None:
                print(f"{name}: {line}", file=sys.stderr, flush=True)

            result = run_case(model, case, settings, Budget(args.repeats, args.check, deadline), progress)
            report["results"].append({"family": family, **result})
            write_json(args.out / f"{args.name}.json", report)
            (args.out / f"{args.name}.md").write_text(markdown(report))
    print(markdown(report))
    return report


if __name__ == "__main__":
    main()
