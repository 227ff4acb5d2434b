"""One server of a fleet, as the trainer sees it: its state, its weights, the requests it runs.

    starting -> joining -> serving <-> updating, suspect
    serving -> dirty -> joining        any -> lost -> starting or joining        any -> gone

Promises: plain bookkeeping, used from one event loop; requests on a server that is lost learn of it at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.client import ServerClient, shown
from datamodules.inference.sglang.launcher import ServerProcess
from datamodules.inference.sglang.weights.forms import AdapterWeights, Weights, from_a_run
from datamodules.inference.sglang.weights.senders import Senders
from datamodules.inference.sglang.weights.server_weights import ServerWeights
from datamodules.processes.awake import awake

State = Literal["starting", "joining", "ready", "serving", "updating", "suspect", "dirty", "lost", "gone"]
ONE_RUN = "a server belongs to one run at a time; name others in SGLangEngine.urls"
UP = ("ready", "serving", "updating", "suspect")  # it works; requests may be running
_MOST_VERSIONS = 10_000  # that are known by their labels; no request lives through so many


class WrongModel(GenerationError):
    """A server that cannot serve this run's model, now or later."""


@dataclass
class Target:
    """What every server of a fleet is to be: kept by the fleet, read by whoever supervises a server.

    Attributes:
        weights: those they are to have; None while they wait for the first.
        paused: whether they are to stand still.
        in_turns: whether they give up their GPU's memory while they do: the trainer computes there then.
        senders: the other ranks that send weights.
        versions: of the weights that servers were to have so far, the last 10,000 of them, by their labels.
    """

    weights: Weights | None = None
    paused: bool = False
    in_turns: bool = False
    senders: Senders = field(default_factory=Senders)
    versions: dict[str, int] = field(default_factory=dict)

    def give(self, weights: Weights | None) -> None:
        """From now on servers are to have these; what they were to have before may still be under way."""
        self.weights = weights
        if weights is not None:
            self.versions[weights.label] = weights.version
            if len(self.versions) > _MOST_VERSIONS:
                del self.versions[next(iter(self.versions))]


class Flight:
    """One request on one server, with the adapter that was the newest when it came, if adapters are what servers are
    given. `taken_away` says why it cannot end there; its task is cancelled then."""

    def __init__(self, server: Server, request_id: str) -> None:
        self.server = server
        self.adapter = server.holds if isinstance(server.holds, AdapterWeights) else None
        self.request_id = request_id
        self.began = awake()
        self.task: asyncio.Task[Any] | None = None
        self.taken_away = ""

    def take_away(self, reason: str) -> None:
        if not self.taken_away:
            self.taken_away = reason
            if self.task is not None:
                self.task.cancel()


class Server:
    """A server given by its address, or one of ours (`process`).

    Attributes:
        state: `starting` (its process comes up), `joining` (it gets the current weights), `ready` (no weights were
            given yet), `serving`, `updating`, `suspect` (a connection broke: no new requests until it answers),
            `dirty` (it answers, its weights are not the current ones), `lost` (to be found or started again), `gone`
            (given up).
        holds: the weights it has, None when not known.
        limit: most requests it runs at a time.
        error: what went wrong last; "" while it serves.
        restarts: of its process, since the start.
        below: label of its model as it joined, which adapters are on.
    """

    def __init__(self, name: str, client: ServerClient, process: ServerProcess | None, limit: int) -> None:
        self.name = name
        self.process = process
        self.limit = limit
        self.state: State = "starting" if process is not None else "joining"
        self.holds: Weights | None = None
        self.error = ""
        self.restarts = 0
        self.below = ""
        self.incremental = False
        self.max_context = 0
        self.flights: set[Flight] = set()
        self.client = client
        self.weights = ServerWeights(client)
        self.changed = asyncio.Event()
        self.answered = self.progressed = self.since = awake()

    async def reconnect(self, client: ServerClient) -> None:
        """Its process listens elsewhere now."""
        await self.disconnect()
        self.client = client
        self.weights = ServerWeights(client)
        self.holds = None

    @property
    def version(self) -> int:
        """Of its weights; -1 when not known."""
        return -1 if self.holds is None else self.holds.version

    def look_at(self, answer: dict[str, Any]) -> None:
        """It answers `question`; but one that was started anew behind its address has not the weights it was given."""
        if isinstance(self.holds, AdapterWeights):
            found = answer.get("data")
            names = [one.get("id") for one in found if isinstance(one, dict)] if isinstance(found, list) else []
            if self.holds.label not in names:
                self.distrust(f"it no longer has adapter '{self.holds.label}'")
        elif self.holds is None or answer.get("weight_version") != self.holds.label:
            self.meet(answer.get("weight_version"))

    def meet(self, label: object) -> None:
        """It serves other weights than it was given, called so: it is loaded anew. Where another run gave them, it is
        left to that: two that load one server in turn can get each other's weights under their own label. Below an
        adapter it cannot be loaded: it joins anew, if it can."""
        what = f"it serves weights {shown(label)}, which"
        if self.state not in UP:
            return
        if isinstance(self.holds, AdapterWeights):
            self.enter("lost", f"{what} are not those below its adapters")
        elif self.process is None and from_a_run(label):
            self.enter("gone", f"{what} another run gave it: {ONE_RUN}")
        else:
            self.distrust(f"{what} this run did not give it: it was started anew, or something else updates it")

    @property
    def left(self) -> bool:
        """Whether it has nothing in its GPU's memory."""
        ended = self.state in ("lost", "gone") and (self.process is None or not self.process.running)
        return ended or self.weights.away

    @property
    def question(self) -> str:
        """What to ask for its weights."""
        return "/v1/models" if isinstance(self.holds, AdapterWeights) else "/model_info"

    async def disconnect(self) -> None:
        await self.weights.close()
        await self.client.close()

    def enter(self, state: State, error: str = "") -> None:
        """Changes the state; requests leave a server that is not up any more."""
        self.state, self.error = state, error
        self.since = awake()
        self.alive()
        if state not in UP:
            for flight in list(self.flights):
                flight.take_away(error)
        self.changed.set()

    def settle(self, weights: Weights | None) -> None:
        """Back to work, if it has the weights it should have."""
        if weights is None:
            self.enter("ready")
        elif self.holds is weights:
            self.enter("serving")
        else:
            self.distrust(f"it has version {self.version} still{f': {self.error}' if self.error else ''}")

    def suspect(self, reason: str) -> None:
        """A request met a broken connection: perhaps the server's end, which its supervisor is to find out."""
        if self.state == "serving":
            self.enter("suspect", reason)

    def distrust(self, reason: str) -> None:
        """It has other weights than it should: its requests go elsewhere and it is loaded anew."""
        if self.state in UP:
            self.holds = None
            self.enter("dirty", reason)

    def alive(self) -> None:
        """It gave a sign of life, or has had no chance to."""
        self.answered = self.progressed = awake()

    def open(self, request_id: str) -> Flight:
        """Gives the request a place."""
        if not self.flights:
            self.progressed = awake()
        flight = Flight(self, request_id)
        self.flights.add(flight)
        return flight

    def silent_s(self) -> float:
        """Seconds without an answer, or, while it runs requests, without progress in any of them."""
        now = awake()
        return max(now - self.answered, now - self.progressed if self.flights else 0.0)

    def report(self) -> dict[str, Any]:
        """Plain values for health reports."""
        return {
            "url": self.client.url,
            "state": self.state,
            "version": self.version,
            "running": len(self.flights),
            "seconds": round(awake() - self.since, 1),
            "silent_s": round(self.silent_s(), 1),
            "restarts": self.restarts,
            "error": self.error,
        }
