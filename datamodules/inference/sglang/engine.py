"""`SGLangEngine`: rollouts from SGLang servers, given by their addresses or launched by us.

    SGLangEngine(launch=Launch(replicas=2))                 # servers of our own, ended by close()
    SGLangEngine(urls=["http://127.0.0.1:30000"])           # from `arborist serve`, or anyone's

A thread of its own runs an event loop with the fleet, its connections and requests; callers await in whatever loop they
run. Promises: nothing starts before `start`; each token comes with the log-probability and the version its server
reported; requests that could end a server are refused before they are sent; servers may be lost, come back and join
late; keys come from the environment and appear in no log, error or checkpoint; nothing a server sends is unpickled.

Launched servers come up with the model's weights. Those given by address have others: the engine's `version` is -1 then
until a first `update_weights`. With `adapters`, servers have the model below a policy's LoRA and get its adapter alone,
beside those of versions before: nothing stands still for an update, and a request ends with the adapter it began with.
Requests with pictures go to servers given by address that were started with the model's directory, its tokenizer and
image processor (`--enable-multimodal`): a server makes tokens of pictures by itself, which are compared with the
trainer's. Servers keep features of pictures over updates (SGLang 0.5.21), so that a tower must not be trained; and they
resize pictures in their own way, so that models whose pictures are not of a size that is kept are shown none.
Sampling follows a request's `seed` only on servers with deterministic inference (an option of SGLang for GPUs); others
draw from streams of their own, and runs on them are not reproducible.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from app import checks
from datamodules.conversations.image_processor import ImageProcessor
from datamodules.inference.clock import PausedClock
from datamodules.inference.export import WeightParts
from datamodules.inference.protocol import (
    SHAPINGS,
    GenerationError,
    GenerationRequest,
    GenerationResponse,
    InferenceEngine,
    ServerEngine,
    WeightUpdate,
)
from datamodules.inference.sglang.experts import FLAG, ExpertLayout
from datamodules.inference.sglang.fleet import Fleet
from datamodules.inference.sglang.launcher import API_KEY_VARIABLE, server_python
from datamodules.inference.sglang.loop_thread import LoopThread
from datamodules.inference.sglang.model_match import ModelMatch, refuse_misread, refuse_trained_tower
from datamodules.inference.sglang.requests import Pending, complete
from datamodules.inference.sglang.roster import Launch, given_servers, launched_servers, with_adapters
from datamodules.inference.sglang.router import PrefixRouter
from datamodules.inference.sglang.server_state import UP, Server, WrongModel
from datamodules.inference.sglang.supervisor import Limits
from datamodules.inference.sglang.weights.forms import Weights, weights_of
from datamodules.inference.sglang.weights.sending_rank import SharedSending
from datamodules.inference.weight_files import WeightFiles

_T = TypeVar("_T")
_EXPIRY_CHECK_S = 0.5
_GRACE_S = 60.0  # processes of ours may take 25 s to end
_MOST_ATTEMPTS = 4
_NOT_RUNNING = "the SGLang engine is not running: start() it first"


class SGLangEngine(InferenceEngine, ServerEngine):
    """An `InferenceEngine` and `ServerEngine` on SGLang servers (see there for its methods).

    Args:
        urls: addresses of running servers, "http://host:port"; those that do not answer yet join when they do.
        launch: servers to start, instead of `urls`.
        api_key_env: environment variable with the servers' API key; launched servers get a random key when it is unset.
        max_concurrent: most requests running at a server; others wait in order of arrival.
        load_tokens: prompt tokens a server must have cached to be chosen in spite of one more running request.
        report_tokens: a server reports after so many new tokens of a request; one that is lost takes fewer with it.
        request_timeout_s: seconds a request may take, its wait for a place at a server included, time spent paused not.
        control_timeout_s: seconds a server may take to pause or to continue.
        update_timeout_s: seconds a server that joins may take for its weights (updates bring their own deadline).
        start_timeout_s: seconds servers may take to come up; those given by address are asked several times in it.
        silence_s: seconds without an answer, or without progress in any running request, until a server is lost.
        adapters: most versions of a LoRA that a server holds at once, `max_staleness` + 2 at least for a reply not to
            wait for room; null sends merged weights. Servers given by address need `--enable-lora` with the rank, the
            modules and `--max-loaded-loras` of this run, and the model below the adapter.
        record_experts: whether replies carry the experts that their tokens were sent to, which the trainer then sends
            them to as well (docs/algorithms.md). For models of experts; servers given by address need
            `--enable-return-routed-experts`.

    Raises:
        ValueError: an argument out of range; both or neither of urls and launch.
    """

    update_methods: tuple[str, ...] = ("distributed", "disk", "tensor")
    shapings = SHAPINGS

    def __init__(
        self,
        urls: Sequence[str] | None = None,
        launch: Launch | None = None,
        api_key_env: str = API_KEY_VARIABLE,
        max_concurrent: int = 64,
        load_tokens: int = 256,
        report_tokens: int = 64,
        request_timeout_s: float = 600.0,
        control_timeout_s: float = 60.0,
        update_timeout_s: float = 300.0,
        start_timeout_s: float = 600.0,
        silence_s: float = 60.0,
        adapters: int | None = None,
        record_experts: bool = False,
    ) -> None:
        if bool(urls) == bool(launch):
            raise ValueError("SGLangEngine: give either urls (running servers) or launch (servers to start)")
        positive = {
            "max_concurrent": max_concurrent,
            "load_tokens": load_tokens,
            "report_tokens": report_tokens,
            "request_timeout_s": request_timeout_s,
            "control_timeout_s": control_timeout_s,
            "update_timeout_s": update_timeout_s,
            "start_timeout_s": start_timeout_s,
            "silence_s": silence_s,
        }
        checks.positive({f"SGLangEngine.{name}": value for name, value in positive.items()})
        given_servers(urls or (), None, max_concurrent)  # an address that is none is an error at once
        self.urls = tuple(urls or ())
        self.launch = launch
        self.in_turns = launch is not None and launch.in_turns
        self.api_key_env = api_key_env
        self.max_concurrent = max_concurrent
        self.load_tokens = load_tokens
        self.report_tokens = report_tokens
        self.request_timeout_s = request_timeout_s
        self.control_timeout_s = control_timeout_s
        self.update_timeout_s = update_timeout_s
        self.start_timeout_s = start_timeout_s
        self.silence_s = silence_s
        checks.at_least(2, {"SGLangEngine.adapters": adapters})
        self.adapters, self.record_experts = adapters, record_experts
        if adapters is not None:
            self.update_methods = ("adapter",)
        self.senders = self._senders = SharedSending()
        self._thread: LoopThread | None = None
        self._fleet: Fleet | None = None
        self._match: ModelMatch | None = None
        self._layout: ExpertLayout | None = None
        self._max_context = 0
        self._pending: set[Pending] = set()
        self._scratch = ""
        self._shows_pictures = False
        self._resizes = False  # whether what servers are shown would be resized by them
        self._update_s = 0.0  # the longest deadline of an update so far
        # Of the loop alone.
        self._control_lock = asyncio.Lock()
        self._expiry_task: asyncio.Task[None] | None = None
        self._clock = PausedClock()

    # -------------------------------------------------------------------------------------------------- lifecycle

    def use_images(self, processor: ImageProcessor) -> None:
        """From the next `start` on, requests may have pictures."""
        self._shows_pictures, self._resizes = not processor.laid_out, processor.laid_out

    def start(self, model: PreTrainedModel, version: int, seed: int, parts: WeightParts | None = None) -> None:
        if self._thread is not None:
            raise GenerationError("SGLangEngine.start: it already runs; close() it first")
        refuse_misread(model)
        if self._shows_pictures and self.launch is None:
            refuse_trained_tower(model)
        self._layout = ExpertLayout.of(model) if self.record_experts else None
        self._match = ModelMatch(model, adapter=bool(self.adapters), records=self.record_experts)
        self._max_context = 0
        key = os.environ.get(self.api_key_env) or None
        weights: Weights | None = None
        if self.launch is None:
            servers = given_servers(self.urls, key, self.max_concurrent)
        else:
            server_python(self.launch.chosen_device)  # before anything is written
            self._scratch = tempfile.mkdtemp(prefix="arborist-engine-")
            try:
                files = WeightFiles(Path(self._scratch) / "weights", adapter=bool(self.adapters))
                path, _ = files.write(model, version, None if parts is None else parts.saved())
                weights = weights_of(WeightUpdate(version, path=str(path)), adapter=bool(self.adapters))
                options = self.launch.options(
                    str(path), self._match.positions, weights.label, seed, self.max_concurrent
                )
                if self.record_experts:
                    options = [replace(one, arguments=(FLAG, *one.arguments)) for one in options]
                if self.adapters:
                    options = [with_adapters(one, model, self.adapters) for one in options]
                logs = Path(self.launch.log_dir or Path(self._scratch) / "logs")
                servers = launched_servers(options, logs, key, self.max_concurrent, Path(self._scratch))
            except BaseException:
                shutil.rmtree(self._scratch, ignore_errors=True)  # a whole copy of the model, and nobody reads it
                raise
        self._thread = LoopThread("sglang-engine")
        try:
            self._call(self._open(servers, weights), self.start_timeout_s)
        except BaseException:
            self.close()
            raise
        self._senders.attach(self._thread, self._running_fleet().target.senders, [one.client.url for one in servers])

    def close(self) -> None:
        self._senders.leave()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            thread.call(self._shut(), _patience(self.control_timeout_s, max(self._update_s, self.control_timeout_s)))
        finally:
            thread.stop(self.control_timeout_s)
            fleet, self._fleet = self._fleet, None
            if self.launch is not None:
                failed = fleet is None or any(server.restarts or server.error for server in fleet.servers)
                logs_stay = failed and self.launch.log_dir is None
                shutil.rmtree(Path(self._scratch) / "weights" if logs_stay else self._scratch, ignore_errors=True)

    @property
    def version(self) -> int:
        return self._running_fleet().version

    @property
    def vocab_size(self) -> int:
        self._running_fleet()
        assert self._match is not None
        return self._match.vocab_size

    @property
    def max_context(self) -> int:
        self._running_fleet()
        return self._max_context

    def health(self) -> dict[str, Any]:
        """Besides what the protocol asks for: `servers`, a report on each, `senders`, one on each other rank that sends
        weights, and the counts of the fleet."""
        fleet = self._fleet
        servers = [] if fleet is None else [server.report() for server in fleet.servers]
        running = sum(server["running"] for server in servers)
        errors = "; ".join(f"{server['url']}: {server['error']}" for server in servers if server["error"])
        return {
            "alive": self._thread is not None and any(server["state"] != "gone" for server in servers),
            "paused": fleet is not None and fleet.target.paused,
            "version": -1 if fleet is None else fleet.version,
            "running": running,
            "waiting": max(0, len(self._pending) - running),
            "error": "" if any(server["state"] in UP for server in servers) else errors or "no server is up",
            "servers": servers,
            "senders": [] if fleet is None else fleet.target.senders.report(),
            **({} if fleet is None else fleet.counts),
        }

    @property
    def owns_servers(self) -> bool:
        return self.launch is not None

    def where(self, request_id: str) -> str:
        for pending in list(self._pending):
            flight = pending.flight
            if flight is not None and pending.output.request.request_id == request_id:
                return flight.server.name
        return ""

    def restart(self, server: str) -> None:
        fleet = self._running_fleet()
        found = next((one for one in fleet.servers if one.name == server), None)
        if found is None or found.process is None:
            raise GenerationError(f"server '{server}' was not launched by this engine; restart it where it runs")
        self._call(fleet.restart(found), self.start_timeout_s)

    @property
    def still_s(self) -> float:
        """Seconds of pauses, and of updates whole: in neither is a request dealt to a server."""
        return self._clock.still_s

    # --------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        request.validate(self.vocab_size, self.max_context)
        if request.pictures and self._resizes:
            raise GenerationError(
                "request.pictures: servers would resize the pictures of this family and lay them out by themselves,"
                " otherwise than the trainer; use EmbeddedEngine, or a family whose processor gives grids (Qwen-VL,"
                " GLM-4V)"
            )
        if request.pictures and (self.launch is not None or not self._shows_pictures):
            raise GenerationError(
                "request.pictures: servers started by SGLangEngine.launch show none; start them with"
                " --enable-multimodal on the model's directory, and name them in SGLangEngine.urls"
            )
        if request.experts_from is not None and self._layout is None:
            raise GenerationError("request.experts_from: servers record no experts; set SGLangEngine.record_experts")
        thread = self._thread
        if thread is None:
            raise GenerationError(_NOT_RUNNING)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._serve(request), thread.loop))

    async def _serve(self, request: GenerationRequest) -> GenerationResponse:
        pending = Pending(request, self.vocab_size, self._clock.now(), self._layout)
        self._pending.add(pending)
        try:
            return await complete(self._running_fleet(), pending, self.report_tokens, _MOST_ATTEMPTS)
        except asyncio.CancelledError:
            if pending.failure:
                raise GenerationError(f"request '{request.request_id}': {pending.failure}") from None
            raise
        finally:
            self._pending.discard(pending)

    async def _expire_requests(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_CHECK_S)
            now = self._clock.now()
            for pending in [one for one in self._pending if now - one.began > self.request_timeout_s]:
                output, flight = pending.output, pending.flight
                pending.expire(
                    f"{len(output.tokens)} of {output.request.max_new_tokens} tokens were known for certain after"
                    f" request_timeout_s = {self.request_timeout_s:g} s; it is"
                    f" {f'at {flight.server.name}' if flight else 'waiting for a server'}; servers: {self._fleet}"
                )

    # ---------------------------------------------------------------------------------------------------- control

    def pause(self) -> None:
        coming_up = self.start_timeout_s + self.update_timeout_s if self.in_turns else 0.0
        self._call(self._stand(still=True), self.control_timeout_s + coming_up)

    def resume(self) -> None:
        self._call(self._stand(still=False), self.control_timeout_s)

    def update_weights(self, update: WeightUpdate) -> float:
        if update.version <= self.version:
            raise GenerationError(
                f"WeightUpdate.version: {update.version} is not above the engine's {self.version}; versions rise with"
                " every update (close() and start() the engine to go back)"
            )
        assert self._match is not None
        self._match.check_update(update)
        weights = weights_of(update, adapter=bool(self.adapters), one_gpu=self.in_turns)
        self._update_s = max(self._update_s, update.deadline_s)
        return self._call(self._update(weights, update.deadline_s), update.deadline_s)

    def _call(self, work: Coroutine[Any, Any, _T], deadline_s: float) -> _T:
        """The result of `work`, which keeps to the deadline itself, on the loop."""
        if self._thread is None:
            work.close()
            raise GenerationError(_NOT_RUNNING)
        return self._thread.call(work, _patience(deadline_s, max(self._update_s, self.control_timeout_s)))

    async def _stand(self, still: bool) -> None:
        async with self._control_lock:
            fleet, clock = self._running_fleet(), self._clock
            await (fleet.pause if still else fleet.resume)(self.control_timeout_s)
            (clock.pause if still else clock.resume)()

    async def _update(self, weights: Weights, deadline_s: float) -> float:
        async with self._control_lock:
            fleet, clock = self._running_fleet(), self._clock
            senders = fleet.target.senders
            try:
                took_s = await senders.lend(weights, deadline_s / 2)
                clock.pause()  # until the slowest server has the weights no request is dealt
                synced = await fleet.update(weights, deadline_s - took_s)
            finally:
                senders.over(weights.version)
                if not fleet.target.paused:
                    clock.resume()
            return max((one.downtime_s for one in synced), default=0.0)

    # ------------------------------------------------------------------------------------------------ on the loop

    async def _open(self, servers: list[Server], weights: Weights | None) -> None:
        self._control_lock = asyncio.Lock()
        self._clock = PausedClock()
        self._fleet = Fleet(
            servers,
            PrefixRouter(self.load_tokens),
            self._check,
            Limits(
                silence_s=self.silence_s,
                update_s=self.update_timeout_s,
                start_s=self.start_timeout_s,
                max_restarts=0 if self.launch is None else self.launch.max_restarts,
            ),
            self.in_turns,
        )
        self._expiry_task = asyncio.create_task(self._expire_requests())
        await self._fleet.start(weights)
        self._max_context = min(server.max_context for server in servers if server.max_context)

    async def _check(self, server: Server) -> None:
        assert self._match is not None
        await self._match.check(server)
        if server.max_context < self._max_context:  # promised to prompts already
            raise WrongModel(
                f"{server.client.url} takes {server.max_context} tokens a request, the servers before it took"
                f" {self._max_context}; start it with --context-length {self._max_context + 6}"
            )

    async def _shut(self) -> None:
        tasks = [pending.task for pending in self._pending if pending.task is not None]
        for pending in list(self._pending):
            pending.expire("the SGLang engine was closed while the request was pending")
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._expiry_task is not None:
            self._expiry_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._expiry_task
        if self._fleet is not None:
            await self._fleet.close()

    def _running_fleet(self) -> Fleet:
        if self._fleet is None:
            raise GenerationError(_NOT_RUNNING)
        return self._fleet


def _patience(deadline_s: float, ahead_s: float) -> float:
    """Seconds after which a call has met a loop that stands still: what was asked for before it may end first."""
    return deadline_s + ahead_s + _GRACE_S
