"""Supervises one server of a fleet: brings it up, gives it the current weights, watches it, starts over when it ends.

A server is lost when its process ends, when a connection breaks and it does not answer, or when it is silent for
`silence_s`: no answer to a probe, or requests running and no progress in any. It is dirty, and loaded anew, when an
update failed on it or when it answers with weights that are not those it was given. One that another run gives its own
is given up; one on which requests of another run are running is waited for, and one that it left paused is continued.

Promises: every wait has a deadline; a process of ours is started again at most `max_restarts` times in a row, each time
later, and one that is lost is ended first; what goes wrong is logged once, and that it is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.client import ServerRefused
from datamodules.inference.sglang.loop_thread import cancel_all
from datamodules.inference.sglang.server_state import ONE_RUN, UP, Server, Target, WrongModel
from datamodules.inference.sglang.weights.forms import DiskWeights, Weights, from_a_run
from datamodules.processes.awake import awake

_log = logging.getLogger(__name__)
_TICK_S = 0.5  # between two looks at a server whose state does not change
_PROBE_EVERY_S = 5.0
_SUSPECT_ANSWER_S = 10.0  # for an answer after a connection broke
_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
_QUESTIONS = 8  # of a server that is not ours: the first has such a part of the time it has to come up
_LEFT_S = 60.0  # a server that another run has paused for so long, under the same weights, was left so
_STEADY_S = 300.0  # a server that served so long starts counting its failures anew


@dataclass(frozen=True)
class Limits:
    """Of every server of a fleet: seconds without a sign of life, for the weights it is given when it joins, for its
    process to come up; restarts of that process in a row until it is given up."""

    silence_s: float
    update_s: float
    start_s: float
    max_restarts: int


class Supervisor:
    """`run` is a task that never ends by itself, unless its server is given up.

    Args:
        server: the one it has the care of.
        target: what the server is to be, read at every step.
        limits: see there.
        check: raises WrongModel when the server cannot serve this run's model; called when it joins.
        changed: called after every change of the server's state that was made here.
    """

    def __init__(
        self,
        server: Server,
        target: Target,
        limits: Limits,
        check: Callable[[Server], Awaitable[None]],
        changed: Callable[[Server], None],
    ) -> None:
        self.server = server
        self._target = target
        self._limits = limits
        self._check = check
        self._changed = changed
        self._failures = 0
        self._probe: asyncio.Task[dict[str, Any]] | None = None
        self._probed_at = 0.0
        self._probed_weights: Weights | None = None  # what the server held when the probe was sent
        self._paused_by: tuple[str, float] | None = None  # another run's weights, and since when it was seen so

    async def run(self) -> None:
        server = self.server
        while server.state != "gone":
            try:
                await self._await_turn()
                if server.state != "dirty":
                    await self._bring_up()
                level = logging.WARNING if server.error else logging.INFO  # of what went wrong people were told
                await self._give_weights()
                began = time.monotonic()
                _log.log(
                    level, "%s is %s, version %d, %s", server.name, server.state, server.version, server.client.url
                )
                await self._watch()
                self._failures = 0 if time.monotonic() - began > _STEADY_S else self._failures
                _log.warning("%s is %s: %s", server.name, server.state, server.error)
            except WrongModel as error:
                server.enter("gone", str(error))
            except GenerationError as error:
                # Said once: a server that is not there yet is asked again and again.
                _log.log(logging.DEBUG if str(error) == server.error else logging.WARNING, "%s: %s", server.name, error)
                server.enter("lost", str(error))
                if (process := server.process) is not None and process.ended:
                    _log.warning("%s: %s; %s", server.name, process.ending, await asyncio.to_thread(process.tail))
            except Exception as error:
                _log.exception("%s: its supervisor failed", server.name)
                server.enter("lost", f"{type(error).__name__}: {error}")
            self._changed(server)
            if server.state == "lost":
                self._failures += 1
                await self._after_loss()

    async def _await_turn(self) -> None:
        """While the trainer has the GPU, the server neither starts nor loads."""
        while self._target.in_turns and self._target.paused:
            if self.server.state == "dirty":
                await self.server.weights.leave(self._limits.update_s)
            await asyncio.sleep(_TICK_S)

    async def _after_loss(self) -> None:
        server, most = self.server, self._limits.max_restarts
        if server.process is not None:
            await asyncio.to_thread(server.process.stop, 0.0)
            if self._failures > most:
                server.enter("gone", f"given up after {most} restarts (max_restarts): {server.error}")
                _log.error("%s is %s", server.name, server.error)
                return self._changed(server)
            server.restarts += 1
        pause_s = _BACKOFF_S[min(self._failures, len(_BACKOFF_S)) - 1]
        await asyncio.sleep(pause_s if server.process is not None else min(pause_s, self._limits.start_s / _QUESTIONS))

    async def _bring_up(self) -> None:
        """Returns when it answers and is known to serve this run's model."""
        server, limits, weights = self.server, self._limits, self._target.weights
        if server.process is not None:
            server.enter("starting", server.error)
            if isinstance(weights, DiskWeights):  # it comes up with them
                options = server.process.options
                server.process.options = replace(options, model_path=weights.path, label=weights.label)
            await server.process.ready(limits.start_s)
            await server.reconnect(server.process.client())
            if isinstance(weights, DiskWeights):
                server.holds = weights
        else:
            await server.reconnect(server.client)
        # A short question first: what does not answer it would cost an update's deadline. Of one that may still be
        # coming up several have to fit into the start, since what took the connection may never answer it; each has
        # twice the time of the one before, since a server may be busy.
        patience_s = min(limits.silence_s, limits.update_s)
        if server.process is None:
            patience_s = min(patience_s, limits.start_s / _QUESTIONS * 2 ** min(self._failures, 16))
        answer = await server.client.get("/model_info", patience_s)
        server.enter("joining", server.error)
        await self._check(server)
        if server.process is None:
            await self._check_free(answer.get("weight_version"))

    async def _check_free(self, label: Any) -> None:
        """Raises GenerationError while requests of another run, which gave it these weights, run on it."""
        server = self.server
        if not from_a_run(label) or label in self._target.versions:
            return
        try:
            loads = (await server.client.get("/v1/loads?include=core", self._limits.silence_s)).get("loads")
        except ServerRefused:  # an SGLang without this path
            return
        each = [one for one in loads if isinstance(one, dict)] if isinstance(loads, list) else []
        whole = server.client.whole
        if running := sum(whole(one, f"num_{what}_reqs", 0, 0) or 0 for one in each for what in ("running", "waiting")):
            await self._continue_left(str(label))
            raise GenerationError(
                f"{server.client.url} serves weights '{label}' of another run, which has {running} requests there:"
                f" {ONE_RUN}"
            )

    async def _continue_left(self, label: str) -> None:
        """A run that was killed in an update leaves the server paused, where it counts the last requests for ever. One
        that stays so is continued, whereupon those whose client is gone end; its others are aborted, lest they go on
        with half an update."""
        server, deadline_s = self.server, self._limits.silence_s
        try:
            await server.client.get("/ready", deadline_s)
        except ServerRefused as error:
            paused = error.status == 503
        else:
            paused = False
        if not paused or self._paused_by is None or self._paused_by[0] != label:
            self._paused_by = (label, time.monotonic()) if paused else None
        elif time.monotonic() - self._paused_by[1] >= _LEFT_S:
            _log.warning(
                "%s was left paused, with weights '%s', by a run that must have ended: it is continued",
                server.name,
                label,
            )
            self._paused_by = None
            await server.client.post("/abort_request", {"abort_all": True}, deadline_s)
            await server.client.resume(deadline_s)

    async def _give_weights(self) -> None:
        server = self.server
        # Again, when newer ones came meanwhile.
        while (weights := self._target.weights) is not None and server.holds is not weights:
            server.holds = None
            await server.weights.bring(weights, self._limits.update_s)
            server.holds = weights
        if self._target.in_turns and self._target.paused:  # since it began to come up
            await server.weights.leave(self._limits.update_s)
        server.settle(weights)
        self._changed(server)

    # ---- watching

    async def _watch(self) -> None:
        """Returns when the server is not up any more."""
        self._probed_at = awake()
        try:
            while self.server.state in UP:
                await self._tick()
                await self._check_process()
                await self._check_connection()
                self._check_probe()
                self._check_silence()
        finally:
            if self._probe is not None:
                await cancel_all([self._probe])
                self._probe = None

    async def _tick(self) -> None:
        """Waits until the server's state changes, for a moment at most."""
        self.server.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):  # `wait_for` of Python 3.11 may swallow a cancellation
                await self.server.changed.wait()

    async def _check_process(self) -> None:
        process = self.server.process
        if process is not None and not process.running:
            self.server.enter("lost", f"{process.ending}; {await asyncio.to_thread(process.tail)}")

    async def _check_connection(self) -> None:
        """A connection to it broke: does it answer? Raises ServerError when it does not."""
        server = self.server
        if server.state != "suspect":
            return
        answer = await server.client.get(server.question, min(_SUSPECT_ANSWER_S, self._limits.silence_s))
        if server.state == "suspect":
            server.look_at(answer)
        if server.state == "suspect":
            server.settle(self._target.weights)
            self._changed(server)

    def _check_probe(self) -> None:
        """Asks it for its weights now and then, one question at a time; no answer counts as silence."""
        server = self.server
        if self._probe is None:
            if awake() - self._probed_at > _PROBE_EVERY_S:
                self._probed_at, self._probed_weights = awake(), server.holds
                self._probe = asyncio.create_task(server.client.get(server.question, self._limits.silence_s))
            return
        if not self._probe.done():
            return
        probe, self._probe = self._probe, None
        if probe.exception() is not None:
            return
        server.answered = awake()
        if server.state == "serving" and server.holds is self._probed_weights:
            server.look_at(probe.result())

    def _check_silence(self) -> None:
        server, most = self.server, self._limits.silence_s
        if self._target.paused or server.state == "updating":  # nothing moves, as asked; updates have a deadline
            server.progressed = awake()
        if server.state in UP and server.silent_s() > most:
            server.enter(
                "lost",
                f"silent for {server.silent_s():.0f} s (silence_s = {most:g}) with"
                f" {len(server.flights)} requests running",
            )
