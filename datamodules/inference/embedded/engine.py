"""`EmbeddedEngine`: generation inside the trainer's process, on transformers' own model code; no server to start.

A thread of its own runs a `Batcher` on its own copy of the model; callers await in whatever event loop they run.
Promises: the trainer's model, its attention implementation and all random generators stay as they are; the three
lists of a response always fit together, each token with the version whose weights (and keys) produced it; a failure
in the thread reaches every pending request as `GenerationError`; each wait has a deadline and names what it waits for.

    engine = EmbeddedEngine(kv_cache_tokens=16384)
    engine.start(model, version=0, seed=1)
    response = await engine.generate(GenerationRequest([1, 2, 3], max_new_tokens=8))
    engine.update_weights(WeightUpdate(version=1, state_dict=model.state_dict()))
    engine.close()
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from app import checks
from app.text import reason
from app.tree import Routers, Tower, most_tokens
from datamodules.conversations.image_processor import ImageProcessor
from datamodules.inference.clock import PausedClock
from datamodules.inference.embedded.batcher import Batcher, Sequence
from datamodules.inference.embedded.images import PromptImages, unseeing
from datamodules.inference.embedded.sampling import request_key
from datamodules.inference.embedded.weights import copy_of, fill, matched, read
from datamodules.inference.export import WeightParts
from datamodules.inference.protocol import (
    SHAPINGS,
    GenerationError,
    GenerationRequest,
    GenerationResponse,
    InferenceEngine,
    WeightUpdate,
)

_log = logging.getLogger(__name__)


class _Job:
    """A request, the sequence that serves it and the future its caller awaits."""

    def __init__(self, sequence: Sequence, loop: asyncio.AbstractEventLoop) -> None:
        self.sequence = sequence
        self.loop = loop
        self.future: asyncio.Future[GenerationResponse] = loop.create_future()


def _try(model: PreTrainedModel, processor: Any) -> None:
    """Runs a prompt and a next token through a cache of their own. Raises GenerationError: it cannot."""
    batcher = Batcher(model, 16, 16, 1, processor)
    batcher.waiting.append(Sequence(GenerationRequest([0, 0], max_new_tokens=2), request_key(0)))
    try:
        while batcher.busy:
            batcher.step(0)
    except FloatingPointError:  # a matter of the weights
        pass
    except Exception as error:
        raise GenerationError(
            f"EmbeddedEngine.start: {type(model).__name__} cannot run in it: {reason(error, 500)}; generate with SGLang"
            " servers instead (data.engine: SGLangEngine)"
        ) from error


def _routers(model: PreTrainedModel) -> Routers:
    try:
        return Routers.of(model)
    except ValueError as error:
        raise GenerationError(f"EmbeddedEngine.record_experts: {error}") from error


class EmbeddedEngine(InferenceEngine):
    """An `InferenceEngine` in this process (see there for its methods). A policy with adapters is merged.

    It holds a whole copy of the model on its device, beside what the trainer holds there; where that is more than is
    free, it is refused. New weights of a policy in shards come a layer at a time, while nothing is generated.

    Args:
        kv_cache_tokens: size of the key-value cache in tokens, (running requests) x (longest of them): the bound on
            memory, 2 * layers * key-value heads * head size * itemsize bytes each; also a bound on one request. Layers
            that carry a state hold one for each running request instead, `max_concurrent` at most, whatever its
            length: `health()` gives both, as `kv_cache_bytes` and `state_bytes`.
        max_batch_tokens: most prompt tokens in one forward pass; longer prompts are computed in chunks of it.
        max_concurrent: most requests decoding together; others wait in order of arrival.
        request_timeout_s: seconds a request may take, time spent paused not counted.
        control_timeout_s: seconds that pause, update and close wait for the forward pass in progress.
        dtype: of the engine's copy ("float32", "bfloat16", "float16"); None takes the model's.
        device: of the engine's copy ("cpu", "cuda:1", ...); None takes the model's.
        num_threads: CPU threads of one operation in the generation thread; None leaves torch's default. 1 is best for
            small models that generate beside a trainer on few cores.
        cuda_graphs: whether decode steps are captured as CUDA graphs, one for each of a few sizes of batch and context,
            and replayed, which spares the host a thousand launches a token; the first replays of each are compared with
            steps as they are. None: on CUDA devices, where the model allows it (else the reason is logged); true is an
            error where it does not. On a CPU, true runs the same padded steps uncaptured, for tests.
        record_experts: whether replies carry the experts that their tokens were sent to, which the trainer then sends
            them to as well (docs/algorithms.md). For models of experts; steps are decoded without CUDA graphs.
    """

    update_methods = ("memory", "disk")
    shapings = SHAPINGS

    def __init__(
        self,
        kv_cache_tokens: int = 32768,
        max_batch_tokens: int = 4096,
        max_concurrent: int = 256,
        request_timeout_s: float = 600.0,
        control_timeout_s: float = 60.0,
        dtype: str | None = None,
        device: str | None = None,
        num_threads: int | None = None,
        cuda_graphs: bool | None = None,
        record_experts: bool = False,
    ) -> None:
        positive = {
            "kv_cache_tokens": kv_cache_tokens,
            "max_batch_tokens": max_batch_tokens,
            "max_concurrent": max_concurrent,
            "request_timeout_s": request_timeout_s,
            "control_timeout_s": control_timeout_s,
            "num_threads": num_threads,
        }
        checks.positive({f"EmbeddedEngine.{name}": value for name, value in positive.items()})
        if dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(
                f"EmbeddedEngine.dtype: '{dtype}', must be float32, bfloat16, float16 or null (the model's)"
            )
        self.kv_cache_tokens = kv_cache_tokens
        self.max_batch_tokens = max_batch_tokens
        self.max_concurrent = max_concurrent
        self.request_timeout_s = request_timeout_s
        self.control_timeout_s = control_timeout_s
        self.dtype = dtype
        self.device = device
        self.num_threads = num_threads
        if record_experts and cuda_graphs:
            raise ValueError(
                "EmbeddedEngine.cuda_graphs: true, but what is captured cannot say which experts it chose; leave it, or"
                " record_experts, out"
            )
        self.cuda_graphs, self.record_experts = False if record_experts else cuda_graphs, record_experts
        self._condition = threading.Condition()  # guards every attribute below
        self._staged: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
        self._jobs: dict[Sequence, _Job] = {}
        self._inbox: list[Sequence] = []
        self._batcher: Batcher | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._stepping = False
        self._paused = False
        self._held = False
        self._closing = False
        self._error: BaseException | None = None
        self._clock = PausedClock()
        self._version = -1
        self._seed = 0
        self._arrivals = 0
        self._image_processor: ImageProcessor | None = None
        self._blind = ""  # why the model is shown no pictures

    # -------------------------------------------------------------------------------------------------- lifecycle

    def use_images(self, processor: ImageProcessor) -> None:
        """From the next `start` on, requests may have pictures."""
        self._image_processor = processor

    def start(self, model: PreTrainedModel, version: int, seed: int, parts: WeightParts | None = None) -> None:
        with self._condition:
            if self._thread is not None:
                raise GenerationError("EmbeddedEngine.start: it already runs; close() it first")
        own = copy_of(model, self.dtype, self.device, parts)
        processor = None if self._image_processor is None else self._image_processor.processor
        blind = unseeing(own, processor)
        _try(own, processor)
        static = own.device.type == "cuda" if self.cuda_graphs is None else self.cuda_graphs
        routers = _routers(own) if self.record_experts else None
        sizes = self.kv_cache_tokens, self.max_batch_tokens, self.max_concurrent
        ahead = frozenset[int]() if processor is None or blind else Tower(own, processor).sight.layers
        batcher = Batcher(own, *sizes, processor, static, routers, ahead)
        if static and batcher.dynamic:
            if self.cuda_graphs:
                raise GenerationError(
                    f"EmbeddedEngine.cuda_graphs: true, but {batcher.dynamic}; set it to null to decode without"
                )
            _log.warning("EmbeddedEngine.cuda_graphs: decoding without CUDA graphs: %s", batcher.dynamic)
        with self._condition:
            self._batcher, self._blind = batcher, blind
            self._version, self._seed, self._arrivals = version, seed, 0
            self._error, self._closing, self._paused = None, False, False
            self._clock = PausedClock()
            # A daemon, so that a program that forgets close() can end.
            self._thread = threading.Thread(target=self._run, args=(batcher,), name="embedded-engine", daemon=True)
            self._ready.clear()
            self._thread.start()
        if not self._ready.wait(self.control_timeout_s):
            raise GenerationError(self._late("start", "the start of the generation thread"))
        # set_num_threads also sets what threads started later begin with: that stays the caller's number.
        torch.set_num_threads(torch.get_num_threads())

    def close(self) -> None:
        with self._condition:
            thread = self._thread
            self._closing = True
            self._condition.notify_all()
        if thread is not None:
            thread.join(self.control_timeout_s)
            if thread.is_alive():
                raise GenerationError(self._late("close", "the forward pass in progress"))
        with self._condition:
            self._thread = self._batcher = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def vocab_size(self) -> int:
        return self._running_batcher().model.get_input_embeddings().num_embeddings

    @property
    def max_context(self) -> int:
        return min(most_tokens(self._running_batcher().model.config), self.kv_cache_tokens)

    def health(self) -> dict[str, Any]:
        with self._condition:
            batcher = self._batcher
            alive = self._thread is not None and self._thread.is_alive() and self._error is None
            running = len(batcher.running) if batcher else 0
            return {
                "alive": alive,
                "paused": self._paused,
                "version": self._version,
                "running": running,
                "waiting": max(0, len(self._jobs) - running),
                "kv_cache_bytes": batcher.slots.bytes if batcher else 0,
                "state_bytes": batcher.states.bytes if batcher else 0,
                "decoding": batcher.decoding if batcher else "",
                "error": repr(self._error) if self._error else "",
            }

    @property
    def still_s(self) -> float:
        """Seconds for which it stood still, in pauses and updates."""
        return self._clock.still_s

    # -------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        request.validate(self.vocab_size, self.max_context)
        if request.experts_from is not None and not self.record_experts:
            raise GenerationError("request.experts_from: the engine records no experts; set its record_experts")
        if request.pictures and self._image_processor is None:
            raise GenerationError("request.pictures: the engine was started without the model's image processor")
        if request.pictures and self._blind:
            raise GenerationError(f"request.pictures: {self._blind}")
        if request.pictures and self._running_batcher().slots.ahead:
            longest = PromptImages(request).longest
            if longest > self.max_batch_tokens:
                raise GenerationError(
                    f"request.pictures: a picture has {longest} placeholders next to each other that see each other,"
                    f" and a forward has room for max_batch_tokens={self.max_batch_tokens} tokens; set it to {longest}"
                )
        job = self._enqueue(request, asyncio.get_running_loop())
        ends = self._clock.now() + self.request_timeout_s
        try:
            while not job.future.done():
                left = ends - self._clock.now()
                if left <= 0:
                    raise GenerationError(
                        f"request '{request.request_id}': {len(job.sequence.logprobs)} of {request.max_new_tokens}"
                        f" tokens within request_timeout_s = {self.request_timeout_s} s; engine: {self.health()}"
                    )
                await asyncio.wait((job.future,), timeout=max(left, 0.1))
            return job.future.result()
        finally:  # no effect on a request that ended; frees the place of one given up
            job.sequence.cancelled = True
            with self._condition:
                self._jobs.pop(job.sequence, None)

    def _enqueue(self, request: GenerationRequest, loop: asyncio.AbstractEventLoop) -> _Job:
        """Requests of one turn of an event loop reach the batcher together: one prefill, the same batches every run."""
        with self._condition:
            self._raise_unless_running()
            if request.seed is None:
                key = request_key(self._seed, self._arrivals)
                self._arrivals += 1
            else:
                key = request_key(request.seed)
            sequence = Sequence(request, key)
            job = self._jobs[sequence] = _Job(sequence, loop)
            staged = self._staged.setdefault(loop, [])
            staged.append(job)
            if len(staged) == 1:
                loop.call_soon(self._hand_over, loop)
        return job

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._condition:
            self._inbox += [job.sequence for job in self._staged.pop(loop, [])]
            self._condition.notify_all()

    # -------------------------------------------------------------------------------------------------- control

    def pause(self) -> None:
        with self._condition:
            self._raise_unless_running()
            self._paused = True
            try:
                self._await_stillness("pause")
            except GenerationError:
                self._paused = False
                raise

    def resume(self) -> None:
        with self._condition:
            self._paused = False
            self._condition.notify_all()

    def update_weights(self, update: WeightUpdate) -> float:
        begin = time.monotonic()
        batcher = self._running_batcher()
        if update.version <= self._version:
            raise GenerationError(
                f"WeightUpdate.version: {update.version} is not above the engine's {self._version}; versions rise with"
                " every update (close() and start() the engine to go back)"
            )
        weights = read(update.path) if update.path is not None else update.state_dict or {}
        pairs = matched(batcher.model, weights) if update.parts is None else []
        still = time.perf_counter()
        with self._hold("update_weights", update.deadline_s - (time.monotonic() - begin)):
            try:
                if update.parts is not None:
                    fill(batcher.model, update.parts)
                with torch.no_grad():
                    for target, source in pairs:
                        target.copy_(source)
            except BaseException as error:  # weights of two versions mixed must never generate
                with self._condition:
                    self._error, self._closing = error, True
                raise
            batcher.flush()
            self._version = update.version
        return time.perf_counter() - still

    @contextmanager
    def _hold(self, what: str, seconds: float) -> Iterator[None]:
        """Inside, the generation thread stands still and its batcher and model are the caller's alone."""
        with self._condition:
            if not self._condition.wait_for(lambda: not self._held, min(seconds, self.control_timeout_s)):
                raise GenerationError(self._late(what, "another update", seconds))
            self._held = True
        try:
            with self._condition:
                self._await_stillness(what, seconds)
                self._raise_unless_running()
            yield
        finally:
            with self._condition:
                self._held = False
                self._condition.notify_all()

    def _await_stillness(self, what: str, seconds: float = math.inf) -> None:
        self._condition.notify_all()
        if not self._condition.wait_for(lambda: not self._stepping, min(seconds, self.control_timeout_s)):
            raise GenerationError(self._late(what, "the forward pass in progress", seconds))

    def _late(self, what: str, awaited: str, seconds: float = math.inf) -> str:
        """`seconds`: what WeightUpdate.deadline_s left; the shorter of the two limits is the one to name."""
        limit = f"control_timeout_s = {self.control_timeout_s} s"
        if seconds < self.control_timeout_s:
            limit = f"the {max(seconds, 0.0):.3g} s left of WeightUpdate.deadline_s"
        return f"EmbeddedEngine.{what}: {awaited} did not end within {limit}"

    def _raise_unless_running(self) -> None:
        if self._error is not None:
            raise GenerationError(f"the generation thread failed: {self._error!r}") from self._error
        if self._thread is None or self._closing:
            raise GenerationError("the embedded engine is not running: start() it first")

    def _running_batcher(self) -> Batcher:
        with self._condition:
            self._raise_unless_running()
            assert self._batcher is not None
            return self._batcher

    # -------------------------------------------------------------------------------------------------- the thread

    def _run(self, batcher: Batcher) -> None:
        try:
            if self.num_threads is not None:
                torch.set_num_threads(self.num_threads)
            self._ready.set()
            while self._next_turn(batcher):
                self._deliver(batcher.step(self._version))
        except BaseException as error:  # whatever it is, those who wait must hear of it
            _log.exception("the generation thread of the embedded engine failed")
            with self._condition:
                self._error = error
        finally:
            with self._condition:
                self._stepping = False
                self._closing = True
                jobs, self._jobs = list(self._jobs.values()), {}
                self._inbox.clear()
                self._staged.clear()
                self._condition.notify_all()
            batcher.drain()
            reason = f"failed: {self._error!r}" if self._error else "was closed"
            for loop in {job.loop for job in jobs}:
                mine = [job for job in jobs if job.loop is loop]
                _call(loop, _fail, mine, f"the embedded engine {reason} while the request was pending", self._error)

    def _next_turn(self, batcher: Batcher) -> bool:
        """Blocks until there is something to compute and nobody holds the engine; False when it is to end."""
        with self._condition:
            self._stepping = False
            self._condition.notify_all()
            while not self._closing:
                if self._paused or self._held:
                    self._clock.pause()
                else:
                    self._clock.resume()
                    batcher.waiting.extend(self._inbox)
                    self._inbox.clear()
                    if batcher.busy:
                        self._stepping = True
                        return True
                self._condition.wait()  # ends by notify: a request, resume, the end of an update, close
            return False

    def _deliver(self, ended: list[Sequence]) -> None:
        if not ended:
            return
        with self._condition:
            jobs = [self._jobs.pop(sequence) for sequence in ended if sequence in self._jobs]  # others were given up
        for loop in {job.loop: None for job in jobs}:
            _call(loop, _finish, [job for job in jobs if job.loop is loop])


def _call(loop: asyncio.AbstractEventLoop, function: Any, *args: Any) -> None:
    with suppress(RuntimeError):  # a closed loop: nobody awaits these futures any more
        loop.call_soon_threadsafe(function, *args)


def _finish(jobs: list[_Job]) -> None:
    for job in jobs:
        if not job.future.done():
            if job.sequence.failure is not None:
                job.future.set_exception(job.sequence.failure)
            else:
                job.future.set_result(job.sequence.response())


def _fail(jobs: list[_Job], message: str, cause: BaseException | None) -> None:
    for job in jobs:
        if not job.future.done():
            error = GenerationError(f"request '{job.sequence.request.request_id}': {message}")
            error.__cause__ = cause
            job.future.set_exception(error)
