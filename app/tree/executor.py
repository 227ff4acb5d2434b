"""A short interpreter of plans: one pass over one tree.

Promises: at most the plan's live tokens hold activations; a sequence's loss is evaluated when the chunk that holds its
last token (that has to run) has run with gradient, by then all its log-probabilities are known, and its gradient
reaches chunks above before they run backward. Nothing is synchronised with the host inside the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.tree.attention import tree_attention_on
from app.tree.attention.chosen.compressed import CompressedAttention
from app.tree.attention.chosen.indexers import Indexers
from app.tree.attention.chunk_attention import Backend, ChunkAttention
from app.tree.attention.groups import RankGroup, RowShares
from app.tree.attention.path_cache import KeyValue, PathCache
from app.tree.experts.replay import ReplayPass
from app.tree.heads import Heads, Kept, Soft
from app.tree.heads.outputs import BatchedLoss, FlatOutputs, check_scalar
from app.tree.heads.temperatures import token_temperatures
from app.tree.model.checkpointing import checkpointed, refuse_reentrant
from app.tree.model.elementwise import layers_as
from app.tree.model.language import body_of
from app.tree.model.pictures import PicturePass, TakenRows
from app.tree.model.sharded import casts_are_made_anew
from app.tree.model.vocabulary import CutVocabulary
from app.tree.planning.layout import Layout, layout
from app.tree.planning.plan import ExecutionPlan, path_rows
from app.tree.prefix_tree import Ints
from app.tree.states.functions import STATES_ARGUMENT
from app.tree.states.layers import StateLayers
from app.tree.states.piece_states import PieceStates, States
from app.tree.states.piece_tree import PieceTree
from app.tree.states.scans import TORCH, Scans
from app.tree.transfer import on_device

Completing = Callable[[Sequence[Tensor]], None]


class _Scored(NamedTuple):
    """Scored tokens that a run's rows predict: those of this rank, and those of all ranks that run it."""

    rows: Tensor  # rows of `hidden` that predict them
    predicted: Tensor  # tree tokens they predict
    everyone: Tensor  # tree tokens that rows of any rank predict, rank by rank
    counts: list[int]  # how many of each rank
    at: slice  # where `predicted` are among them


class _Asked(NamedTuple):
    """Outputs that the heads compute at once: of this rank's rows, or of those of all ranks."""

    names: frozenset[str]
    rows: tuple[Tensor, Tensor, Tensor | float]  # hidden states [n, H], targets [n], temperature
    predicted: Tensor  # tree tokens [n]
    at: slice  # where these are among everyone's
    soft: Soft | None  # of them


@dataclass(eq=False)
class _Run:
    """A chunk (or its anchors) that has gone forward."""

    layout: Layout
    attention: ChunkAttention
    hidden: Tensor  # [rows run here, H]
    scored: _Scored
    states: PieceStates | None  # of layers that carry one
    taken: TakenRows | None  # of pictures
    told: tuple[Tensor, Tensor] | None  # the experts of its rows
    kept: Kept | None = None  # what the heads keep for the backward that follows


@dataclass(eq=False)
class _Open:
    """State of a chunk between its first step and its backward."""

    pieces: dict[int, int]  # piece -> first row in the run that provided keys
    keys_values: dict[int, KeyValue]  # until the last piece is in the path cache
    index_keys: dict[int, tuple[Tensor, ...]]  # as well
    ends: States  # of the pieces that others hang below
    end_grads: States = field(default_factory=dict)  # what these owe them, in float32 or float64
    run: _Run | None = None  # with the graph
    pushed: int = 0  # pieces
    returned: dict[int, dict[int, KeyValue]] = field(default_factory=dict)  # piece -> gradients, by layer


class Executor:
    """One pass over `plan`, single use: a backward pass, or (without `with_grads`) a forward pass."""

    def __init__(
        self,
        model: PreTrainedModel,
        heads: Heads,
        plan: ExecutionPlan,
        want: frozenset[str],
        temperature: float,
        per_sequence: np.ndarray[Any, np.dtype[np.float64]] | None,
        backend: Backend,
        state_layers: StateLayers,
        indexers: Indexers,
        with_grads: bool,
        group: RankGroup | None = None,
        scans: Scans = TORCH,
        pictures: PicturePass | None = None,
        soft: Soft | None = None,
        elementwise: str = "eager",
        replay: ReplayPass | None = None,
    ) -> None:
        self.model, self.body, self.heads, self.plan, self.want = model, body_of(model), heads, plan, want
        self.backend, self.state_layers, self.with_grads, self.group = backend, state_layers, with_grads, group
        self.scans, self.pictures, self.vocabulary = scans, pictures, CutVocabulary.of(model)
        self.elementwise, self.replay = elementwise, replay
        # Ranks that have a vocabulary in parts run every plan together: rows of their own, or (densely) the same ones.
        self._together = group if self.vocabulary is None else self.vocabulary.group
        tree = plan.tree
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = torch.promote_types(torch.float32, parameter.dtype)
        self._ids: Ints = tree.tokens if pictures is None else pictures.model_tokens(tree)
        self.tokens = on_device(self._ids, self.device)
        self.values = {name: self._per_token() for name in want}
        self.soft = None if soft is None else soft.on(tree, heads.vocab_size, self.device, self.dtype)
        self.grads: dict[str, Tensor] = {}  # of the outputs that losses use: an unused entropy costs backward nothing
        self.temperature: Tensor | float = temperature
        if per_sequence is not None and tree.num_sequences:
            self.temperature = token_temperatures(tree, per_sequence, self.device, self.dtype)
        self._group_scored()
        last = tree.sequence_last_needed
        chunk = np.where(last >= 0, plan.token_chunk[last], len(plan.chunks)) if len(last) and plan.chunks else 0 * last
        self._ending = _group(chunk, len(plan.chunks) + 1)  # the last group: sequences of which nothing runs
        self._row_of = np.full(tree.num_tokens, -1, np.int64)
        self.total = torch.zeros((), dtype=self.dtype, device=self.device)
        self.loss_fn: BatchedLoss | None = None
        self._completing: Completing | None = None
        self.indexers, self.compressed = indexers, CompressedAttention(state_layers.compressors)
        rows_of = cache(partial(path_rows, plan.chunks))
        self.cache = PathCache(plan.longest_path, with_grads, self.compressed.rates, rows_of)
        self.index_cache = PathCache(plan.longest_path, False, self.compressed.rates)
        self.open: dict[int, _Open] = {}
        self._hung: list[dict[int, int]] = [{} for _ in plan.chunks]  # pieces that others hang below -> their order
        for below in plan.chunks if state_layers.expected else ():
            if below.parent >= 0:
                hung = self._hung[below.parent]
                hung.setdefault(below.parent_piece, len(hung))

    def run(self, loss_fn: BatchedLoss | None = None, completing: Completing | None = None) -> Tensor:
        """Executes the plan; returns the summed loss as a tensor on the model's device.

        A forward pass fills `values` for the whole tree. A backward pass accumulates the gradients of `loss_fn`, or
        without one those of what was given to `set_grads`, and then computes no output. `completing`: see `TreeEngine`.
        """
        self.loss_fn = loss_fn
        backwards = [step.chunk for step in self.plan.steps if step.action == "backward"]
        if backwards and (self.pictures is None or self.pictures.foreseen):
            self._last, self._completing = backwards[-1], completing
        with self._pass():
            self._losses(len(self.plan.chunks))  # sequences of which nothing runs have losses too
            for step in self.plan.steps:
                match step.action:
                    case "anchor":
                        self._anchor(step.chunk)
                    case "forward":
                        self._forward(step.chunk)
                    case "push":
                        self._push(step.chunk, step.piece)
                    case "pop":
                        self._pop(step.chunk, step.piece)
                    case "backward":
                        self._backward(step.chunk)
            if self.pictures is not None:
                self.pictures.finish()
        return self.total

    def set_grads(self, grads: dict[str, Tensor]) -> None:
        """Gradients of the outputs of all sequences, concatenated [sum of L_i], for `run` without a loss."""
        index, scored, _ = self._gather_index(list(range(self.plan.tree.num_sequences)))
        for name, grad in grads.items():
            self.grads[name] = self._per_token().index_add_(0, index, grad.to(self.device, self.dtype) * scored)

    def outputs(self, sequences: Iterable[int]) -> FlatOutputs:
        """Values of whole sequences, concatenated; 0.0 where the sequence does not score."""
        index, scored, bounds = self._gather_index(list(sequences))
        return FlatOutputs(bounds, **{name: x[index] * scored for name, x in self.values.items()})

    @contextmanager
    def _pass(self) -> Iterator[None]:
        """The model attends over the tree inside; scratch memory goes back afterwards."""
        if self.with_grads:
            if self.state_layers.expected:
                refuse_reentrant(self.model)
            _accumulate_in_float32(self.model, self.heads.value_head)
        with ExitStack() as stack:
            stack.callback(self.heads.release)
            stack.enter_context(torch.set_grad_enabled(self.with_grads))
            stack.enter_context(casts_are_made_anew(self.model))
            stack.enter_context(self.state_layers.noted())
            if not self.plan.dense:
                stack.enter_context(tree_attention_on(self.model))
                stack.enter_context(layers_as(self.elementwise, self.model, set(self.state_layers.indices)))
                stack.enter_context(self.indexers.chosen_over_trees())
                stack.enter_context(self.compressed.over_trees(self.index_cache))
            if self.pictures is not None:
                stack.enter_context(self.pictures.tower.borrowed(self.with_grads))
            if self.replay is not None:
                stack.enter_context(self.replay.replayed())
            yield

    def _anchor(self, index: int) -> None:
        """Keys and values for the chunks below, of a chunk whose graph has no room beside theirs."""
        # Its turn with gradient comes after them, and until then only the way to them is needed. A forward pass has no
        # such turn: there the whole chunk runs now.
        only = self.plan.chunks[index].anchors if self.with_grads else None
        with torch.no_grad():
            run = self._run(index, only, store=True)
        self._provide(index, run, only)
        self._score(index, run)

    def _forward(self, index: int) -> None:
        """The whole chunk; the losses of the sequences that end in it follow."""
        chunk, again = self.plan.chunks[index], index in self.open
        if again and not self.with_grads:
            return
        with checkpointed(self.model, chunk.checkpoint and self.with_grads):
            run = self._run(index, None, store=bool(chunk.anchors) and not again)
        if not again:
            self._provide(index, run, None)
        self.open[index].run = run if self.with_grads else None
        # Values of the anchors stand: losses below were taken of them, and a second run may round differently.
        self._score(index, run, known=chunk.anchors if again else ())
        self._losses(index)

    def _push(self, index: int, piece: int) -> None:
        """Keys and values of a piece go onto the live path, for the chunks below it."""
        state = self.open[index]
        first = state.pieces[piece]
        rows = slice(first, first + self.plan.chunks[index].pieces[piece].tokens)
        self.cache.push(state.keys_values, rows)
        self.index_cache.push(state.index_keys, rows)
        state.pushed += 1
        if state.pushed == len(self.plan.chunks[index].anchors):
            state.keys_values.clear()  # of anchors that ran without gradient: as large as the path cache itself
            state.index_keys.clear()

    def _pop(self, index: int, piece: int) -> None:
        """A piece leaves the path: all below it ran backward, so what they owe its keys and values is complete."""
        self.open[index].returned[piece] = self.cache.pop()
        self.index_cache.pop()

    def _backward(self, index: int) -> None:
        """The chunk's own gradients, and through the path cache those of the chunks above."""
        state = self.open.pop(index)
        run = state.run
        if run is None:
            return  # a forward pass
        first, pieces = run.layout.piece_rows, self.plan.chunks[index].pieces
        # Chunks below read keys and values from the cache, past autograd: what came back through it is added to their
        # gradients by each layer's own attention, inside the one backward of this graph.
        run.attention.returned_grads = [
            (first[piece] + pieces[piece].tokens, by_layer) for piece, by_layer in state.returned.items()
        ]
        # Logits have no graph: the heads give the hidden states' gradient, in blocks. Rows that predict nothing scored
        # get zero here, and their share through the attention of the rows that see them.
        grad = torch.zeros_like(run.hidden, dtype=self.dtype)
        scored = run.scored
        # Complete by now: losses of sequences through these tokens were evaluated at the latest with this chunk.
        for asked in self._asked(run, scored, self.grads.keys()) if len(scored.everyone) else ():
            grads = {name: self.grads[name][asked.predicted] for name in asked.names}
            row_grads = self.heads.backward(*asked.rows, grads, run.kept, asked.soft)
            if asked.predicted is scored.everyone:
                assert self.heads.vocabulary is not None
                row_grads = self.heads.vocabulary.to_owners(row_grads, scored.counts)
            # A state before a fork predicts many tokens, whose gradients low precision would lose whole percents of.
            grad.index_add_(0, scored.rows, row_grads.to(grad.dtype))
        grad = grad.to(run.hidden.dtype)
        if run.hidden.requires_grad:
            ends, end_grads = self._owed_to_ends(run, state)
            if self._completing is not None and index == self._last:
                behind = () if self.pictures is None else self.pictures.roots()
                self._completing([run.hidden, *ends, *behind])
            if self.replay is not None and run.told is not None:
                self.replay.again(run.told)
            torch.autograd.backward([run.hidden, *ends], [grad, *end_grads])
            self._owe_to_starts(index, run)
            if self.pictures is not None:
                self.pictures.owe(run.taken)

    def _owed_to_ends(self, run: _Run, state: _Open) -> tuple[list[Tensor], list[Tensor]]:
        """States at the ends of a run's pieces, and their gradients: more roots of its backward."""
        ends = run.states.ends if run.states is not None else {}
        roots = [key for key, grad in state.end_grads.items() if ends[key].requires_grad]
        return [ends[key] for key in roots], [state.end_grads[key].to(ends[key].dtype) for key in roots]

    def _owe_to_starts(self, index: int, run: _Run) -> None:
        """A chunk's gradient of the states it started from is added to that of the end it hangs below."""
        chunk = self.plan.chunks[index]
        for key, start in run.states.starts.items() if run.states is not None else ():
            if start.grad is None:
                continue
            above = self.open[chunk.parent]
            if key not in above.end_grads:
                dtype = torch.promote_types(torch.float32, start.dtype)
                above.end_grads[key] = torch.zeros_like(above.ends[key], dtype=dtype, requires_grad=False)
            above.end_grads[key][self._hung[chunk.parent][chunk.parent_piece]] += start.grad[0]

    def _run(self, index: int, only: Sequence[int] | None, store: bool) -> _Run:
        """The model over a chunk's tokens, or those of its pieces `only`: [n] rows of hidden states."""
        chunk = self.plan.chunks[index]
        rows = layout(chunk, only, self.backend.masked_block)
        depths = self.plan.tree.token_depth[rows.tokens]
        shares = None if self.group is None else RowShares.of(self.group, len(rows.tokens))
        ahead = None if self.pictures is None else self.pictures.ahead(rows.tokens)
        attention = ChunkAttention(rows, self.cache, chunk.path_tokens, depths, self.backend, store, shares, ahead)
        states, taken = None, None
        here = slice(None) if shares is None else shares.run
        ids = self.tokens[on_device(rows.tokens[here], self.device)].unsqueeze(0)
        told = None if self.replay is None else self.replay.at(rows.tokens[here])
        if self.plan.dense:
            whole = {} if self.pictures is None else self.pictures.untouched(rows.tokens)
            out = self.body(input_ids=ids, use_cache=False, **whole)
        else:
            positions, given = on_device(depths[here], self.device).unsqueeze(0), dict[str, Any]()
            if self.pictures is not None:
                positions = self.pictures.position_ids(rows.tokens[here], positions)
                given, taken = self.pictures.take(rows.tokens, shares)
            given |= self.indexers.begin(attention, self.index_cache, self.device)
            states = self._states(index, rows, only, shares)
            carried = {} if states is None else {STATES_ARGUMENT: states}
            looking_up: AbstractContextManager[None] = nullcontext()
            if self.vocabulary is not None and shares is not None:
                tokens = self._ids[rows.tokens]
                looking_up = self.vocabulary.asked_for([tokens[shares.run_by(r)] for r in range(shares.group.size)])
            with looking_up:
                out = self.body(
                    input_ids=ids, position_ids=positions, use_cache=False, tree_chunk=attention, **carried, **given
                )
            attention.refuse_other_calls(self.state_layers.attending, type(self.body).__name__)
            if states is not None:
                self.state_layers.refuse_unreached(states)
        if self.replay is not None:
            self.replay.refuse_unreached()
        scored = self._scored_rows(index, rows, shares)
        return _Run(rows, attention, out.last_hidden_state[0], scored, states, taken, told)

    def _states(
        self, index: int, rows: Layout, only: Sequence[int] | None, shares: RowShares | None
    ) -> PieceStates | None:
        """Of layers that carry states, those a run starts from: leaves with the values of the end it hangs below."""
        if not self.state_layers.expected:
            return None
        chunk = self.plan.chunks[index]
        starts: States = {}
        if chunk.parent >= 0:
            place = self._hung[chunk.parent][chunk.parent_piece]
            for key, end in self.open[chunk.parent].ends.items():
                start = end[place : place + 1].detach()
                starts[key] = start.requires_grad_(torch.is_grad_enabled() and start.is_floating_point())
        pieces = list(range(len(chunk.pieces)) if only is None else only)
        lengths = [chunk.pieces[piece].tokens for piece in pieces]
        places = {piece: place for place, piece in enumerate(pieces)}
        wanted = [places[piece] for piece in self._hung[index]]
        return PieceStates(PieceTree(lengths, rows.piece_parents), starts, wanted, self.scans, shares)

    def _scored_rows(self, index: int, rows: Layout, shares: RowShares | None, without: Sequence[int] = ()) -> _Scored:
        """Rows of a run whose hidden states predict scored tokens, and these tokens, but for those of some pieces."""
        chunk = self.plan.chunks[index]
        predicted = self._scored[self._scored_bounds[index] : self._scored_bounds[index + 1]]
        self._row_of[rows.tokens] = np.arange(len(rows.tokens))
        for piece in without:
            first = rows.piece_rows[piece]
            self._row_of[rows.tokens[first : first + chunk.pieces[piece].tokens]] = -1
        source = self._row_of[self.plan.tree.token_parent[predicted]]
        self._row_of[rows.tokens] = -1
        source, everyone = source[source >= 0], predicted[source >= 0]
        if shares is None:  # the others, if there are any, run the same rows
            copies, rank = (1, 0) if self._together is None else (self._together.size, self._together.rank)
            counts, at = [len(source)] * copies, slice(rank * len(source), (rank + 1) * len(source))
            own, everyone = source, np.tile(everyone, copies)
        else:
            owner = np.searchsorted(shares.bounds[1:], source, side="right")
            by_rank = np.argsort(owner, kind="stable")
            source, everyone = source[by_rank], everyone[by_rank]
            counts = np.bincount(owner, minlength=shares.group.size).tolist()
            before = sum(counts[: shares.group.rank])
            at = slice(before, before + counts[shares.group.rank])
            own = source[at] - shares.own.start
        here, tokens, everyones = (on_device(index, self.device) for index in (own, everyone[at], everyone))
        return _Scored(here, tokens, everyones, counts, at)

    def _provide(self, index: int, run: _Run, only: Sequence[int] | None) -> None:
        """Opens a chunk, with a run's keys and values for the pushes that follow."""
        pieces = range(len(self.plan.chunks[index].pieces)) if only is None else only
        first_rows = dict(zip(pieces, run.layout.piece_rows, strict=True))
        ends = run.states.ends if run.states is not None else {}
        self.open[index] = _Open(first_rows, run.attention.keys_values, run.attention.index_keys, ends)

    def _score(self, index: int, run: _Run, known: Sequence[int] = ()) -> None:
        """Values of the scored tokens that a run's rows predict, but for those that the rows of some pieces do."""
        if self.with_grads and self.loss_fn is None:
            return  # gradients are given: nobody asks for values
        scored = self._scored_rows(index, run.layout, run.attention.shares, known) if known else run.scored
        if not len(scored.everyone):
            return
        keep = self.with_grads and not self.plan.chunks[index].anchors  # with none below, backward is the next step
        columns = torch.zeros(len(self.want), len(scored.everyone), dtype=self.dtype, device=self.device)
        by_name = dict(zip(sorted(self.want), columns))
        for asked in self._asked(run, scored, self.want):
            outputs, run.kept = self.heads.forward(*asked.rows, asked.names, keep, asked.soft)
            for name, values in outputs.items():
                by_name[name][asked.at] = values
        if self._together is not None:  # of one rank's number and zeros, or of terms; the same bits on every rank
            self._together.sum_(columns)
        for name, values in by_name.items():
            self.values[name][scored.everyone] = values

    def _asked(self, run: _Run, scored: _Scored, names: Set[str]) -> Iterator[_Asked]:
        """What the heads compute of a run: of this rank's own rows everything; of a vocabulary in parts, after that,
        the terms of all ranks' rows."""
        # Detached: losses are taken of leaves (`_losses`), and backward computes logits again block by block.
        hidden, vocabulary = run.hidden.detach()[scored.rows], self.heads.vocabulary
        own = frozenset(names) if vocabulary is None else frozenset(names) & {"values"}
        if own and len(hidden):
            predicted = scored.predicted
            rows = hidden, self.tokens[predicted], self._temperature(predicted)
            yield _Asked(own, rows, predicted, scored.at, self.soft and self.soft[predicted])
        if vocabulary is not None and names - own:
            predicted = scored.everyone
            rows = vocabulary.to_everyone(hidden, scored.counts), self.tokens[predicted], self._temperature(predicted)
            yield _Asked(frozenset(names) - own, rows, predicted, slice(None), self.soft and self.soft[predicted])

    def _losses(self, group: int) -> None:
        """Losses of the sequences that end in a chunk; their gradients are added to the tokens' on their path."""
        sequences = self._ending[group]
        if not sequences or self.loss_fn is None:
            return
        gather, scored, bounds = self._gather_index(sequences)
        leaves = {name: (x[gather] * scored).requires_grad_() for name, x in self.values.items()}
        loss = self.loss_fn(FlatOutputs(bounds, **leaves), torch.tensor(sequences))
        check_scalar(loss, "")
        self.total += loss.detach().to(self.total)
        if loss.requires_grad:
            loss.backward()
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                if name not in self.grads:
                    self.grads[name] = self._per_token()
                # A token shared by sequences receives the sum: this is where shared prefixes earn their gradient.
                self.grads[name].index_add_(0, gather, leaf.grad * scored)

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
        tree, scored = self.plan.tree, self.plan.tree.scored_tokens
        chunk = self.plan.token_chunk[tree.token_parent[scored]]
        order = np.argsort(chunk, kind="stable")
        self._scored: Ints = scored[order]
        self._scored_bounds = np.searchsorted(chunk[order], np.arange(len(self.plan.chunks) + 1))

    def _temperature(self, predicted: Tensor) -> Tensor | float:
        return self.temperature[predicted] if isinstance(self.temperature, Tensor) else self.temperature

    def _per_token(self) -> Tensor:
        return torch.zeros(self.plan.tree.num_tokens, dtype=self.dtype, device=self.device)


def _accumulate_in_float32(*modules: nn.Module | None) -> None:
    """Low-precision parameters accumulate their gradients in float32 (bf16 sums over chunks lose whole percents)."""
    for module in modules:
        for parameter in module.parameters() if module is not None else ():
            wanted = torch.promote_types(torch.float32, parameter.dtype)
            if parameter.requires_grad and parameter.grad is None and parameter.dtype != wanted:
                parameter.grad_dtype = wanted


def _group(labels: Ints, count: int) -> list[list[int]]:
    """Positions of each label 0..count-1."""
    groups: list[list[int]] = [[] for _ in range(count)]
    for position, label in enumerate(labels.tolist()):
        groups[label].append(position)
    return groups
