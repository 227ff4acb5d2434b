"""The figures of `arborist inspect`: a tree's counts, and what a model's configuration makes of them.

Promises: pure counting on the tree and arithmetic on the configuration; the model is built without memory for its
weights (on torch's meta device).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from app.tree.attention import BACKENDS
from app.tree.memory import DEVICE_CHUNK, PassMemory, pass_memory
from app.tree.model.checkpointing import checkpointable
from app.tree.model.language import auto_class
from app.tree.model.pictures import Tower
from app.tree.model.refusals import refuse_by_name
from app.tree.model.shape import shape_of
from app.tree.planning.cost import ModelShape, TowerShape, plan_flops
from app.tree.planning.plan import ExecutionPlan, most_ends
from app.tree.planning.planner import plan
from app.tree.planning.timing import CPU_RATES, GPU_RATES, Rates, TimeModel
from app.tree.planning.work import Work, count_work
from app.tree.prefix_tree import Ints, PrefixTree
from app.tree.states.piece_tree import PieceTree


@dataclass(frozen=True)
class TreeReport:
    """Counts of a tree; `depths`: forks above a leaf -> leaves; `fan_outs`: children -> forks that have so many.
    Dense: every sequence alone; leaf: without those that are prefixes of (or equal to) others."""

    sequences: int
    shortest: int
    longest: int
    trained: int
    dense_tokens: int
    leaf_tokens: int
    tree_tokens: int
    needed_tokens: int
    dense_pairs: int
    leaf_pairs: int
    tree_pairs: int
    leaves: int
    forks: int
    roots: int
    depths: dict[int, int]
    fan_outs: dict[int, int]

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """(name, tokens, attention pairs) of each way to run the sequences."""
        yield "dense", self.dense_tokens, self.dense_pairs
        yield "dense-leaf", self.leaf_tokens, self.leaf_pairs
        yield "tree", self.tree_tokens, self.tree_pairs

    def figures(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class ScanReport:
    """What layers that carry a state do in a plan; all runs of a chunk counted, those again as well.

    Attributes:
        layers: how many carry a state.
        state_bytes: of all layers' states after one token, in float32: what a piece holds that others hang below.
        held: most such states at a time.
        pieces: that forwards are cut into, each continuing the state of the one above it.
        rows: of the scans' blocks, padding included; 0 where layers only convolve.
        levels: steps of the scans, one after the other, each over all blocks that can run beside each other.
    """

    layers: int
    state_bytes: int
    held: int
    pieces: int
    rows: int
    levels: int


@dataclass(frozen=True)
class TowerReport:
    """What a tower does for the pictures of a tree. FLOPs are of forwards alone; a tower that is trained has three
    times as many, and keeps graphs.

    Attributes:
        dense_runs, leaf_runs, tree_runs: pictures that go through it: of every sequence alone, of dense-leaf, of the
            tree, where each does once.
        dense_flops, leaf_flops, tree_flops: of these.
        feature_bytes: of the tables of all pictures' features.
        graph_bytes: estimated, that forwards through a trained tower keep for backward.
    """

    dense_runs: int
    leaf_runs: int
    tree_runs: int
    dense_flops: float
    leaf_flops: float
    tree_flops: float
    feature_bytes: int
    graph_bytes: int

    def rows(self) -> Iterator[tuple[str, int, float]]:
        """(name, pictures through the tower, FLOPs) of each way to run the sequences."""
        yield "dense", self.dense_runs, self.dense_flops
        yield "dense-leaf", self.leaf_runs, self.leaf_flops
        yield "tree", self.tree_runs, self.tree_flops


@dataclass(frozen=True, eq=False)
class ModelReport:
    """Predictions for one model; FLOPs and seconds are of forward and backward of everything. `attending`: layers with
    keys and values; `cached`: values of these a token; `scans`: of layers that carry a state, where there are any;
    `tower`: where the tree has pictures and the model a tower, whose FLOPs come on top."""

    name: str
    parameters: int
    dtype: str
    device: str
    dense_flops: float
    leaf_flops: float
    tree_flops: float
    dense_seconds: float
    leaf_seconds: float
    tree_seconds: float
    memory: PassMemory
    plan: ExecutionPlan
    attending: int
    cached: int
    scans: ScanReport | None
    tower: TowerReport | None

    def rows(self) -> Iterator[tuple[str, float, float]]:
        """(name, FLOPs, predicted seconds) of each way to run the sequences."""
        yield "dense", self.dense_flops, self.dense_seconds
        yield "dense-leaf", self.leaf_flops, self.leaf_seconds
        yield "tree", self.tree_flops, self.tree_seconds

    def figures(self) -> dict[str, Any]:
        """All of it but the chunks of the plan, for JSON."""
        values = {name: value for name, value in vars(self).items() if name not in ("memory", "plan", "scans", "tower")}
        execution = self.plan
        return values | {
            "speed_up_over_dense": self.dense_seconds / self.tree_seconds,
            "speed_up_over_leaf": self.leaf_seconds / self.tree_seconds,
            "memory": vars(self.memory) | {"total": self.memory.total},
            "scans": None if self.scans is None else dict(vars(self.scans)),
            "tower": None if self.tower is None else dict(vars(self.tower)),
            "plan": {
                "packing": execution.packing,
                "chunks": len(execution.chunks),
                "chunk_tokens": execution.chunk_tokens,
                "live_tokens": execution.live_tokens,
                "peak_live_tokens": execution.peak_live_tokens,
                "extra_forward_tokens": execution.extra_forward_tokens,
            },
        }


def inspect_tree(tree: PrefixTree) -> TreeReport:
    """Counts `tree`, which has at least one sequence."""
    parents = tree.segment_parent
    children = np.bincount(parents[parents >= 0], minlength=tree.num_segments)
    depth = np.zeros(tree.num_segments, np.int64)
    for segment, parent in enumerate(parents.tolist()):  # parents come first
        if parent >= 0:
            depth[segment] = depth[parent] + 1
    leaves = children == 0
    return TreeReport(
        sequences=tree.num_sequences,
        shortest=int(tree.sequence_length.min()),
        longest=int(tree.sequence_length.max()),
        trained=int(tree.sequence_scored(np.arange(tree.num_sequences)).sum()),
        dense_tokens=tree.num_dense_tokens,
        leaf_tokens=tree.num_leaf_tokens,
        tree_tokens=tree.num_tokens,
        needed_tokens=tree.num_needed_tokens,
        dense_pairs=_pairs(tree.sequence_length),
        leaf_pairs=_pairs(tree.sequence_length[tree.leaf_sequences]),
        tree_pairs=tree.num_attention_pairs,
        leaves=int(leaves.sum()),
        forks=int((children > 1).sum()),
        roots=int((parents < 0).sum()),
        depths=_counts(depth[leaves]),
        fan_outs=_counts(children[children > 0]),
    )


def inspect_model(
    tree: PrefixTree,
    config: Any,
    device: str,
    dtype: str,
    chunk_tokens: int | None,
    live_tokens: int | None,
    rates: Rates | None = None,
) -> ModelReport:
    """Plans `tree` for a model of this transformers configuration, and predicts.

    Args:
        chunk_tokens: default the device's; live_tokens: default everything at once.
        rates: by default what such a device usually can.

    Raises:
        ValueError: a model that cannot run over a tree, or that transformers cannot build.
    """
    refuse_by_name(f"--model: {config.model_type}", config)
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(config, dtype=getattr(torch, dtype))
    except Exception as error:  # sizes that contradict each other, or a library that is missing, fail anywhere
        told = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"--model: {config.model_type} cannot be built from its configuration: {told}") from error
    shape, element = shape_of(model), 2 if dtype == "bfloat16" else 4
    if device == "cuda":
        times = TimeModel(shape, rates or GPU_RATES, BACKENDS["flash"], element)
    else:
        times = TimeModel(shape, rates or CPU_RATES, BACKENDS["sdpa"], element)
    chunk, live = chunk_tokens or DEVICE_CHUNK[device], live_tokens or tree.num_tokens
    share = shape.checkpoint_share() if checkpointable(model) else 1.0
    execution = plan(tree, chunk, live, times, share, uncut=Tower(model, None).uncut(tree))
    assert execution.seconds is not None, "there is a predictor"
    every = np.arange(tree.num_sequences)
    scored = np.add.reduceat(tree.sequence_scored(every), np.cumsum(tree.sequence_length) - tree.sequence_length)
    dense = _alone(tree.sequence_length, scored)
    # A leaf carries the trained positions of the prefixes dropped for it: those of the tree on its path.
    on_path = np.isin(tree.sequence_tokens(tree.leaf_sequences), tree.scored_tokens)
    leaf_lengths = tree.sequence_length[tree.leaf_sequences]
    leaf = _alone(leaf_lengths, np.array([on_path.sum()]))
    return ModelReport(
        name=f"{config.model_type}, hidden {shape.hidden}, {shape.layers} layers",
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=dtype,
        device=device,
        dense_flops=3 * shape.forward_flops(dense.tokens, dense.pairs, dense.scored),
        leaf_flops=3 * shape.forward_flops(leaf.tokens, leaf.pairs, leaf.scored),
        tree_flops=plan_flops(execution, shape),
        dense_seconds=times.seconds(dense),
        leaf_seconds=times.seconds(leaf),
        tree_seconds=execution.seconds,
        memory=pass_memory(
            model,
            execution.chunk_tokens,
            execution.peak_live_tokens,
            tree,
            chunks=execution.chunks,
            device=torch.device(device),
        ),
        plan=execution,
        attending=len(shape.attention),
        cached=2 * shape.key_values(),
        scans=_scans(execution, shape, times),
        tower=_tower(tree, config, shape.hidden, element),
    )


def read_config(path: Path) -> Any:
    """The transformers configuration of a model's directory or configuration file.

    Raises:
        ValueError: naming what is missing or unknown.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model: {file} is no readable JSON ({error}); name a model's directory or config"
        ) from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ValueError(f"--model: {file} has no field 'model_type'; name a transformers configuration")
    try:
        return AutoConfig.for_model(**fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--model: {file}: {error}") from error


def _scans(execution: ExecutionPlan, shape: ModelShape, times: TimeModel) -> ScanReport | None:
    if shape.states is None:
        return None
    work = count_work(execution.tree, execution.chunks, times.backend, scans=True)
    twice = sum(
        len(chunk.pieces) * chunk.checkpoint + len(chunk.anchors) * (not chunk.keep) for chunk in execution.chunks
    )
    scanning = shape.states.heads > 0
    return ScanReport(
        layers=shape.states.layers,
        state_bytes=4 * shape.state_values,
        held=most_ends(execution.chunks),
        pieces=sum(len(chunk.pieces) for chunk in execution.chunks) + twice,
        rows=(work.scanned + work.scanned_again) * scanning,
        levels=(work.levels + work.levels_again) * scanning,
    )


def _tower(tree: PrefixTree, config: Any, hidden: int, bytes_per_value: int) -> TowerReport | None:
    tower = TowerShape.of(config)
    if tower is None or not tree.pictures:
        return None
    sizes = [picture.tokens for picture in tree.pictures]
    flops = np.array([tower.forward_flops(rows) for rows in sizes])

    def shown(sequences: Ints) -> Ints:
        """How often these sequences show each picture."""
        rows = tree.picture_rows[tree.sequence_tokens(sequences)]
        firsts = np.searchsorted(tree.picture_starts, rows[np.isin(rows, tree.picture_starts[:-1])])
        return np.bincount(firsts, minlength=len(sizes))

    dense, leaf = shown(np.arange(tree.num_sequences)), shown(tree.leaf_sequences)
    return TowerReport(
        dense_runs=int(dense.sum()),
        leaf_runs=int(leaf.sum()),
        tree_runs=len(sizes),
        dense_flops=float(dense @ flops),
        leaf_flops=float(leaf @ flops),
        tree_flops=float(flops.sum()),
        feature_bytes=int(tree.picture_starts[-1]) * hidden * (1 + tower.deepstack) * bytes_per_value,
        graph_bytes=sum(tower.graph_bytes(rows, bytes_per_value) for rows in sizes),
    )


def _alone(lengths: Ints, scored: Ints) -> Work:
    """The work of running sequences one by one."""
    count = len(lengths)
    each, times = np.unique(lengths, return_counts=True)
    scanned, levels = (times @ np.array([PieceTree([n], [-1]).scanned for n in each])).tolist()
    tokens, pairs = int(lengths.sum()), _pairs(lengths)
    return Work(tokens, pairs, count, count, 0, 0, 0, 0, 0, int(scored.sum()), scanned=scanned, levels=levels)


def _pairs(lengths: Ints) -> int:
    return int((lengths * (lengths + 1) // 2).sum())


def _counts(values: Ints) -> dict[int, int]:
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))
