"""Activations: what autograd keeps alive is bounded by `live_tokens` whatever the tree, and is released."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.tree import PrefixTree, TreeEngine
from app.tree.memory import PassMemory, pass_memory
from app.tree.planning.plan import ExecutionPlan
from benchmarks.common import memory
from tests.app.tree import models


class Meter:
    """Bytes of tensors saved for backward, now and at most. Storages count once; parameters do not count."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.ignored = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.holders: dict[int, int] = {}
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> _Saved:
        return _Saved(tensor.detach(), self)  # with its graph an output would hold itself

    @contextmanager
    def measuring(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda saved: saved.tensor):
            yield


class _Saved:
    def __init__(self, tensor: Tensor, meter: Meter) -> None:
        self.tensor, self.meter = tensor, meter
        storage = tensor.untyped_storage()
        self.key, self.size = storage.data_ptr(), storage.nbytes()
        if self.key in meter.ignored:
            return
        if meter.holders.get(self.key, 0) == 0:
            meter.now += self.size
            meter.peak = max(meter.peak, meter.now)
        meter.holders[self.key] = meter.holders.get(self.key, 0) + 1

    def __del__(self) -> None:
        if self.key not in self.meter.ignored:
            self.meter.holders[self.key] -= 1
            if self.meter.holders[self.key] == 0:
                self.meter.now -= self.size


def star(branches: int) -> list[np.ndarray]:
    """A stem of 16 tokens and branches of 12 that start differently."""
    random = np.random.default_rng(0)
    stem = random.integers(0, 31, 16)
    return [np.concatenate([stem, [i % 31], [i // 31], random.integers(0, 31, 10)]) for i in range(branches)]


def peak_and_estimate(
    model: Any, sequences: list[np.ndarray], chunk_tokens: int, live_tokens: int
) -> tuple[int, PassMemory, ExecutionPlan]:
    """Bytes in the allocator above model and gradients, what was estimated of the plan, and the plan."""
    tree, engine = PrefixTree.build(sequences), TreeEngine(model, chunk_tokens, live_tokens, head_tokens=64)
    engine.backward(PrefixTree.build(sequences[:2]), lambda out, i: out.logprobs.sum())  # the self-check is once
    execution = engine.plan(tree)
    budgets = execution.chunk_tokens, execution.peak_live_tokens
    estimate = pass_memory(model, *budgets, tree, 64, execution.chunks)
    peak = memory.peak_bytes(lambda: engine.backward(tree, lambda out, i: out.logprobs.sum()), torch.device("cpu"))
    return peak, estimate, execution


def peak_bytes(sequences: list[np.ndarray], chunk_tokens: int, live_tokens: int) -> int:
    model = models.make("qwen3")
    meter = Meter(model)
    engine, tree = TreeEngine(model, chunk_tokens, live_tokens), PrefixTree.build(sequences)
    with meter.measuring():
        engine.backward(tree, lambda out, i: out.logprobs.sum())
    gc.collect()
    assert meter.now == 0, "graphs outlive the pass"
    return meter.peak


def test_peak_does_not_grow_with_the_tree() -> None:
    few, many = peak_bytes(star(3), 12, 16), peak_bytes(star(40), 12, 16)
    assert many <= few * 1.05


def test_peak_follows_the_live_budget() -> None:
    """Everything alive costs about as much more as there are tokens more; small budgets stay small."""
    sequences = star(12)
    tokens = PrefixTree.build(sequences).num_tokens
    everything, little = peak_bytes(sequences, tokens, tokens), peak_bytes(sequences, 16, 16)
    assert little < everything * 16 / tokens * 1.6


def test_forward_keeps_no_graph() -> None:
    model = models.make("qwen3")
    meter = Meter(model)
    with meter.measuring():
        TreeEngine(model, 12, 16).forward(PrefixTree.build(star(5)))
    assert meter.peak == 0
