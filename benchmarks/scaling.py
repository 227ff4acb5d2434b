"""What several GPUs would make of recorded batches: what a split tree loses, counted; memory and seconds, on paper.

    python -m benchmarks.scaling [--sizes 8x4 50x4] [--gpus 4 8 16 64 256 512] [--data FILE] [--out DIR]

Counted: recorded turns cut by `app.tree.partition` with its default cost, into a part for every rank, or for every
group of ranks that run one plan. Paper (nothing of it was run): bytes and seconds of a step by the formulas below, for
whole parameters with ZeRO-1 over all GPUs, and for parameters in shards over groups of a node's 8. Parameters are
counted in models that transformers builds without storage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from app.tree import PrefixTree, partition
from benchmarks.common.records import write_json
from benchmarks.common.workloads import Case, conversations, make_case, parse_size

FLOPS = 0.4 * 989e12  # a second: bf16 on an H100 or H200, 40% of it
NODE, BETWEEN = 0.8 * 450e9, 0.8 * 50e9  # bytes a second, GPU and direction: inside a node of 8, between nodes
GROUP = 8
CHUNK = 8192  # rows of a chunk that a rank has
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "0.6B": ("qwen3", dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                           num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)),
    "4B": ("qwen3", dict(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
                         num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)),
    "8B": ("qwen3", dict(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                         num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False)),
    "32B": ("qwen3", dict(vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
                          num_attention_heads=64, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False)),
    "70B": ("llama", dict(vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                          num_attention_heads=64, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False)),
}  # fmt: skip
"""Model type and shape, as published (Qwen3, Llama 3)."""


@dataclass(frozen=True)
class Model:
    """`parameters`: all, tied ones once. `layers`: those in layers; `width`: query heads x size, over all layers."""

    name: str
    parameters: int
    layers: int
    width: int

    @classmethod
    def of(cls, name: str) -> Model:
        kind, shape = MODELS[name]
        with torch.device("meta"):
            built: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape))
        layers = sum(p.numel() for layer in built.model.layers for p in layer.parameters())
        width = shape["num_attention_heads"] * shape["head_dim"] * shape["num_hidden_layers"]
        return cls(name, sum(p.numel() for p in built.parameters()), layers, width)

    def flops(self, tree: PrefixTree) -> float:
        """Forward and backward: 6 a parameter and token, 12 a query channel and pair."""
        return 6.0 * self.parameters * tree.num_tokens + 12.0 * self.width * tree.num_attention_pairs


def cost(tree: PrefixTree) -> float:
    return tree.num_tokens + tree.num_attention_pairs / 8192


@cache
def split(case: Case, parts: int) -> tuple[float, float]:
    """Slowest part x parts, and all parts together, over the whole tree."""
    tree = case.tree()
    costs = [cost(tree.select(part)) for part in partition(tree, parts) if part]
    return max(costs) * parts / cost(tree), sum(costs) / cost(tree)


def zero1(model: Model, gpus: int) -> tuple[float, float]:
    """Bytes a GPU before activations, and seconds of a step's exchange, with whole parameters: bf16 weights, float32
    gradients, masters and two moments over all GPUs; gradients travel in float32, weights in bf16."""
    held = (6 + 12 / gpus) * model.parameters
    return held, 6 * model.parameters * (gpus - 1) / gpus / (NODE if gpus <= GROUP else BETWEEN)


def shards(model: Model, gpus: int, chunks: float) -> tuple[float, float, float]:
    """The same with parameters in shards: bytes, seconds of gathers and sums inside a group (a chunk takes two bf16
    gathers of all layers and a float32 sum; may hide behind compute), and of the sum over groups at a step's end."""
    inside = chunks * (2 * 2 + 4) * model.layers * (GROUP - 1) / GROUP / NODE
    groups = gpus // GROUP
    return 16 * model.parameters / GROUP, inside, 2 * 4 * model.parameters / GROUP * (groups - 1) / groups / BETWEEN


def paper(case: Case, gpus: Sequence[int]) -> list[dict[str, Any]]:
    """A step on the case, by model and number of GPUs."""
    tree, rows = case.tree(), []
    for model in map(Model.of, MODELS):
        whole = model.flops(tree) / FLOPS
        for count in (n for n in gpus if n % GROUP == 0):
            held, exchange = zero1(model, count)
            seconds = whole / count * split(case, count)[0] + exchange
            ratio = split(case, count // GROUP)[0]
            chunks = max(1.0, ratio * tree.num_tokens / count / CHUNK)
            held_cut, inside, between = shards(model, count, chunks)
            compute = whole / count * ratio
            rows.append(
                {
                    "model": model.name,
                    "gpus": count,
                    "zero1_gb": held / 1e9,
                    "zero1_seconds": seconds,
                    "zero1_efficiency": whole / count / seconds,
                    "shards_gb": held_cut / 1e9,
                    "shards_compute": compute,
                    "shards_inside": inside,
                    "shards_between": between,
                    "shards_efficiency": whole / count / (max(compute, inside) + between),
                }
            )
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["8x4", "50x4"], metavar="TASKSxTRIALS")
    parser.add_argument("--gpus", nargs="+", type=int, default=[4, 8, 16, 64, 256, 512])
    parser.add_argument("--data", help="recorded conversations (default: airline_tokens.npz of ARBORIST_DATA)")
    parser.add_argument("--toy", action="store_true", help="synthetic conversations, small ones")
    parser.add_argument("--out", type=Path, help="directory for scaling.json and scaling.md")
    arguments = parser.parse_args(argv)
    source, recorded = conversations(arguments.data, arguments.toy)
    cases = [make_case(source, recorded, "turns", *parse_size(size), vocabulary=151936) for size in arguments.sizes]
    splits = []
    for case in cases:
        for count in arguments.gpus:
            for group in (size for size in (1, 4, 8) if count % size == 0):
                slowest, together = split(case, count // group)
                splits.append({"case": case.name, "gpus": count, "group": group, "slowest": slowest, "all": together})
    told = " ".join(f"--{key} {' '.join(map(str, getattr(arguments, key)))}" for key in ("sizes", "gpus"))
    result = {
        "command": f"python -m benchmarks.scaling {told}",
        "source": source,
        "batch": cases[-1].name,
        "tokens": cases[-1].tree().num_tokens,
        "splits": splits,
        "paper": paper(cases[-1], arguments.gpus),
    }
    text = markdown(result)
    print(text)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out / "scaling.json", result)
        (arguments.out / "scaling.md").write_text(text)
    return result


def markdown(result: dict[str, Any]) -> str:
    lines = [
        f"`{result['command']}`, {result['source']}",
        "",
        "Counted, by tokens and attention pairs: slowest part x parts / whole tree (all parts / whole tree), where"
        " every rank runs a part, and where groups do.",
        "",
        "| batch | GPUs | each alone | groups of 4 | groups of 8 |",
        "|---|---|---|---|---|",
    ]
    by_place: dict[tuple[str, int], dict[int, str]] = {}
    for one in result["splits"]:
        told = f"{one['slowest']:.3f} ({one['all']:.3f})"
        by_place.setdefault((one["case"], one["gpus"]), {})[one["group"]] = told
    for (case, count), cells in by_place.items():
        lines.append(f"| {case} | {count} | {' | '.join(cells.get(size, '') for size in (1, 4, 8))} |")
    lines += [
        "",
        f"Paper: a step on {result['batch']} ({result['tokens']:,} tree tokens). GB a GPU before activations; seconds;"
        " of what as many GPUs without any loss would do. In shards: groups of 8, gathers hidden behind compute where"
        " they are shorter.",
        "",
        "| model | GPUs | ZeRO-1 GB | s | of ideal | shards GB | s compute | s inside | s between | of ideal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["paper"]:
        cells = [row["model"], str(row["gpus"]), f"{row['zero1_gb']:.1f}", f"{row['zero1_seconds']:.2f}"]
        cells += [f"{row['zero1_efficiency']:.0%}", f"{row['shards_gb']:.1f}", f"{row['shards_compute']:.2f}"]
        cells += [f"{row['shards_inside']:.2f}", f"{row['shards_between']:.2f}", f"{row['shards_efficiency']:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
