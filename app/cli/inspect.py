"""`arborist inspect FILE [--model DIR_OR_JSON]`: what a prefix tree saves on recorded rollouts, before anything trains.

Prints sequences, tokens (dense, dense-leaf, tree) and attention pairs, how deep and how wide the tree is, the plan, and
for a model's configuration predicted FLOPs, memory and speed-up; writes a picture of the tree and all figures as JSON.

    arborist inspect rollouts.jsonl --model path/to/model --out runs/inspect

FILE: token arrays (.npz), a sequence a line or row (.jsonl, .jsonl.gz, .parquet: tokens, loss_mask), conversations as
text (.jsonl with --tokenizer), or batches a run recorded (batch_*.safetensors, or their directory).

Promises: no weights are loaded and nothing is trained; predictions are for the device and precision asked for, from the
planner's own cost model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from textwrap import indent
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch

from app.pictures import Picture, used
from app.tree import ModelReport, PrefixTree, TreeReport, inspect_model, inspect_tree, read_config
from callbacks import figures
from datamodules.conversations.sequence_files import Sequences, load_sequences
from datamodules.conversations.tokens import Workload

_BAR = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="recorded rollouts")
    parser.add_argument("--model", type=Path, help="a model's directory or its config.json; no weights are read")
    parser.add_argument("--out", type=Path, help="directory for tree.png and inspect.json (default runs/inspect/NAME)")
    parser.add_argument("--workload", choices=get_args(Workload), default="turns", help="how conversations are cut")
    parser.add_argument("--tokenizer", help="directory of a tokenizer, for conversations as text")
    parser.add_argument("--system", type=Path, help="*_system.json that precedes conversations as text")
    parser.add_argument("--limit", type=int, help="only the first so many sequences")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what times are predicted for")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the parameters")
    parser.add_argument("--chunk-tokens", type=int, help="most tokens in one forward (default: the device's)")
    parser.add_argument("--live-tokens", type=int, help="most tokens whose activations are kept (default: all)")


def run(arguments: argparse.Namespace) -> None:
    """Prints the report and writes the files.

    Raises:
        ValueError: an option or a field of the data that cannot be used, by name.
    """
    path: Path = arguments.file
    for name in ("limit", "chunk_tokens", "live_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: must be at least 1, got {value}")
    if not path.exists():
        raise FileNotFoundError(f"FILE: there is no '{path}'; correct the path")
    config = None if arguments.model is None else read_config(arguments.model)
    found = load_sequences(path, arguments.workload, arguments.tokenizer, arguments.system)
    stop = arguments.limit
    tokens, trained = found.tokens[:stop], found.trained[:stop]
    _, keys = np.unique(np.array(found.temperatures[:stop]), return_inverse=True)
    images, pictures = _shown(found, stop)
    tree = PrefixTree.build(tokens, trained, keys=keys, images=images, pictures=pictures)
    report = inspect_tree(tree)
    title = f"{path.name} ({arguments.workload})" if path.suffix == ".npz" or arguments.tokenizer else path.name
    print(_tree_text(title, report))
    model = None
    if config is not None:
        model = inspect_model(
            tree, config, arguments.device, arguments.dtype, arguments.chunk_tokens, arguments.live_tokens
        )
        print(f"\n{_model_text(model)}\n\nPlan\n{indent(str(model.plan), '  ')}")
    out = arguments.out or Path("runs") / "inspect" / path.name.split(".")[0]
    out.mkdir(parents=True, exist_ok=True)
    figures.prefix_tree(tree, title).savefig(out / "tree.png")
    values = report.figures() | ({} if model is None else {"model": model.figures()})
    (out / "inspect.json").write_text(json.dumps({"file": path.name, **values}, indent=1) + "\n")
    print(f"\nwritten: {out / 'tree.png'}, {out / 'inspect.json'}")


def _shown(found: Sequences, stop: int | None) -> tuple[list[npt.NDArray[np.int32]] | None, tuple[Picture, ...]]:
    """The columns of pictures of the sequences before `stop`, and those that they show."""
    if found.images is None:
        return None, ()
    chosen = found.images[:stop]
    column, pictures = used(torch.from_numpy(np.concatenate(chosen)), found.pictures)
    if column is None:
        return None, ()
    return np.split(column.numpy(), np.cumsum([len(one) for one in chosen])[:-1]), pictures


def _tree_text(title: str, r: TreeReport) -> str:
    lines = [
        f"{title}: {r.sequences:,} sequences of {r.shortest:,} to {r.longest:,} tokens, {r.trained:,} tokens trained",
        "",
        f"{'':<13}{'tokens':>15} {'of tree':>8}   {'attention pairs':>20} {'of tree':>8}",
    ]
    for name, tokens, pairs in r.rows():
        of_tree = _times(tokens, r.tree_tokens), _times(pairs, r.tree_pairs)
        lines.append(f"{name:<13}{tokens:>15,} {of_tree[0]:>8}   {pairs:>20,} {of_tree[1]:>8}")
    lines.append(f"to run: {r.needed_tokens:,} (nothing trained depends on the others)")
    lines += ["", f"forks above a leaf ({r.leaves:,} leaves)", *_histogram(r.depths)]
    lines += ["", f"children of a fork ({r.forks:,} forks, {r.roots:,} roots)", *_histogram(r.fan_outs)]
    return "\n".join(lines)


def _model_text(m: ModelReport) -> str:
    lines = [f"{m.name}: {m.parameters / 1e9:,.3g} B parameters, {m.dtype} on {m.device}, forward and backward", ""]
    lines.append(f"{'':<13}{'PFLOP':>12} {'of tree':>8} {'predicted s':>13} {'of tree':>8}")
    for name, flops, seconds in m.rows():
        lines.append(
            f"{name:<13}{flops / 1e15:>12,.4g} {_times(flops, m.tree_flops):>8} {seconds:>13,.3g}"
            f" {_times(seconds, m.tree_seconds):>8}"
        )
    if m.scans is not None:
        s = m.scans
        lines += ["", f"layers: {m.attending} with keys and values, {s.layers} with a state"]
        lines.append(
            f"states: {s.state_bytes / 2**20:,.3g} MiB at a fork, at most {s.held:,} at a time; forwards of"
            f" {s.pieces:,} pieces" + (f", scans of {s.rows:,} rows in {s.levels:,} steps" if s.rows else "")
        )
    if m.tower is not None:
        t = m.tower
        lines += ["", f"{'pictures':<13}{'tower runs':>12} {'of tree':>8} {'PFLOP forward':>13} {'of tree':>8}"]
        for name, runs, flops in t.rows():
            lines.append(
                f"{name:<13}{runs:>12,} {_times(runs, t.tree_runs):>8} {flops / 1e15:>13,.3g}"
                f" {_times(flops, t.tree_flops):>8}"
            )
        lines.append(
            f"features {t.feature_bytes / 2**20:,.3g} MiB; a trained tower has three times the FLOPs, and keeps"
            f" {t.graph_bytes / 2**20:,.3g} MiB for backward"
        )
    lines += ["", f"memory of the plan: {m.memory}", f"in all beside the parameters: {m.memory.total / 2**30:,.2f} GiB"]
    return "\n".join(lines)


def _times(value: float, base: float) -> str:
    return f"{value / base:.2f} x" if base else "-"


def _histogram(counts: dict[int, int]) -> list[str]:
    """A bar a value, powers of two together from 9 on, as text."""
    bins: dict[str, int] = {}
    for value, count in sorted(counts.items()):
        low = value if value < 9 else 2 ** (value.bit_length() - 1)
        label = str(value) if value < 9 else f"{max(9, low)}-{2 * low - 1}"
        bins[label] = bins.get(label, 0) + count
    most = max(bins.values(), default=1)
    width = max(1, *(len(f"{count:,}") for count in bins.values())) if bins else 1
    return [f"{label:>13} {count:>{width},} {'#' * max(1, _BAR * count // most)}" for label, count in bins.items()]
