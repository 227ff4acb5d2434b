"""The servers behind one engine: who serves, who is lost, how they come back, which one a request goes to.

Promises: a request goes only to a server that has the current weights; at most `limit` run on a server; nobody waits
for a server that is lost; a process of ours is started again at most `max_restarts` times, each time later. All
coroutines and methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.client import ServerError, ServerRefused, ServerSilent
from datamodules.inference.sglang.loop_thread import cancel_all
from datamodules.inference.sglang.router import PrefixRouter
from datamodules.inference.sglang.server_state import UP, Flight, Server, Target
from datamodules.inference.sglang.supervisor import Limits, Supervisor
from datamodules.inference.sglang.weights.forms import Weights
from datamodules.inference.sglang.weights.server_weights import Synced, SyncFailed
from datamodules.processes.awake import awake

_log = logging.getLogger(__name__)
_RESTART_POLL_S = 0.5
_LEAVING_POLL_S = 0.02
_ABORT_S = 5.0
_ENDING_S = 5.0  # for a server to end whose scheduler did


class Fleet:
    """Keeps servers, and deals requests to them.

    Args:
        servers: not yet contacted.
        router: chooses among those that serve.
        check: raises WrongModel when a server cannot serve this run's model; called when it joins.
        limits: of every server.
        in_turns: servers share the trainer's GPUs; see `Target`.

    Attributes:
        target: what all servers are to be.
        counts: requests that went on elsewhere, tokens kept of them; prompt tokens of completed requests, and how many
            of those a server had cached.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        router: PrefixRouter,
        check: Callable[[Server], Awaitable[None]],
        limits: Limits,
        in_turns: bool = False,
    ) -> None:
        self.servers = list(servers)
        self.target = Target(in_turns=in_turns)
        self.limits = limits
        self._router = router
        self._check = check
        self._updating = False  # no server is given a request then
        self.counts = {"moved": 0, "kept_tokens": 0, "prompt_tokens": 0, "cached_tokens": 0}
        self._told_ends: set[int] = set()
        self._waiting: deque[tuple[list[int], str, asyncio.Future[Flight]]] = deque()
        self._supervisors: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    # ----------------------------------------------------------------------------------------------- coming and going

    async def start(self, weights: Weights | None) -> None:
        """Returns when every server is up, or those that are not ours and do not answer are known to be lost.

        Without weights they are `ready` then: they serve from the first `update` on.

        Raises:
            GenerationError: a process of ours does not come up, a server cannot serve this model, or none is up within
                `start_s` seconds.
        """
        self.target.give(weights)
        given = (self.target, self.limits, self._check, self._notice)
        self._supervisors = [asyncio.create_task(Supervisor(server, *given).run()) for server in self.servers]
        ends, told = awake() + self.limits.start_s, False
        while True:
            self._changed.clear()
            failed = [s for s in self.servers if s.state == "gone" or (s.process is not None and s.state == "lost")]
            if failed:
                raise GenerationError(f"SGLangEngine.start: {failed[0].name}: {failed[0].error}")
            up = self._up()
            if up and all(server.state in (*UP, "lost") for server in self.servers):
                break
            left = ends - awake()
            if left <= 0:
                break
            if not told and all(server.state == "lost" for server in self.servers):
                told = True
                _log.warning(
                    "no server can be used yet; waiting up to %g s (SGLangEngine.start_timeout_s): start it"
                    " (`arborist serve`), or correct SGLangEngine.urls",
                    self.limits.start_s,
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()
        if not up:
            raise GenerationError(
                f"SGLangEngine.start: no server up within start_timeout_s = {self.limits.start_s:g} s: {self}"
            )
        if len(up) < len(self.servers):
            _log.warning("SGLangEngine starts with %d of %d servers: %s", len(up), len(self.servers), self)

    async def close(self) -> None:
        """Ends supervisors, connections and processes; servers that are not ours continue, without our requests."""
        await cancel_all([*self._supervisors, *self._background])
        await self.target.senders.close()
        self._supervisors = []
        self._refuse("the SGLang engine was closed")
        await asyncio.gather(*(self._leave(server) for server in self.servers))

    async def _leave(self, server: Server) -> None:
        if server.process is None and server.state in UP and self.target.paused:
            try:
                await server.client.resume(_ABORT_S)
            except ServerError as error:
                _log.warning("%s was left paused: %s", server.name, error)
        server.state = "gone"
        await server.disconnect()
        if server.process is not None:
            await asyncio.to_thread(server.process.stop)

    # ---------------------------------------------------------------------------------------------------- requests

    async def acquire(self, tokens: list[int], request_id: str) -> Flight:
        """A place for a prompt, waiting for one if need be; first come, first served. `release` it."""
        future: asyncio.Future[Flight] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, request_id, future))
        self._deal()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise

    def release(self, flight: Flight) -> None:
        flight.server.flights.discard(flight)
        self._deal()

    def tell_of_end(self, server: Server, token: int) -> None:
        """A server stopped at a token at which the request does not; said once a token."""
        if token not in self._told_ends:
            self._told_ends.add(token)
            _log.warning(
                "%s stopped at token %d, which does not end this run's replies: they are continued. If it should, name"
                " it in the eos_token_id of the trained model's generation_config.json, or in the workflow's stop",
                server.client.url,
                token,
            )

    def abort(self, flight: Flight, name: str) -> None:
        """Tells a server, in the background, that nobody waits for a request any more."""

        async def tell() -> None:
            try:
                await flight.server.client.abort(name, _ABORT_S)
            except ServerError as error:
                _log.debug("abort of %s: %s", name, error)

        task = asyncio.create_task(tell())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _deal(self) -> None:
        if all(server.state == "gone" for server in self.servers):
            self._refuse(f"no server is left: {self}")
        while self._waiting and not self.target.paused and not self._updating:
            tokens, request_id, future = self._waiting[0]
            if future.done():  # given up
                self._waiting.popleft()
                continue
            places = {s: len(s.flights) for s in self.servers if s.state == "serving" and len(s.flights) < s.limit}
            if not places:
                return
            self._waiting.popleft()
            server = self._router.choose(tokens, places)
            future.set_result(server.open(request_id))

    def _refuse(self, reason: str) -> None:
        """To all who wait for a place."""
        for _, _, future in self._waiting:
            if not future.done():
                future.set_exception(GenerationError(reason))
        self._waiting.clear()

    def _notice(self, server: Server) -> None:
        """A server's state changed."""
        if server.state not in UP:
            self._router.forget(server)
        self._changed.set()
        self._deal()

    # ----------------------------------------------------------------------------------------------------- control

    async def pause(self, deadline_s: float) -> None:
        """No forward pass runs on any server when it returns; a server that does not answer is lost. In turns none has
        memory of its GPU: those that were coming up come up first, within their own deadlines, and leave.

        Raises:
            GenerationError: one of them did neither.
        """
        self.target.paused = True
        if not self.target.in_turns:
            await asyncio.gather(*(self._tell(s, s.client.pause(deadline_s)) for s in self._up()))
            return
        await asyncio.gather(*(self._tell(s, s.weights.leave(deadline_s)) for s in self._up()))
        ends = awake() + deadline_s + self.limits.start_s + self.limits.update_s
        while staying := [server for server in self.servers if not server.left]:
            if awake() > ends:
                raise GenerationError(f"{staying[0].name} keeps its GPU's memory, which the trainer needs: {self}")
            await asyncio.sleep(_LEAVING_POLL_S)

    async def resume(self, deadline_s: float) -> None:
        if self.target.paused:
            await asyncio.gather(*(self._tell(s, self._go_on(s, deadline_s)) for s in self._up()))
            self.target.paused = False
            self._deal()

    async def _go_on(self, server: Server, deadline_s: float) -> None:
        await server.weights.come_back(deadline_s)
        await server.client.resume(deadline_s)

    async def update(self, weights: Weights, deadline_s: float) -> list[Synced]:
        """New weights for all that are up, at the same time; those that fail are brought to them anew, later.

        Where none is up, or those that were ended in it, or did not answer while others are lost, the new weights wait
        for the first that comes back. Those that are there and did not answer in time may never do so in that time.

        Raises:
            GenerationError: there were servers and every one failed; the old weights are the current ones again.
        """
        old, self._updating = self.target.weights, True
        self.target.give(weights)
        servers = self._up()
        restarts = [server.restarts for server in servers]
        try:
            results = await asyncio.gather(*(self._bring(server, weights, deadline_s) for server in servers))
            done = [result for result in results if isinstance(result, Synced)]
            failures = [result for result in results if isinstance(result, SyncFailed)]
            if failures and not done and all(failure.lost for failure in failures):
                away = len(servers) < len(self.servers)
                stays = partial(self._stays_without, weights)
                if away or not any(await asyncio.gather(*map(stays, servers, restarts))):
                    failures = []
            if failures and not done:
                self.target.weights = old
            for server in servers:
                if server.state == "updating":  # those that succeeded, and those that were not touched
                    server.settle(self.target.weights)
            if failures and not done:
                raise failures[0]
            if not done and not any(server.holds is weights for server in servers):
                _log.warning("version %d: no server serves now; those that come back get it: %s", weights.version, self)
            return done
        finally:
            self._updating = False
            self._router.forget()
            self._changed.set()
            self._deal()

    async def _bring(self, server: Server, weights: Weights, deadline_s: float) -> Synced | SyncFailed | None:
        if server.state not in UP:  # its supervisor found it lost since it was chosen, and works on it now
            return None
        server.enter("updating")
        held, server.holds = server.holds, None
        try:
            target = self.target
            synced = await server.weights.bring(weights, deadline_s, target.senders, stay_paused=target.paused)
        except SyncFailed as error:
            if error.dirty:
                server.distrust(str(error))
            elif server.state == "updating":
                server.holds, server.error = held, str(error)
            return error
        except Exception as error:  # a fault of ours: nobody knows what it holds
            _log.exception("%s: its update failed", server.name)
            server.distrust(f"{type(error).__name__}: {error}")
            return SyncFailed(f"{server.name}: {type(error).__name__}: {error}", dirty=True)
        if server.state == "updating":
            server.holds = weights
        return synced

    async def _stays_without(self, weights: Weights, server: Server, restarts: int) -> bool:
        """Whether a server that was lost in the update to them is there after all, if only silent, as it was when its
        process had been started `restarts` times. One that lost a part of itself takes a moment to end."""
        ends, is_there = awake() + _ENDING_S, True
        while awake() < ends:
            ended = server.restarts > restarts or (server.process is not None and not server.process.running)
            if ended or server.holds is weights:  # its supervisor tried again
                return False
            try:
                await server.client.get("/model_info", _ENDING_S)
                is_there = True
            except ServerError as error:
                is_there = isinstance(error, ServerRefused | ServerSilent)
            await asyncio.sleep(_RESTART_POLL_S)
        return is_there

    async def restart(self, server: Server) -> None:
        """Ends a process of ours and returns when it serves again. Raises GenerationError when it does not in time."""
        restarts = server.restarts
        server.enter("lost", "a restart was asked for")
        ends = awake() + self.limits.start_s
        while server.state not in UP or server.restarts == restarts:
            if server.state == "gone" or awake() > ends:
                raise GenerationError(f"{server.name} does not serve again: {server.state}, {server.error}")
            await asyncio.sleep(_RESTART_POLL_S)

    async def _tell(self, server: Server, call: Awaitable[None]) -> None:
        try:
            await call
        except GenerationError as error:
            server.enter("lost", str(error))
            self._notice(server)

    @property
    def version(self) -> int:
        """Of the weights all servers are to have; -1 before the first."""
        return -1 if self.target.weights is None else self.target.weights.version

    def _up(self) -> list[Server]:
        return [server for server in self.servers if server.state in UP]

    def __str__(self) -> str:
        return "; ".join(f"{s.name} {s.client.url} {s.state}{f' ({s.error})' if s.error else ''}" for s in self.servers)
