"""Batches with pictures over trees: tokens, runs of the tower, time and memory of dense, dense-leaf and tree.

    python -m benchmarks.tree.pictures --out benchmarks/results/tree            # ten minutes
    python -m benchmarks.tree.pictures --toy --out DIR                          # seconds

Three kinds of batch, drawn from a seed, in the shapes of data sets (pictures are noise, and so are tokens):

    geometry     a picture and a question of its own a prompt, eight long replies (Geometry3K)
    counting     four questions on a picture, eight short replies each (CLEVR)
    navigation   episodes of a task; each step adds a view, and is a sequence with all that came before (ActiveVLN)

Counts are of batches of full size; time and memory of smaller ones, by a small Qwen3-VL with random weights. Dense runs
every sequence alone through the untouched model, from pixels; dense-leaf those that no other extends. Forward and
backward, systems interleaved in one process; with the tower frozen and trained. Writes NAME.json and NAME.md.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import AutoModelForImageTextToText, PreTrainedModel, Qwen2VLImageProcessorPil, Qwen3VLConfig

from app.tree import FlatOutputs, PrefixTree, TreeEngine
from app.tree.planning.cost import ModelShape, TowerShape, plan_flops
from benchmarks.common.measure import compare, environment, measure, ratio
from benchmarks.common.records import write_json
from benchmarks.common.systems import System, attach_gradients, gradient_error, gradients

Ints = npt.NDArray[np.int64]

IMAGE, VIDEO, START, END = 3, 4, 5, 6
_FIRST = 8  # ids below are not drawn
WIDTHS: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 576,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "max_position_embeddings": 65_536,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [8, 8, 8],
        "mrope_interleaved": True,
    },
}
TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "out_hidden_size": 192,
    "num_position_embeddings": 576,
    "deepstack_visual_indexes": [0, 1],
}


@dataclass(frozen=True, eq=False)
class View:
    """A picture as the tree knows it."""

    key: bytes
    pixels: npt.NDArray[np.uint8]
    tokens: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences with the picture of every placeholder (-1 for text), and which positions their losses need."""

    name: str
    size: str
    sequences: list[Ints]
    images: list[Ints]
    scored: list[npt.NDArray[np.bool_]]
    pictures: list[View]
    weights: npt.NDArray[np.float64]

    def tree(self) -> PrefixTree:
        return PrefixTree.build(self.sequences, self.scored, images=self.images, pictures=self.pictures)

    def shown(self, i: int) -> list[int]:
        """Pictures of sequence i, in order."""
        owners, found, k = self.images[i][self.images[i] >= 0], list[int](), 0
        while k < len(owners):
            found.append(int(owners[k]))
            k += self.pictures[found[-1]].tokens
        return found


class _Maker:
    def __init__(self, grid: tuple[int, int], seed: int = 0) -> None:
        self.random, self.grid = np.random.default_rng(seed), grid
        self.pictures: list[View] = []
        self.texts: list[tuple[Ints, Ints, int]] = []  # tokens, images, first scored position

    def text(self, count: int) -> tuple[Ints, Ints]:
        return self.random.integers(_FIRST, WIDTHS["vocab_size"], count), np.full(count, -1)

    def picture(self) -> tuple[Ints, Ints]:
        height, width = self.grid
        pixels = self.random.integers(0, 256, (32 * height, 32 * width, 3), dtype=np.uint8)
        self.pictures.append(View(hashlib.blake2b(pixels.tobytes(), digest_size=16).digest(), pixels, height * width))
        tokens = np.array([START, *[IMAGE] * (height * width), END])
        return tokens, np.array([-1, *[len(self.pictures) - 1] * (height * width), -1])

    def add(self, *parts: tuple[Ints, Ints], scored: int) -> None:
        """A sequence; `scored`: tokens at its end that the loss needs."""
        tokens, images = (np.concatenate(columns) for columns in zip(*parts))
        self.texts.append((tokens, images, len(tokens) - scored))

    def batch(self, name: str, size: str) -> Batch:
        sequences, images = [t for t, _, _ in self.texts], [i for _, i, _ in self.texts]
        scored = [(np.arange(len(t)) >= first) & (i < 0) for t, i, first in self.texts]
        weights = self.random.normal(size=len(sequences)) / sum(int(mask.sum()) for mask in scored)
        return Batch(name, size, sequences, images, scored, self.pictures, weights)


def geometry(prompts: int, grid: tuple[int, int] = (12, 19), reply: int = 300) -> Batch:
    make = _Maker(grid)
    system = make.text(24)
    for _ in range(prompts):
        picture, question = make.picture(), make.text(40)
        for _ in range(8):
            make.add(system, picture, question, make.text(reply), scored=reply)
    return make.batch("geometry", f"{prompts} x 8")


def counting(pictures: int, grid: tuple[int, int] = (10, 15), reply: int = 60) -> Batch:
    make = _Maker(grid)
    system = make.text(24)
    for _ in range(pictures):
        picture = make.picture()
        for _ in range(4):
            question = make.text(20)
            for _ in range(8):
                make.add(system, picture, question, make.text(reply), scored=reply)
    return make.batch("counting", f"{pictures} x 4 x 8")


def navigation(tasks: int, episodes: int, steps: int, grid: tuple[int, int] = (16, 16), reply: int = 30) -> Batch:
    make = _Maker(grid)
    system = make.text(60)
    for _ in range(tasks):
        task, first = make.text(40), make.picture()
        for _ in range(episodes):
            past = [system, task, first]
            for step in range(steps):
                past += [make.picture()] if step else []
                past.append(make.text(reply))
                make.add(*past, scored=reply)
    return make.batch("navigation", f"{tasks} x {episodes} x {steps}")


def build(toy: bool, trained: bool) -> tuple[PreTrainedModel, Any]:
    """The model, and transformers' image processor for it."""
    shrunk = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 12} if toy else {}
    rope = {**WIDTHS["rope_parameters"], "mrope_section": [2, 2, 2]} if toy else WIDTHS["rope_parameters"]
    text = WIDTHS | shrunk | {"rope_parameters": rope}
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=TOWER | {"out_hidden_size": text["hidden_size"]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.train()
    for parameter in model.base_model.visual.parameters():
        parameter.requires_grad_(trained)
    attach_gradients(model)
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, size={"shortest_edge": 32 * 32, "longest_edge": 2**24}
    )
    return model, processor


def counts(batch: Batch) -> dict[str, Any]:
    """Tokens, those of placeholders, and runs of the tower, by system."""
    tree = batch.tree()
    leaves = tree.leaf_sequences.tolist()
    shown = [batch.shown(i) for i in range(len(batch.sequences))]
    placeholders = [int((column >= 0).sum()) for column in batch.images]
    every = range(len(shown))
    return {
        "batch": batch.name,
        "size": batch.size,
        "dense": _count(batch, list(every), shown, placeholders),
        "dense-leaf": _count(batch, leaves, shown, placeholders),
        "ours": {
            "tokens": tree.num_tokens,
            "image_tokens": int((tree.picture_rows >= 0).sum()),
            "tower_runs": len({m for pictures in shown for m in pictures}),
        },
    }


def _count(batch: Batch, chosen: list[int], shown: list[list[int]], placeholders: list[int]) -> dict[str, int]:
    return {
        "tokens": sum(len(batch.sequences[i]) for i in chosen),
        "image_tokens": sum(placeholders[i] for i in chosen),
        "tower_runs": sum(len(shown[i]) for i in chosen),
    }


def systems(model: PreTrainedModel, processor: Any, batch: Batch) -> list[System]:
    shape, tower = ModelShape.of(model.config), TowerShape.of(model.config)
    assert tower is not None
    tree, found = batch.tree(), counts(batch)
    engine = TreeEngine(model, self_check=False, image_processor=processor)
    execution = engine.plan(tree)
    picture = tower.forward_flops(batch.pictures[0].tokens) * (3 if engine.tower.trained else 1)
    weights = torch.from_numpy(batch.weights)

    def loss(out: FlatOutputs, indices: torch.Tensor) -> torch.Tensor:
        assert out.logprobs is not None
        factors = torch.repeat_interleave(weights[indices], out.cu_seqlens.diff())
        return (factors.to(out.logprobs.dtype) * out.logprobs).sum()

    def dense(name: str, factors: dict[int, npt.NDArray[np.float64]]) -> System:
        lengths = [len(batch.sequences[i]) for i in factors]
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        scored = sum(int((column != 0).sum()) for column in factors.values())
        flops = 3 * shape.forward_flops(sum(lengths), pairs, scored) + found[name]["tower_runs"] * picture
        return System(name, lambda: _run(model, processor, batch, factors), sum(lengths), pairs, flops, flops)

    def ours() -> None:  # of a new engine: a step of training sees new pictures
        new = TreeEngine(model, self_check=False, image_processor=processor)
        new.backward(batch.tree(), loss, batched=True)

    runs = found["ours"]["tower_runs"] * picture
    least = 3 * shape.forward_flops(tree.num_needed_tokens, tree.num_attention_pairs, len(tree.scored_tokens)) + runs
    return [
        dense("dense", {i: batch.weights[i] * mask for i, mask in enumerate(batch.scored)}),
        dense("dense-leaf", _merged(batch, tree)),
        System(
            "ours",
            ours,
            tree.num_tokens,
            tree.num_attention_pairs,
            plan_flops(execution, shape) + runs,
            least,
            extra=execution.extra_forward_tokens,
        ),
    ]


def _merged(batch: Batch, tree: PrefixTree) -> dict[int, npt.NDArray[np.float64]]:
    """The leaf sequences, each with the factors of itself and of the prefixes that are dropped for it."""
    is_leaf, waiting = set(tree.leaf_sequences.tolist()), list[int]()
    factors: dict[int, npt.NDArray[np.float64]] = {}
    for i in tree.sorted_sequences.tolist():
        waiting.append(i)
        if i in is_leaf:
            factors[i] = np.zeros(len(batch.sequences[i]))
            for k in waiting:
                factors[i][: len(batch.sequences[k])] += batch.weights[k] * batch.scored[k]
            waiting.clear()
    return factors


def _run(model: PreTrainedModel, processor: Any, batch: Batch, factors: dict[int, npt.NDArray[np.float64]]) -> None:
    for i, column in factors.items():
        ids, positions = torch.from_numpy(batch.sequences[i]), torch.from_numpy(np.flatnonzero(column))
        seen = processor([batch.pictures[m].pixels for m in batch.shown(i)], return_tensors="pt")
        kinds = torch.from_numpy((batch.images[i] >= 0).astype(np.int64))[None]
        logits = model(
            input_ids=ids[None], use_cache=False, logits_to_keep=positions - 1, mm_token_type_ids=kinds, **seen
        ).logits[0]
        weights = torch.from_numpy(column)[positions].to(logits)
        (-(weights * functional.cross_entropy(logits, ids[positions], reduction="none")).sum()).backward()


def markdown(report: dict[str, Any]) -> str:
    env = report["environment"]
    lines = [
        "# Pictures over trees",
        "",
        f"Made by `{report['command']}` on {report['hardware']}; torch {env['torch']}, threads: {env['torch_threads']},"
        f" transformers {env['transformers']}. A Qwen3-VL of random weights in float32: {report['layers']} layers of"
        f" {report['hidden']}, a tower of {TOWER['depth']} layers of {TOWER['hidden_size']} with deepstack features.",
        "",
        "What there is to run, in batches of full size: tokens, those of pictures among them, and pictures that go"
        " through the tower.",
        "",
        "| batch | size | tokens: dense | dense-leaf | tree | dense / tree | leaf / tree | of pictures: dense / tree |"
        " tower runs: dense | dense-leaf | tree |",
        "|" + "---|" * 11,
    ]
    for row in report["counts"]:
        dense, leaf, ours = row["dense"], row["dense-leaf"], row["ours"]
        cells = [row["batch"], row["size"], *(f"{one['tokens']:,}" for one in (dense, leaf, ours))]
        cells += [f"{one['tokens'] / ours['tokens']:.2f}" for one in (dense, leaf)]
        cells += [f"{dense['image_tokens'] / ours['image_tokens']:.1f}"]
        cells += [f"{one['tower_runs']:,}" for one in (dense, leaf, ours)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Forward and backward of smaller ones, ratios formed within a repeat: median (least to most). Peak memory is of"
        " tensors beyond model and gradients.",
        "",
        "| batch | size | tower | tree tokens | dense tokens / tree | tower runs: dense, tree | ours, CPU s |"
        " dense / ours | dense-leaf / ours | MiB: dense | ours | gradient error | repeats |",
        "|" + "---|" * 13,
    ]
    for row in report["results"]:
        ours, dense, versus = row["systems"]["ours"], row["systems"]["dense"], row["against_ours"]
        cells = [
            row["batch"],
            row["size"],
            row["tower"],
            f"{ours['tokens']:,}",
            f"{dense['tokens'] / ours['tokens']:.2f}",
            f"{row['counts']['dense']['tower_runs']}, {row['counts']['ours']['tower_runs']}",
            f"{ours['cpu_seconds']['median']:.2f}",
            ratio(versus["dense"]),
            ratio(versus["dense-leaf"]),
            *("-" if one["peak_bytes"] is None else f"{one['peak_bytes'] / 2**20:,.0f}" for one in (dense, ours)),
            f"{row['gradient_error']:.1e}",
            str(len(ours["cpu_seconds"]["runs"])),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--repeats", type=int, default=3)
    add("--hardware", default="a CPU", help="what the report says the machine is")
    add("--toy", action="store_true")
    add("--out", type=Path, required=True)
    add("--name", default="pictures")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.toy:
        full = timed = [geometry(1, (2, 3), 6), counting(1, (2, 2), 4), navigation(1, 2, 2, (2, 2), 4)]
    else:
        full = [geometry(32), counting(8), navigation(8, 8, 12)]
        timed = [geometry(2), counting(2), navigation(1, 2, 4)]
    report: dict[str, Any] = {
        "command": " ".join(
            ["python -m benchmarks.tree.pictures", *[f"--repeats {args.repeats}"] * (args.repeats != 3)]
        )
        + " --toy" * args.toy,
        "hardware": args.hardware,
        "environment": environment(torch.device("cpu")),
        "counts": [counts(batch) for batch in full],
        "results": [],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for trained in (False, True):
        model, processor = build(args.toy, trained)
        report |= {"layers": model.config.text_config.num_hidden_layers, "hidden": model.config.text_config.hidden_size}
        for batch in timed:
            chosen = systems(model, processor, batch)
            expected, got = (gradients(model, system) for system in (chosen[0], chosen[-1]))
            error = gradient_error(got, expected)["largest"]
            rows = measure(
                model, chosen, args.repeats, progress=lambda line, b=batch: print(f"{b.name}: {line}", file=sys.stderr)
            )
            report["results"].append(
                {
                    "batch": batch.name,
                    "size": batch.size,
                    "tower": "trained" if trained else "frozen",
                    "counts": counts(batch),
                    "systems": rows,
                    "against_ours": compare(rows, "cpu_seconds"),
                    "gradient_error": error,
                }
            )
            write_json(args.out / f"{args.name}.json", report)
            (args.out / f"{args.name}.md").write_text(markdown(report))
    return report


if __name__ == "__main__":
    main()
