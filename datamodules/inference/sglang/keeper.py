"""Keeps one server of a fleet: brings it up, gives it the current weights, watches it, and starts over when it is lost.

A server is lost when its process ends, when a connection breaks and it does not answer, or when it is silent for
`silence_s`: no answer to a probe, or requests running and no progress in any. It is dirty, and loaded anew, when an
update failed on it or when it answers with weights that are not those it was given.

Promises: every wait has a deadline; a process of ours is started again at most `max_restarts` times in a row, each time
later, and one that is lost is ended first; what goes wrong is logged once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.client import shown
from datamodules.inference.sglang.server_state import UP, Server, WrongModel
from datamodules.inference.sglang.weights import DiskWeights, Weights

if TYPE_CHECKING:
    from datamodules.inference.sglang.fleet import Fleet

_log = logging.getLogger(__name__)
_LOOK_S = 0.5  # how often a process is looked at
_PROBE_S = 5.0  # how often an address is probed
_QUESTION_S = 10.0  # for an answer after a connection broke
_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_S = 300.0  # a server that served so long starts counting its failures anew


class Keeper:
    """`run` is a task that never ends by itself, unless its server is given up."""

    def __init__(self, server: Server, fleet: Fleet) -> None:
        self.server = server
        self._fleet = fleet

    async def run(self) -> None:
        server, fleet = self.server, self._fleet
        failures = 0
        while server.state != "gone":
            try:
                if server.state != "dirty":
                    await self._bring_up()
                await self._give_weights()
                began = time.monotonic()
                _log.info("%s is %s, version %d, %s", server.name, server.state, server.version, server.client.url)
                await self._watch()
                failures = 0 if time.monotonic() - began > _STEADY_S else failures
                _log.warning("%s is %s: %s", server.name, server.state, server.error)
            except WrongModel as error:
                server.enter("gone", str(error))
            except GenerationError as error:
                # Said once: a server that is not there yet is asked again and again.
                _log.log(logging.DEBUG if str(error) == server.error else logging.WARNING, "%s: %s", server.name, error)
                server.enter("lost", str(error))
                if server.process is not None and server.process.ended:
                    _log.warning("%s: its process ended; %s", server.name, await asyncio.to_thread(server.process.tail))
            except Exception as error:
                _log.exception("%s: its keeper failed", server.name)
                server.enter("lost", f"{type(error).__name__}: {error}")
            fleet.router.forget(server)
            fleet.notice()
            if server.state == "lost":
                failures += 1
                await self._after_loss(failures)

    async def _after_loss(self, failures: int) -> None:
        server, fleet = self.server, self._fleet
        if server.process is not None:
            await asyncio.to_thread(server.process.stop, 0.0)
            if failures > fleet.max_restarts:
                server.enter("gone", f"given up after {fleet.max_restarts} restarts (max_restarts): {server.error}")
                _log.error("%s is %s", server.name, server.error)
                return fleet.notice()
            server.restarts += 1
        await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S)) - 1])

    async def _bring_up(self) -> None:
        """Returns when it answers and is known to serve this run's model."""
        server, fleet = self.server, self._fleet
        if server.process is not None:
            server.enter("starting", server.error)
            target = fleet.target
            if isinstance(target, DiskWeights):  # it comes up with them
                own = replace(server.process.options, model_path=target.path, version=target.version)
                server.process.options = own
            await server.process.ready(fleet.start_s)
            await server.reconnect(server.process.client())
            if isinstance(target, DiskWeights):
                server.holds = target
        else:
            await server.reconnect(server.client)
        # A short question first: what does not answer it would cost an update's deadline.
        await server.client.get("/model_info", min(fleet.silence_s, fleet.update_s))
        server.enter("joining", server.error)
        await fleet.check(server)

    async def _give_weights(self) -> None:
        server, fleet = self.server, self._fleet
        # Again, when newer ones came meanwhile.
        while (target := fleet.target) is not None and server.holds is not target:
            server.holds = None
            await server.weights.bring(target, fleet.update_s)
            server.holds = target
        server.enter("ready" if fleet.target is None else "serving")
        fleet.router.forget(server)
        fleet.notice()

    async def _watch(self) -> None:
        """Returns when the server is not up any more."""
        server, fleet = self.server, self._fleet
        probed = time.monotonic()
        probe: asyncio.Task[dict[str, Any]] | None = None
        held: Weights | None = None  # when the probe was sent
        try:
            while server.state in UP:
                server.changed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(server.changed.wait(), _LOOK_S)
                if server.process is not None and not server.process.running:
                    tail = await asyncio.to_thread(server.process.tail)
                    server.enter("lost", f"its process ended; {tail}")
                elif server.state == "suspect":
                    await self._question()
                elif probe is not None and probe.done():
                    if probe.exception() is None:
                        server.answered = time.monotonic()
                        if server.state == "serving" and server.holds is held:
                            self._believe(probe.result())
                    probe = None
                elif probe is None and time.monotonic() - probed > _PROBE_S:
                    probed, held = time.monotonic(), server.holds
                    probe = asyncio.create_task(server.client.get("/model_info", fleet.silence_s))
                if fleet.paused or server.state == "updating":  # nothing moves, as asked; updates have a deadline
                    server.progressed = time.monotonic()
                if server.state in UP and server.silent_s() > fleet.silence_s:
                    server.enter(
                        "lost",
                        f"silent for {server.silent_s():.0f} s (silence_s = {fleet.silence_s:g}) with"
                        f" {len(server.flights)} requests running",
                    )
        finally:
            if probe is not None:
                await cancelled([probe])

    async def _question(self) -> None:
        """A connection to it broke: does it answer? Raises ServerError when it does not."""
        server, fleet = self.server, self._fleet
        answer = await server.client.get("/model_info", min(_QUESTION_S, fleet.silence_s))
        if server.state == "suspect":
            self._believe(answer)
            if server.state == "suspect":
                fleet.settle(server)

    def _believe(self, answer: dict[str, Any]) -> None:
        """It answers; but a server that was started anew behind its address has other weights."""
        server, fleet = self.server, self._fleet
        label = answer.get("weight_version")
        if label != str(server.version):
            fleet.distrust(server, f"it serves weights {shown(label)} instead of '{server.version}'")


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and returns when they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
