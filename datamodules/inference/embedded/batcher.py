"""Continuous batching over a transformers model: which request runs when, one forward at a time.

Requests wait in order, get a row of the key-value grid when there is room, have their prompts computed (equal
prompts once, the samples of a group share it), then decode together; rows are free again as requests end. Single-
threaded and without clocks: the same calls in the same order give the same tokens. Promises: memory is bounded by
`kv_cache_tokens` and `max_batch_tokens` (and one state a running request, for models whose layers carry one); after
`flush()` no key, value or state computed before it is ever read, nor features of a tower whose weights have moved;
prompts share a prefill only where their pictures are equal, too.

transformers' own `ContinuousBatchingManager` (5.23) was measured first. Its samples are right, but it draws them from
the process-wide random generator, which it seeds at its start; greedy and sampled requests cannot run side by side;
and without flash-attn each token attends, masked, to the keys of all requests: 2.5 times the CPU time of this file for
16 x 8 short arithmetic prompts, 8 times for 8 x 8 prompts of 200 tokens.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.tree import STATES_ARGUMENT, PieceStates, Routers, Tower
from datamodules.inference.embedded.entry_slots import EntrySlots
from datamodules.inference.embedded.images import PromptImages, featured, placed, placed_next, runs_of
from datamodules.inference.embedded.index_slots import IndexSlots
from datamodules.inference.embedded.kv_slots import CachedStep, KVSlots, PromptStep, any_length
from datamodules.inference.embedded.sampling import sample, shaped, uniforms
from datamodules.inference.embedded.state_slots import StateSlots
from datamodules.inference.embedded.static_decode import StaticDecoder, padded
from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse

_WIDTH_STEP = 16  # rows of the grid are a multiple of it, so that small differences in length do not lay it out anew


class Sequence:
    """One request on its way: `tokens` is prompt + output; the first `computed` of them have keys and values."""

    __slots__ = (
        "cancelled",
        "computed",
        "experts",
        "failure",
        "finish_reason",
        "images",
        "key",
        "logprobs",
        "recorded",
        "request",
        "share",
        "stops",
        "tokens",
        "versions",
    )

    def __init__(self, request: GenerationRequest, key: int) -> None:
        self.request = request
        self.key = key
        self.tokens = list(request.tokens)
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason = ""
        self.failure: GenerationError | None = None  # of this request alone
        self.stops = request.stops()
        self.cancelled = False
        self.computed = 0
        self.experts: list[Tensor] = []  # [n, layers, k] of each forward, of the first `recorded` tokens
        self.recorded = 0
        self.images = PromptImages(request)
        self.share = self.identity()

    def identity(self) -> tuple[int | bytes, ...]:
        """Its tokens, where a picture's are the picture's key: requests of which it is equal share their prefill."""
        return self.images.identity(self.tokens)

    @property
    def limit(self) -> int:
        """Most tokens it can have in the grid."""
        return len(self.request.tokens) + self.request.max_new_tokens

    def append(self, token: int, logprob: float, version: int) -> None:
        """Takes a token that was drawn for it; `finish_reason` is set with the last one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        try:
            found = self.stops is not None and self.stops.end([token]) is not None
            if found or token in self.request.stop_token_ids:
                self.finish_reason = "stop"
            elif len(self.logprobs) == self.request.max_new_tokens:
                self.finish_reason = "length"
            self.request.tell([token], [logprob])
        except GenerationError as error:
            self.failure, self.finish_reason = error, "abort"

    def record(self, start: int, experts: Tensor) -> None:
        """The experts [n, layers, k] of its tokens from `start` on, of which those that are known stay: a token is read
        again after an update of the weights, and was answered before it."""
        known = self.recorded - start
        if known < len(experts):
            self.experts.append(experts[known:])
            self.recorded = start + len(experts)

    def response(self) -> GenerationResponse:
        wanted = self.request.experts_from
        return GenerationResponse(
            tokens=self.tokens[len(self.request.tokens) :],
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=self.finish_reason,
            experts=torch.cat(self.experts)[wanted:] if self.experts and wanted is not None else None,
        )


class Batcher:
    """Scheduler and model runner of `EmbeddedEngine`.

    Args:
        model: a causal LM whose attention implementation is `kv_slots.ATTENTION`, in eval mode.
        image_processor: transformers', for requests with pictures.
        kv_cache_tokens: tokens of the key-value grid, rows x longest request.
        max_batch_tokens: most prompt tokens, padding included, in one forward; longer prompts go in chunks.
        max_concurrent: most requests running at a time.
        static: decode steps as `StaticDecoder` has them.
        routers: the model's, whose choices are recorded; None records none.
        ahead: layers in which placeholders of a picture, of which no forward has a part, see each other.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv_cache_tokens: int,
        max_batch_tokens: int,
        max_concurrent: int,
        image_processor: Any | None = None,
        static: bool = False,
        routers: Routers | None = None,
        ahead: frozenset[int] = frozenset(),
    ) -> None:
        self.model = model
        self.routers = routers
        self.tower = None if image_processor is None else Tower(model, image_processor)
        self.device = model.device
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.slots = KVSlots(kv_cache_tokens, ahead)
        self.states = StateSlots(model)
        self.indexed = IndexSlots(model, self.slots)
        self.entries = EntrySlots(self.states.layers.compressors, self.slots)
        self.max_batch_tokens = max_batch_tokens
        self.max_concurrent = max_concurrent
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # position in the list = row of the grid
        self.static: StaticDecoder | None = None
        self.dynamic = "" if static else "not asked for"  # why `static` is None
        if static:
            most = max(1, min(max_concurrent, kv_cache_tokens // _WIDTH_STEP))
            counted = self.tower is not None and self.tower.positions is not None
            self.running = [Sequence(GenerationRequest([0, 0], 1), 0)]  # stands for any while steps are tried
            decoder = StaticDecoder(
                model, self.slots, self.states, self._run, self._next, most, self._places if counted else None
            )
            self.running = []
            self.static, self.dynamic = (None, decoder.refused) if decoder.refused else (decoder, "")

    @property
    def decoding(self) -> str:
        """How decode steps run, and why not as graphs."""
        refused = self.dynamic if self.static is None else self.static.refused
        if self.static is None or refused:
            return f"as they are: {refused}"
        return "padded" if self.static.capture is None else f"{self.static.captured} CUDA graphs"

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def flush(self) -> None:
        """Forgets all keys and values, for new weights: running requests wait again, in front, to compute prompt +
        output anew."""
        if self.static is not None:
            self.static.weights_written()
        for sequence in self.running:
            sequence.computed = 0
            sequence.share = sequence.identity()
        self.waiting.extendleft(reversed(self.running))
        self.running = []

    @torch.inference_mode()
    def step(self, version: int) -> list[Sequence]:
        """One forward, its tokens belonging to `version`; returns the requests that ended, in the order of their rows.

        Raises FloatingPointError when the weights give log-probabilities that are not finite.
        """
        self._drop_cancelled()
        self._admit()
        if not self.running:
            return []
        fresh = [row for row, sequence in enumerate(self.running) if sequence.computed < len(sequence.tokens) - 1]
        if fresh:
            rows, logits = self._prompts(fresh)
        else:
            rows, logits = list(range(len(self.running))), self._decode()
        if not rows:
            return []
        ended = self._append(rows, logits, version)
        if self.static is not None and self.static.spoiled:
            self.static.spoiled = False
            self.flush()
        return ended

    # ------------------------------------------------------------------------------------------------ scheduling

    def _drop_cancelled(self) -> None:
        if any(sequence.cancelled for sequence in self.waiting):
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.cancelled)
        self._free([row for row, sequence in enumerate(self.running) if sequence.cancelled])

    def _admit(self) -> None:
        """Gives rows to waiting requests, first come first served, while rows x longest request fit the grid."""
        count, longest = len(self.running), max((s.limit for s in self.running), default=0)
        admitted = 0
        for sequence in self.waiting:
            longest = max(longest, sequence.limit)
            width = min(self._width(longest), self.slots.capacity)
            if count == self.max_concurrent or (count + 1) * width > self.slots.capacity:
                break
            count, admitted, fits = count + 1, admitted + 1, width
        if not admitted:
            return
        if not fits <= self.slots.width <= self.slots.capacity // count:
            held = max((s.computed for s in self.running), default=0)
            self.slots.resize(fits, rows=len(self.running), length=held)
        self.running.extend(self.waiting.popleft() for _ in range(admitted))

    def _width(self, longest: int) -> int:
        """Tokens of a row of the grid; few sizes where each has decode steps of its own."""
        static = self.static is not None and not self.static.refused
        return padded(longest, _WIDTH_STEP) if static else -(-longest // _WIDTH_STEP) * _WIDTH_STEP

    def _free(self, rows: list[int]) -> None:
        """Takes requests out; the last rows move into the holes so that rows stay dense."""
        if not rows:
            return
        gone, kept = set(rows), len(self.running) - len(rows)
        movers = [row for row in range(kept, len(self.running)) if row not in gone]
        holes = [row for row in rows if row < kept]
        if movers:
            self.slots.copy_rows(movers, holes, max(self.running[row].computed for row in movers))
            self.states.copy_rows(movers, holes)
        for row, hole in zip(movers, holes):
            self.running[hole] = self.running[row]
        del self.running[kept:]

    # ------------------------------------------------------------------------------------------------ forwards

    def _prompts(self, fresh: list[int]) -> tuple[list[int], Tensor]:
        """Computes prompts of some rows of `fresh`; returns the rows that are complete and their logits [n, V]."""
        groups: dict[tuple[int | bytes, ...], list[int]] = {}
        for row in fresh:
            groups.setdefault(self.running[row].share, []).append(row)
        leaders = [max(rows, key=lambda row: self.running[row].computed) for rows in groups.values()]
        first = self.running[leaders[0]]
        if first.computed or len(first.tokens) > self.max_batch_tokens:
            return self._chunk(leaders[0], groups[first.share])
        chosen: list[int] = []
        longest = 0
        for row in leaders:
            longest = max(longest, len(self.running[row].tokens))
            if self.running[row].computed or (len(chosen) + 1) * longest > self.max_batch_tokens:
                break
            chosen.append(row)
        sequences = [self.running[row] for row in chosen]
        lengths = [len(sequence.tokens) for sequence in sequences]
        step = PromptStep(chosen, lengths, self.slots.width, self.device)
        tokens = [token for sequence in sequences for token in sequence.tokens]
        logits = self._forward(step, chosen, [0] * len(chosen), lengths, tokens, torch.tensor(lengths).cumsum(0) - 1)
        rows, pick = [], []
        for at, (row, sequence) in enumerate(zip(chosen, sequences)):
            rows += self._share(row, groups[sequence.share])
            pick += [at] * len(groups[sequence.share])
        return rows, logits[torch.tensor(pick, device=logits.device)]

    def _chunk(self, row: int, group: list[int]) -> tuple[list[int], Tensor]:
        """The next `max_batch_tokens` tokens of one long prompt."""
        sequence = self.running[row]
        end = min(sequence.computed + self.max_batch_tokens, len(sequence.tokens))
        end = sequence.images.uncut(end) if self.slots.ahead else end
        tokens = sequence.tokens[sequence.computed : end]
        step = CachedStep(row, [sequence.computed], len(tokens), self.slots.width, self.device)
        begin = [sequence.computed]
        logits = self._forward(step, [row], begin, [len(tokens)], tokens, torch.tensor([len(tokens) - 1]))
        sequence.computed = end
        if end < len(sequence.tokens):
            return [], logits
        return self._share(row, group), logits.expand(len(group), -1)

    def _share(self, row: int, group: list[int]) -> list[int]:
        """Hands the computed prompt of `row` to the others of its group; returns the group."""
        others = [other for other in group if other != row]
        length = len(self.running[row].tokens)
        if others:
            self.slots.copy_rows([row] * len(others), others, length)
            self.states.copy_rows([row] * len(others), others)
        for member in group:
            self.running[member].computed = length
            if self.routers is not None and member != row:
                self.running[member].record(0, torch.cat(self.running[row].experts)[:length])
        return group

    def _decode(self) -> Tensor:
        starts, last = [s.computed for s in self.running], [s.tokens[-1] for s in self.running]
        shown = any(s.computed < len(s.images.owner) for s in self.running)  # prompts of one token, a picture's
        logits = self._next(starts, last) if self.static is None or shown else self.static(starts, last)
        for sequence in self.running:
            sequence.computed += 1
        return logits

    def _next(self, starts: list[int], tokens: list[int]) -> Tensor:
        """Logits [n, V] after the next token of each of rows 0 .. n - 1, of which `starts` are computed."""
        step = CachedStep(0, starts, 1, self.slots.width, self.device)
        return self._forward(step, list(range(len(starts))), starts, [1] * len(starts), tokens, None)

    def _forward(
        self,
        step: PromptStep | CachedStep,
        rows: list[int],
        starts: list[int],
        lengths: list[int],
        tokens: list[int],
        keep: Tensor | None,
    ) -> Tensor:
        """Logits [n, V] at the packed positions `keep` (int64 [n], all when None), of so many next tokens a row behind
        the `starts` that are computed."""
        positions, pictures = step.positions.unsqueeze(0), dict[str, Any]()
        if self.tower is not None:
            spans = self._spans(rows, starts)
            positions = placed(self.tower, spans, lengths, positions)
            pictures = featured(self.tower, spans, lengths)
            if pictures and self.slots.ahead and keep is not None:  # a next token is alone
                step.show(runs_of(spans, lengths))
        states = self.states.begin(rows, starts, lengths)
        given = torch.tensor([tokens], device=self.device)
        chosen: list[Tensor] = []  # [T, k] of each layer
        with nullcontext() if self.routers is None else self.routers.seen_by(chosen):
            logits = self._run(step, given, positions, states, keep, **pictures)
        if self.routers is not None:
            experts = torch.stack(chosen, 1).to("cpu", self.routers.dtype)
            for row, start, own in zip(rows, starts, experts.split(lengths)):
                self.running[row].record(start, own)
        if states is not None:
            self.states.end(states, rows)
        return logits

    def _spans(self, rows: Iterable[int], starts: list[int]) -> list[tuple[PromptImages, int]]:
        return [(self.running[row].images, start) for row, start in zip(rows, starts, strict=True)]

    def _places(self, starts: list[int]) -> np.ndarray:
        """int64 [3, n]: positions of the next token of each of rows 0 .. n - 1 in a model that counts pictures."""
        assert self.tower is not None
        return placed_next(self.tower, self._spans(range(len(starts)), starts), [1] * len(starts))

    def _run(
        self,
        step: PromptStep | CachedStep,
        tokens: Tensor,
        positions: Tensor,
        states: PieceStates | None,
        keep: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Logits [n, V] of the packed tokens [1, T] at `keep` (int64 [n], all when None), which have positions [1, T],
        or [3, 1, T] in a model that counts pictures."""
        self.slots.step = step
        kept = None if keep is None else keep.to(self.device)
        if self._keeps:
            more["logits_to_keep"] = 0 if kept is None else kept
        entries = self.entries.made()
        with self.states.layers.noted(), any_length(self.device), entries, self.indexed.chosen(tokens) as masks:
            output = self.model(
                input_ids=tokens,
                position_ids=positions,
                use_cache=False,
                slots=self.slots,
                **more,
                **masks,
                **({} if states is None else {STATES_ARGUMENT: states}),
            )
        layers = len(self.states.layers.attending)
        if self.slots.layers_written != layers:  # its tokens would have seen those of other requests
            raise RuntimeError(
                f"{type(self.model).__name__} sent {self.slots.layers_written} of {layers} layers through transformers'"
                " attention interface: the embedded engine cannot serve it, use an SGLang server"
            )
        logits: Tensor = output.logits[0]
        return logits if kept is None or self._keeps else logits[kept]

    # ------------------------------------------------------------------------------------------------ results

    def _append(self, rows: list[int], logits: Tensor, version: int) -> list[Sequence]:
        sequences = [self.running[row] for row in rows]
        temperatures = torch.tensor([s.request.temperature for s in sequences], dtype=torch.float32)
        uniform = uniforms([s.key for s in sequences], [len(s.logprobs) for s in sequences])
        drawn_from = self._shaped(sequences, logits)
        drawn, drawn_logprobs = sample(logits, temperatures.to(self.device), uniform.to(self.device), drawn_from)
        tokens, logprobs = drawn.tolist(), drawn_logprobs.tolist()
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(f"the weights of version {version} give log-probabilities that are not finite")
        ended = []
        for row, sequence, token, logprob in zip(rows, sequences, tokens, logprobs):
            sequence.append(token, logprob, version)
            if sequence.finish_reason:
                ended.append(row)
        done = [self.running[row] for row in ended]
        self._free(sorted(ended))
        return done

    def _shaped(self, sequences: list[Sequence], logits: Tensor) -> Tensor | None:
        """The logits [n, V] to draw from; None where no request shapes its own."""
        if all(sequence.request.shaping is None for sequence in sequences):
            return None
        result = logits.float().clone()
        for at, sequence in enumerate(sequences):
            request = sequence.request
            if request.shaping is not None:
                said = sequence.tokens[len(request.tokens) :]
                result[at] = shaped(logits[at], request.temperature, request.shaping, said)
        return result

    def drain(self) -> Iterable[Sequence]:
        """Removes and returns every request, running ones first."""
        everything = [*self.running, *self.waiting]
        self.running, self.waiting = [], deque()
        return everything
