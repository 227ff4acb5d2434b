"""A short interpreter of plans: one pass over one tree.

Promises: at most the plan's live tokens hold activations; a sequence's loss is evaluated when the chunk that holds its
last token (that has to run) has run with gradient, by then all its log-probabilities are known, and its gradient
reaches chunks above before they run backward. Nothing is synchronised with the host inside the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.tree.checkpointing import checkpointed
from app.tree.chunk_attention import Backend, ChunkAttention
from app.tree.heads import Heads, Kept
from app.tree.layout import Layout, layout
from app.tree.outputs import FlatOutputs
from app.tree.path_cache import KeyValue, PathCache
from app.tree.plan import ExecutionPlan, Step
from app.tree.prefix_tree import Ints
from app.tree.transfer import on_device

BatchedLoss = Callable[[FlatOutputs, Tensor], Tensor]


@dataclass(eq=False)
class _Run:
    """A chunk (or its anchors) that has gone forward."""

    layout: Layout
    attention: ChunkAttention
    hidden: Tensor  # [n, H]
    rows: Tensor  # rows whose hidden states predict scored tokens
    predicted: Tensor  # tree tokens they predict
    kept: Kept | None = None  # what the heads keep for the backward that follows


@dataclass(eq=False)
class _Open:
    """State of a chunk between its first step and its backward."""

    run: _Run | None = None
    pieces: dict[int, int] = field(default_factory=dict)  # piece -> first row in the run that provided keys
    keys_values: dict[int, KeyValue] = field(default_factory=dict)  # until the last piece is in the path cache
    pushed: int = 0  # pieces
    returned: dict[int, dict[int, KeyValue]] = field(default_factory=dict)  # piece -> gradients, by layer


class Executor:
    """One forward or backward pass of `plan`; single use."""

    def __init__(
        self,
        model: PreTrainedModel,
        heads: Heads,
        plan: ExecutionPlan,
        want: frozenset[str],
        temperature: float,
        per_sequence: np.ndarray[Any, np.dtype[np.float64]] | None,
        backend: Backend,
    ) -> None:
        self.backend = backend
        self.body, self.heads, self.plan, self.want = model.base_model, heads, plan, want
        self.layers = model.config.get_text_config().num_hidden_layers
        tree = plan.tree
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = torch.promote_types(torch.float32, parameter.dtype)
        self.tokens = on_device(tree.tokens, self.device)
        self.values = {name: self._per_token() for name in want}
        self.grads: dict[str, Tensor] = {}  # of the outputs that losses use: an unused entropy costs backward nothing
        self.temperature: Tensor | float = temperature
        if per_sequence is not None and tree.num_sequences:
            self.temperature = self._per_segment(per_sequence)
        self._group_scored()
        last = tree.sequence_last_needed
        chunk = np.where(last >= 0, plan.token_chunk[last], len(plan.chunks)) if len(last) and plan.chunks else 0 * last
        self._ending = _group(chunk, len(plan.chunks) + 1)  # the last group: sequences of which nothing runs
        self._row_of = np.full(tree.num_tokens, -1, np.int64)
        self.total = torch.zeros((), dtype=self.dtype, device=self.device)

    def forward(self) -> None:
        """Fills `values` for the whole tree."""
        self.cache = PathCache(self.plan.longest_path, with_grads=False)
        self.open: dict[int, _Open] = {}
        for step in self.plan.steps:
            if step.action == "anchor" or (step.action == "forward" and step.chunk not in self.open):
                state = self.open[step.chunk] = _Open()
                run = self._run(step.chunk, None, store=bool(self.plan.chunks[step.chunk].anchors))
                self._provide(state, step.chunk, run, None)
                self._score(run)
            elif step.action == "push":
                self._push(step)
            elif step.action == "backward":
                del self.open[step.chunk]

    def backward(self, loss_fn: BatchedLoss | None) -> Tensor:
        """Runs the plan; returns the summed loss as a tensor on the model's device. Without `loss_fn` the gradients
        are those given to `set_grads`, and no output is computed."""
        self.cache = PathCache(self.plan.longest_path, with_grads=True)
        self.open = {}
        self._losses(len(self.plan.chunks), loss_fn)
        for position, step in enumerate(self.plan.steps):
            state = self.open.setdefault(step.chunk, _Open())
            chunk = self.plan.chunks[step.chunk]
            if step.action == "anchor":
                with torch.no_grad():
                    run = self._run(step.chunk, chunk.anchors, store=True)
                self._provide(state, step.chunk, run, chunk.anchors)
                if loss_fn is not None:
                    self._score(run)
            elif step.action == "forward":
                first = not state.pieces
                with checkpointed(self.body, chunk.checkpoint):
                    run = self._run(step.chunk, None, store=first and bool(chunk.anchors))
                if first:
                    self._provide(state, step.chunk, run, None)
                state.run = run
                if loss_fn is not None:
                    at_once = self.plan.steps[position + 1].action == "backward"
                    if first:
                        self._score(run, keep=at_once)
                    else:
                        fresh = self._scored_rows(step.chunk, run.layout, without=chunk.anchors)
                        self._score(_Run(run.layout, run.attention, run.hidden, *fresh))
                    self._losses(step.chunk, loss_fn)
            elif step.action == "push":
                self._push(step)
            elif step.action == "pop":
                start, stop = self._depths(step)
                state.returned[step.piece] = self.cache.pop(start, stop)
            else:
                self._backward(self.open.pop(step.chunk))
        return self.total

    def set_grads(self, grads: dict[str, Tensor]) -> None:
        """Gradients of the outputs of all sequences, concatenated [sum of L_i], for `backward` without a loss."""
        index, scored, _ = self._gather_index(list(range(self.plan.tree.num_sequences)))
        for name, grad in grads.items():
            self.grads[name] = self._per_token().index_add_(0, index, grad.to(self.device, self.dtype) * scored)

    def outputs(self, sequences: Iterable[int]) -> FlatOutputs:
        """Values of whole sequences, concatenated; 0.0 where the sequence does not score."""
        index, scored, bounds = self._gather_index(list(sequences))
        return FlatOutputs(bounds, **{name: x[index] * scored for name, x in self.values.items()})

    def _run(self, index: int, only: Sequence[int] | None, store: bool) -> _Run:
        """The model over a chunk's tokens: [n] rows of hidden states."""
        chunk = self.plan.chunks[index]
        rows = layout(chunk, only, self.backend.masked_block)
        depths = self.plan.tree.token_depth[rows.tokens]
        attention = ChunkAttention(rows, self.cache, chunk.path_tokens, depths, self.backend, store)
        ids = self.tokens[on_device(rows.tokens, self.device)]
        out = self.body(
            input_ids=ids.unsqueeze(0),
            position_ids=on_device(depths, self.device).unsqueeze(0),
            use_cache=False,
            tree_chunk=attention,
        )
        if len(attention.calls) != self.layers or len(set(attention.calls)) != self.layers:
            repeated = sorted({layer for layer in attention.calls if attention.calls.count(layer) > 1})
            if repeated:
                raise ValueError(
                    f"layers {repeated} of {type(self.body).__name__} attend more than once a forward; tree training"
                    " supports one attention a layer"
                )
            missing = sorted(set(range(self.layers)) - set(attention.calls))
            raise ValueError(
                f"layers {missing} of {type(self.body).__name__} did not attend through transformers' attention"
                " interface; tree training cannot compute them"
            )
        hidden = out.last_hidden_state[0]
        return _Run(rows, attention, hidden, *self._scored_rows(index, rows))

    def _scored_rows(self, index: int, rows: Layout, without: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Rows of a run whose hidden states predict scored tokens, and these tokens, but for those of some pieces."""
        chunk = self.plan.chunks[index]
        predicted = self._scored[self._scored_bounds[index] : self._scored_bounds[index + 1]]
        self._row_of[rows.tokens] = np.arange(len(rows.tokens))
        for piece in without:
            first = rows.piece_rows[piece]
            self._row_of[rows.tokens[first : first + chunk.pieces[piece].tokens]] = -1
        source = self._row_of[self.plan.tree.token_parent[predicted]]
        self._row_of[rows.tokens] = -1
        here = source >= 0
        return on_device(source[here], self.device), on_device(predicted[here], self.device)

    def _provide(self, state: _Open, index: int, run: _Run, only: Sequence[int] | None) -> None:
        """Remembers a run's keys and values for the pushes that follow."""
        pieces = range(len(self.plan.chunks[index].pieces)) if only is None else only
        state.pieces = dict(zip(pieces, run.layout.piece_rows, strict=True))
        state.keys_values = run.attention.keys_values

    def _score(self, run: _Run, keep: bool = False) -> None:
        """Values of the scored tokens that a run's rows predict; `keep`: its backward is the next thing to run."""
        if not len(run.rows):
            return
        temperature = self._temperature(run.predicted)
        hidden = run.hidden.detach()[run.rows]
        outputs, run.kept = self.heads.forward(hidden, self.tokens[run.predicted], temperature, self.want, keep)
        for name, values in outputs.items():
            self.values[name][run.predicted] = values

    def _losses(self, group: int, loss_fn: BatchedLoss | None) -> None:
        """Losses of the sequences that end in a chunk; their gradients are added to the tokens' on their path."""
        sequences = self._ending[group]
        if not sequences or loss_fn is None:
            return
        gather, scored, bounds = self._gather_index(sequences)
        leaves = {name: (x[gather] * scored).requires_grad_() for name, x in self.values.items()}
        loss = loss_fn(FlatOutputs(bounds, **leaves), torch.tensor(sequences))
        check_scalar(loss, "")
        self.total += loss.detach().to(self.total)
        if loss.requires_grad:
            loss.backward()
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                if name not in self.grads:
                    self.grads[name] = self._per_token()
                self.grads[name].index_add_(0, gather, leaf.grad * scored)

    def _push(self, step: Step) -> None:
        state = self.open[step.chunk]
        start, stop = self._depths(step)
        first = state.pieces[step.piece]
        for layer, (keys, values) in state.keys_values.items():
            rows = slice(first, first + stop - start)
            self.cache.push(layer, start, keys[:, :, rows], values[:, :, rows])
        state.pushed += 1
        if state.pushed == len(self.plan.chunks[step.chunk].anchors):
            state.keys_values.clear()  # of anchors that ran without gradient: as large as the path cache itself

    def _backward(self, state: _Open) -> None:
        run = state.run
        assert run is not None, "a plan runs every chunk forward before backward"
        rows = run.layout.piece_rows
        run.attention.returned_grads = [(rows[piece], by_layer) for piece, by_layer in state.returned.items()]
        grad = torch.zeros_like(run.hidden)
        if len(run.rows):
            grads = {name: x[run.predicted] for name, x in self.grads.items()}
            temperature = self._temperature(run.predicted)
            row_grads = self.heads.backward(
                run.hidden.detach()[run.rows], self.tokens[run.predicted], temperature, grads, run.kept
            )
            grad.index_add_(0, run.rows, row_grads)
        if run.hidden.requires_grad:
            torch.autograd.backward(run.hidden, grad)

    def _depths(self, step: Step) -> tuple[int, int]:
        """Depths [start, stop) of a piece."""
        piece = self.plan.chunks[step.chunk].pieces[step.piece]
        start = int(self.plan.tree.token_depth[piece.start])
        return start, start + piece.tokens

    def _gather_index(self, sequences: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Tree token and scored flag (1.0 or 0.0) of every position of `sequences`, and their bounds."""
        tree = self.plan.tree
        picks = np.array(sequences, np.int64)
        index = on_device(tree.sequence_tokens(picks), self.device)
        scored = on_device(tree.sequence_scored(picks), self.device, self.dtype)
        bounds = np.concatenate([[0], np.cumsum(tree.sequence_length[picks])])
        return index, scored, torch.from_numpy(bounds)

    def _group_scored(self) -> None:
        """Scored tokens ordered by the chunk whose rows predict them."""
        tree = self.plan.tree
        scored = tree.scored_tokens
        chunk = self.plan.token_chunk[tree.token_parent[scored]]
        order = np.argsort(chunk, kind="stable")
        self._scored: Ints = scored[order]
        self._scored_bounds = np.searchsorted(chunk[order], np.arange(len(self.plan.chunks) + 1))

    def _temperature(self, predicted: Tensor) -> Tensor | float:
        return self.temperature[predicted] if isinstance(self.temperature, Tensor) else self.temperature

    def _per_token(self) -> Tensor:
        return torch.zeros(self.plan.tree.num_tokens, dtype=self.dtype, device=self.device)

    def _per_segment(self, per_sequence: np.ndarray[Any, np.dtype[np.float64]]) -> Tensor | float:
        """Temperature of every tree token from those of the sequences through it, which have to agree."""
        tree = self.plan.tree
        low, high = np.full(tree.num_segments, np.inf), np.full(tree.num_segments, -np.inf)
        np.minimum.at(low, tree.sequence_segment, per_sequence)
        np.maximum.at(high, tree.sequence_segment, per_sequence)
        for segment in range(tree.num_segments - 1, -1, -1):
            parent = tree.segment_parent[segment]
            if parent >= 0:
                low[parent], high[parent] = min(low[parent], low[segment]), max(high[parent], high[segment])
        if (low != high).any():
            raise ValueError(
                "temperatures: sequences with different temperatures share tokens; build the tree with"
                " keys=<one integer per temperature>, so that only equal ones share"
            )
        if (low == low[0]).all():
            return float(low[0])
        return on_device(np.repeat(low, tree.segment_length), self.device, self.dtype)


def check_scalar(loss: Tensor, where: str) -> None:
    """Raises ValueError when a loss function returned anything but one number."""
    if loss.dim():
        raise ValueError(f"loss_fn: expected a scalar{where}, got shape {tuple(loss.shape)}; sum it")


def _group(labels: Ints, count: int) -> list[list[int]]:
    """Positions of each label 0..count-1."""
    groups: list[list[int]] = [[] for _ in range(count)]
    for position, label in enumerate(labels.tolist()):
        groups[label].append(position)
    return groups
