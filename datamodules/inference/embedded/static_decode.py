"""Decode steps whose shapes come in few sizes and whose numbers the host never reads: what a CUDA graph can hold.

A step of a 0.6B model is some 1,500 kernels, for weights that an H100 reads in 0.4 ms; a host takes 6.5 ms for 28 such
layers when they have next to nothing to compute (on a CPU, without launches). All that a step reads is where it was in
the step before: tokens and positions in one tensor, keys and states in their slots, weights in theirs (an update copies
into them). So a step of `rows` requests that reads `keys` tokens of each is the same work whatever the requests are,
captured once and replayed; rows beyond the running requests compute token 0 at position 0, in rows of the grid that
nobody has. Tokens are drawn outside, by keys of the requests.

Sizes: four a doubling, rows in multiples of 8 and keys of 64. For 64 to 256 replies of geometric lengths (means 120 to
3,000) these are 19 to 44 graphs, and 9 to 11% more rows and 19 to 26% more keys are computed. Powers of two are 9 to 16
graphs and 84 to 97% more keys, eight a doubling up to 90 graphs and 11 to 23%.

Promises: a step is `eager`'s but for the order of sums. A model whose forward waits for the device (experts one by one,
rotary frequencies that grow) decodes without, and the reason is said. Without a CUDA device nothing is captured: the
padded step runs as it is. On one, the first two replays of every graph are compared with the step run directly, and
that with `eager`; a difference, or a capture that fails, ends replays for good, with one line in the log, and requests
under way are computed anew. While a graph is captured, a trainer in the same process that runs out of the GPU's memory
gets none back that torch only caches, and what draws from that GPU's own random generator, in any thread, fails, as
torch has it: draw from a `torch.Generator` there.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from app.tree import PieceStates, on_device
from datamodules.inference.embedded.kv_slots import CachedStep, KVSlots, StaticStep
from datamodules.inference.embedded.state_slots import StateSlots

_log = logging.getLogger(__name__)

_MOST_GRAPHS = 128
_COMPARED = 2  # replays of a graph: a number of the first that was captured as a constant is wrong in the second
_REPLAYED = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Most that a replay may be off the same step run directly, as `differences`: what another stream's choice of kernels
may do; in 16 bits 0.05. Logits of other inputs are off by 1 and more."""
_PADDED = {torch.float64: 1e-9, torch.float32: 1e-2}
"""The same of a padded step and an eager one, whose sums are in another order (TF32's, too); in 16 bits 0.1, of the
median request, for there another expert may be chosen."""


def padded(n: int, multiple: int) -> int:
    """The least size that holds `n`: multiples of `multiple`, and no more than four between powers of two."""
    step = max(multiple, 1 << max(0, (n - 1).bit_length() - 3))
    return -(-n // step) * step


def padded_rows(count: int) -> int:
    """Rows of a step of `count` requests: products of few rows cost what those of one cost."""
    return 1 << (count - 1).bit_length() if count <= 8 else padded(count, 8)


def differences(found: Tensor, expected: Tensor) -> Tensor:
    """[n]: how far logits [n, V] are from those expected, over the spread of those."""
    dtype = torch.promote_types(torch.float32, expected.dtype)
    a, b = (x.to(dtype) - x.to(dtype).mean(-1, keepdim=True) for x in (found, expected))
    return (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(torch.finfo(dtype).tiny)


class Run(Protocol):
    """The model: logits [n, V] of the n tokens [1, n] of a step, at positions [1, n] or [3, 1, n]."""

    def __call__(self, step: CachedStep, tokens: Tensor, positions: Tensor, states: PieceStates | None) -> Tensor: ...


class StaticDecoder:
    """Decode steps of one model.

    Args:
        slots, states: of the running requests.
        run: see `Run`.
        eager: a decode step as it is, of positions and tokens of rows 0, 1, ...: logits [n, V].
        most: requests running at a time.
        places: positions int64 [3, n] of these tokens in a model that counts pictures; None: those in the grid.

    Attributes:
        refused: why steps are `eager`'s; "" while they are not.
        spoiled: a wrong replay may have written keys anywhere; whoever owns them forgets them, and says so here.
        capture: makes what replays a function that was run once; None: it is called each time.
        captured: graphs made so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: KVSlots,
        states: StateSlots,
        run: Run,
        eager: Callable[[list[int], list[int]], Tensor],
        most: int,
        places: Callable[[list[int]], np.ndarray] | None = None,
    ) -> None:
        self.model, self.slots, self.states = model, slots, states
        self.device = model.device
        self.run, self.eager, self.places = run, eager, places
        self.capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None
        if self.device.type == "cuda":
            self.capture = Capture(self.device)
        self.captured, self.spoiled = 0, False
        self._graphs: OrderedDict[tuple[int, int, int], Callable[[], None]] = OrderedDict()
        self._compared: dict[tuple[int, int, int], int] = {}
        # Tokens, positions in the grid, and positions for the model.
        self._inputs = torch.zeros(2 if places is None else 5, padded_rows(most), dtype=torch.int64, device=self.device)
        self._logits = torch.empty(0)
        self._weights = self._addresses()
        self._moved = states.moved
        self.refused = self._probe()

    def __call__(self, starts: list[int], tokens: list[int]) -> Tensor:
        """Logits [n, V] after one next token for each of rows 0 .. n - 1, good until the next call."""
        if self.refused:
            return self.eager(starts, tokens)
        count = len(starts)
        rows = min(padded_rows(count), self.slots.capacity // self.slots.width)
        keys = min(padded(max(starts) + 1, 64), self.slots.width)
        self.states.reserve(rows)
        if self._moved != self.states.moved:
            self._forget()
        self._fill(starts, tokens, rows)
        if self.capture is None:
            self._step(rows, keys)
            return self._logits[:count]
        key = (rows, keys, self.slots.width)
        if self._compared.get(key, 0) < _COMPARED:
            return self._first(key, starts, tokens)
        self._graphs.move_to_end(key)
        self._graphs[key]()
        return self._logits[:count]

    def weights_written(self) -> None:
        """To be called after weights changed: those that lie elsewhere since are captured anew."""
        addresses = self._addresses()
        if addresses != self._weights:
            self._weights = addresses
            self._forget()

    # ------------------------------------------------------------------------------------------------ one step

    def _fill(self, starts: list[int], tokens: list[int], rows: int) -> None:
        inputs = np.zeros((len(self._inputs), rows), np.int64)
        inputs[:2, : len(starts)] = tokens, starts
        if self.places is not None:
            inputs[2:, : len(starts)] = self.places(starts)
        self._inputs[:, :rows].copy_(on_device(inputs, self.device))

    def _step(self, rows: int, keys: int) -> None:
        """From the inputs to the logits: all that is captured."""
        tokens, positions = self._inputs[:2, :rows]
        places = positions[None] if self.places is None else self._inputs[2:, :rows].unsqueeze(1)
        states = self.states.begin_static(positions)
        logits = self.run(StaticStep(positions, keys, self.slots.width), tokens[None], places, states)
        if states is not None:
            self.states.end_static(states)
        self._logits[:rows].copy_(logits)

    def _first(self, key: tuple[int, int, int], starts: list[int], tokens: list[int]) -> Tensor:
        """An eager step beside the captured one."""
        rows, keys, count = *key[:2], len(starts)
        where = f"of {rows} requests and {keys} keys"
        try:
            before = self.states.kept(rows)
        except torch.OutOfMemoryError as error:
            self._give_up(f"the states {where} cannot be kept for a comparison: {error!r}")
            return self.eager(starts, tokens)
        expected = self.eager(starts, tokens)
        try:
            after = self.states.kept(rows)
        except torch.OutOfMemoryError as error:
            self._give_up(f"the states {where} cannot be kept for a comparison: {error!r}")
            return expected
        try:
            self.states.put(before)
            self._step(rows, keys)
            direct = self._logits[:count].clone()
            if key not in self._graphs:
                assert self.capture is not None
                if len(self._graphs) == _MOST_GRAPHS:
                    self._compared.pop(self._graphs.popitem(last=False)[0], None)
                self.states.put(before)
                self._graphs[key] = self.capture(lambda: self._step(rows, keys))
                self.captured += 1
            self.states.put(before)
            self._logits.zero_()
            self._graphs[key]()
            self._compared[key] = self._compared.get(key, 0) + 1
            wrong = _wrong(self._logits[:count], direct, expected)
            if wrong:
                self._give_up(f"the step {where}: {wrong}")
        except Exception as error:  # memory, a driver's, or what a model's forward may not do in a capture
            self._give_up(f"a step {where} cannot be captured: {error.__context__ or error!r}")
        self.states.put(after)
        return expected

    def _give_up(self, reason: str) -> None:
        self.refused, self.spoiled = reason, True
        self._forget()
        _log.warning("EmbeddedEngine.cuda_graphs: decoding goes on without CUDA graphs: %s", reason)

    def _forget(self) -> None:
        self._graphs.clear()
        self._compared.clear()
        self._moved = self.states.moved

    def _addresses(self) -> list[int]:
        """Where the weights lie: a graph reads them there."""
        return [x.data_ptr() for x in chain(self.model.parameters(), self.model.buffers())]

    # ------------------------------------------------------------------------------------------------ beforehand

    @torch.inference_mode()
    def _probe(self) -> str:
        """Why no step of this model can be captured; "" where nothing is known against it. Makes the slots' buffers."""
        width = min(64, self.slots.capacity)
        try:
            self.slots.resize(width, rows=0, length=0)
            first = self.eager([0], [0])
            self._logits = first.new_zeros(self._inputs.shape[1], first.shape[1])
            last = min(1, width - 1)
            before = self.states.kept(1)
            expected = self.eager([last], [0])
            self.states.put(before)
            self._fill([last], [0], 1)
            self._step(1, width)
            wrong = _wrong(self._logits[:1], self._logits[:1], expected)
            with _waits(self.device) as waits:
                self._step(1, width)
        except Exception as error:  # a step as it is fails, too, and its error is the one to see
            return f"its first step failed: {error!r}"
        if waits:
            return f"the forward of {type(self.model).__name__} waits for the device ({', '.join(sorted(waits))})"
        return wrong


def _wrong(replayed: Tensor, direct: Tensor, expected: Tensor) -> str:
    """What is wrong with logits [n, V] of a replay, or of the padded step, or ""."""
    dtype = expected.dtype
    off = float(differences(replayed, direct).max())
    if not off <= _REPLAYED.get(dtype, 0.05):  # NaN, too
        return f"its replay is off by {off:.1e} of the spread of its logits"
    far = differences(direct, expected)
    # In 16 bits single rows may be far off by rounding, but hardly a quarter of them, nor as far as another's logits.
    off = float(far.max() if dtype in _PADDED else far.quantile(0.75, interpolation="higher"))
    if not off <= _PADDED.get(dtype, 0.1) or not float(far.max()) < _ANOTHERS:
        return f"padded, it is off by {off:.1e} of the spread of its logits"
    return ""


_ANOTHERS = 0.7
"""Logits of another request are about 1.4 of their spread away."""


class Capture:
    """Captures functions on a device, one after the other, into graphs that share their memory."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._device, self._stream, self._pool = device, torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """`function` has no result, and writes only where it may be written again. Returns what replays it on the
        stream that is current then."""
        with torch.cuda.device(self._device):
            now = torch.cuda.current_stream()
            if not self._graphs:  # a pool whose last graph is gone takes no other
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            self._stream.wait_stream(now)
            try:
                with torch.cuda.stream(self._stream):
                    for _ in range(2):  # what libraries allocate and choose at the first calls on a stream
                        function()
                    self._record(graph, function)
            finally:
                now.wait_stream(self._stream)
        self._graphs.add(graph)
        replay: Callable[[], None] = graph.replay
        return replay

    def _record(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        """Without what `torch.cuda.graph` does first, to the whole device: the trainer goes on meanwhile, and
        ("thread_local") what its threads call is no part of this."""
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            function()
        finally:
            try:
                graph.capture_end()
            except BaseException:
                # It raises before the allocator hears of the end, and would then never let go of memory again.
                with suppress(Exception):
                    torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                raise


@contextmanager
def _waits(device: torch.device) -> Iterator[set[str]]:
    """Gives the names of operators whose results the host waits for, of what runs inside."""
    with _Waits() as mode, warnings.catch_warnings(record=True) as heard:
        if device.type == "cuda":  # what operators do inside
            warnings.simplefilter("always")
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield mode.found
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode(before)
    mode.found |= {f"{one.filename}:{one.lineno}" for one in heard if "called a synchronizing" in str(one.message)}


class _Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        waits = not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags)
        if name.startswith("aten.index"):  # those of masks only
            masks = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
            waits = any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in masks)
        if waits or name == "aten.is_nonzero":
            self.found.add(name)
        return func(*args, **(kwargs or {}))
