"""Predicted seconds of a plan, and the coefficients they are made of.

Promises: pure arithmetic on counts and a model's shape; `predict` only has to rank plans, so what all plans of a tree
share alike may be rough. Coefficients are defaults of the device, or measured by `app.tree.calibrate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.tree.planning.cost import ModelShape
from app.tree.planning.plan import Chunk
from app.tree.planning.work import Calls, Work, count_work
from app.tree.prefix_tree import PrefixTree


@dataclass(frozen=True)
class Rates:
    """How fast a device is at each kind of work.

    Attributes:
        linear: FLOP/s of matrix products over many rows.
        attention: FLOP/s of attention calls.
        idle_rows: rows' worth of time that a matrix product takes whatever its number of rows (its weights are read).
        layer: seconds a layer's forward takes beside its arithmetic (launches and Python).
        call: the same of one dense attention call.
        memory: bytes/s of adding up gradients of the path.
    """

    linear: float
    attention: float
    idle_rows: float
    layer: float
    call: float
    memory: float


CPU_RATES = Rates(linear=8e10, attention=8e10, idle_rows=8.0, layer=4e-4, call=6e-5, memory=4e9)
GPU_RATES = Rates(linear=2.5e14, attention=1.5e14, idle_rows=256.0, layer=4e-4, call=4e-5, memory=1.5e12)
"""A CPU core with wide vectors, and a data-centre GPU in bf16: their proportions are what matters."""


@dataclass(frozen=True)
class TimeModel:
    """Seconds of plans of one model on one device, with one attention backend; `element`: bytes of a value."""

    shape: ModelShape
    rates: Rates
    backend: Calls
    element: int = 4

    def seconds(self, work: Work) -> float:
        """Predicted time of a backward pass: its forwards, what is computed again, and twice a forward (in attention
        2.5 times: five matrix products for two; in scans as well, which compute part of the forward again) for the
        gradients. A level of a scan is a few small calls, as a call of attention is."""
        shape, rates = self.shape, self.rates
        token = shape.linear_flops() / rates.linear
        pair = 4.0 * shape.query_values / rates.attention
        row = 2.0 * shape.hidden * shape.vocabulary / rates.linear
        path = 4.0 * shape.key_values() * self.element / rates.memory
        linear = 3 * work.tokens + work.tokens_again + rates.idle_rows * (3 * work.runs + work.runs_again)
        states = shape.states
        scans = 0.0
        if states is not None:
            rows = 3.5 * work.scanned + work.scanned_again
            scans = states.scan_flops(1) * rows / rates.attention
            scans += states.layers * rates.call * (3 * work.levels + work.levels_again)
        return (
            scans
            + token * linear
            + pair * (3.5 * work.pairs + work.pairs_again)
            + shape.layers * rates.layer * (3 * work.runs + work.runs_again)
            + len(shape.attention) * rates.call * (3 * work.parts + work.parts_again)
            + path * work.path
            + row * 4 * work.scored
        )

    def predict(self, tree: PrefixTree, chunks: Sequence[Chunk]) -> float:
        """Predicted seconds of a backward pass over `chunks`."""
        return self.seconds(count_work(tree, chunks, self.backend, self.shape.states is not None))
