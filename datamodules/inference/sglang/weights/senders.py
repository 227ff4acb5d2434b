"""Ranks that send weights beside rank 0, which alone talks to servers: each has servers of its own to send to.

    rank 0: invite ── address, token ──> ranks: join (`sending_rank.py`)
    an update:  have? ──> each holds the version still     open, join, stage, broadcast ──> over its own group
                over  ──> each goes on

Without them 64 servers take 64 copies of the weights from one link. A line of JSON asks and one answers, over a
connection a rank; tensors never travel on it. Promises: a rank sends what rank 0 would (tables and files of both are
compared, and every request names its version) or nothing; in the place of one that cannot, rank 0 sends, and says so;
a server stays with its sender; machines of other ranks are tried by one server at a time, and no more after the first
that does not reach one, for a server that waits for a process group may wait for long; who has no token is not
answered.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import itertools
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from datamodules.inference.protocol import GenerationError, Invitation
from datamodules.inference.sglang.client import ServerError
from datamodules.inference.sglang.loop_thread import cancel_all
from datamodules.inference.sglang.weights.forms import Bucket, HostWeights, Weights
from datamodules.inference.sglang.weights.update_group import Deadline, new_name
from datamodules.processes.deadline import deadline as within

_log = logging.getLogger(__name__)
_HAVE_S = 60.0  # for ranks to come, and to come to the same version
_JOIN_S = 60.0  # for a server to reach a rank
_HELLO_S = 10.0
_FAILURES = 3  # of a rank with one server, after which rank 0 keeps that


def this_host() -> str:
    """What processes that reach each other over loopback have in common."""
    found = [socket.gethostname()]
    with suppress(OSError):  # not every system has them
        with open("/proc/sys/kernel/random/boot_id") as file:
            found.append(file.read().strip())
        found.append(os.readlink("/proc/self/ns/net"))
    return " ".join(found)


def on_this_host(url: str) -> bool:
    """Whether an address is loopback's."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """An end that is lost without a word is noticed within a few minutes, and what only watches stays open."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Peer:
    """Another rank that sends, as rank 0 sees it.

    Attributes:
        rank: of the trainer.
        host: see `this_host`.
        lost: why it sends no more; "" while it does.
        servers, sent: how many are dealt to it, and the bytes it has sent, for reports.
    """

    def __init__(self, rank: int, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.rank, self.host, self.lost = rank, host, ""
        self.servers = self.sent = 0
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def ask(self, do: str, seconds: float, **options: Any) -> dict[str, Any]:
        """Its answer. Raises GenerationError: it cannot, it is gone, or it did not answer in time."""
        if self.lost:
            raise GenerationError(f"rank {self.rank}: {self.lost}")
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.tell(do, number=number, seconds=seconds, **options)
            async with within(seconds):
                return await answer
        except TimeoutError as error:
            raise GenerationError(f"rank {self.rank}: no answer to '{do}' within {seconds:g} s") from error
        finally:
            del self._asked[number]

    def tell(self, do: str, **options: Any) -> None:
        if not self.lost:
            self._writer.write(json.dumps({"do": do, **options}).encode() + b"\n")

    async def listen(self) -> None:
        """Takes its answers, until it is gone."""
        try:
            while line := await self._reader.readline():
                said = json.loads(line)
                waiting = self._asked.get(said.pop("number"))
                if waiting is None or waiting.done():
                    continue
                if error := said.get("error"):
                    waiting.set_exception(GenerationError(f"rank {self.rank}: {error}"))
                else:
                    waiting.set_result(said)
            self._lose("it closed its connection")
        except Exception as error:
            self._lose(f"its connection broke: {error}")
        finally:
            self._lose("rank 0 closed its connection")
            self._writer.close()

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(GenerationError(f"rank {self.rank}: {why}"))


class PeerGroup:
    """A process group of another rank and the ranks of one server, with the methods of an `UpdateGroup`; made by
    `open`.

    Attributes:
        version: of the weights that it sends now.
    """

    address: str
    port: int
    backend: str

    def __init__(self, peer: Peer) -> None:
        self.peer, self.name, self.version = peer, new_name(), -1

    async def open(self, url: str, size: int, version: int, on_gpu: bool, deadline: Deadline) -> None:
        opened = await self._ask("open", deadline, url=url, size=size, version=version, on_gpu=on_gpu)
        self.address, self.port, self.backend = opened["address"], opened["port"], opened["backend"]

    async def join(self, deadline: Deadline) -> None:
        await self._ask("join", deadline.at_most(min(_JOIN_S, deadline.seconds / 3)))

    async def stage(self, bucket: Bucket, deadline: Deadline) -> None:
        await self._ask("stage", deadline, bucket=bucket.names[0], version=self.version)

    async def broadcast(self, deadline: Deadline) -> None:
        answer = await self._ask("broadcast", deadline)
        self.peer.sent += answer["bytes"]

    def close(self) -> None:
        self.peer.tell("close", group=self.name)

    async def _ask(self, do: str, deadline: Deadline, **options: Any) -> dict[str, Any]:
        return await self.peer.ask(do, deadline.left(f"rank {self.peer.rank} to {do}"), group=self.name, **options)


@dataclass
class _Dealt:
    """A server's sender, None being rank 0; and how often it failed, lately for which weights."""

    peer: Peer | None
    failures: int = 0
    failed: HostWeights | None = None


class Senders:
    """Rank 0's side. Made with its engine; coroutines and `choose` run on the engine's loop."""

    def __init__(self) -> None:
        self._peers: dict[int, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._token = ""
        self._expected: set[int] = set()
        self._awaited: set[int] = set()
        self._came = asyncio.Event()
        self._over = -1
        self._lent: HostWeights | None = None
        self._able: list[Peer] = []
        self._dealt: WeakKeyDictionary[object, _Dealt] = WeakKeyDictionary()
        self._trying = asyncio.Lock()
        self._reached = {this_host()}
        self._unreached = ""
        self._named: set[str] = set()

    async def invite(self, ranks: list[int], address: str, listener: socket.socket) -> Invitation:
        """What those ranks `join` with; `address`: of the listener, as they know it."""
        if self._server is None:
            self._token, self._port = secrets.token_hex(32), listener.getsockname()[1]
            self._server = await asyncio.start_server(self._welcome, sock=listener)
        else:
            listener.close()
        self._awaited |= set(ranks) - self._expected
        self._expected |= set(ranks)
        return Invitation(address, self._port, self._token, tuple(ranks))

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HELLO_S):
                said = json.loads(await reader.readline())
            rank, host = said["rank"], said["host"]
            known = hmac.compare_digest(str(said["token"]).encode(), self._token.encode()) and rank in self._expected
        except Exception:  # whatever a stranger may send
            known = False
        if not known:
            writer.close()
            return
        keep_alive(writer)
        peer = self._peers[rank] = Peer(rank, str(host), reader, writer)
        peer.tell("over", version=self._over)  # one that comes late does not wait for what has been
        self._awaited.discard(rank)
        self._came.set()
        task = asyncio.create_task(peer.listen())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def lend(self, weights: Weights, seconds: float) -> float:
        """Asks all ranks to hold the version of these weights still, until `over`; returns when all have, or cannot:
        the seconds it took."""
        if not isinstance(weights, HostWeights) or not self._expected:
            return 0.0
        began = time.monotonic()
        deadline = Deadline(min(_HAVE_S, seconds))
        await self._all_here(deadline)
        peers = [peer for peer in self._peers.values() if not peer.lost]
        path = None if weights.path is None else str(weights.path.absolute())
        options = {"version": weights.version, "table": weights.table, "path": path}

        async def able(peer: Peer) -> bool:
            try:
                await peer.ask("have", deadline.left("ranks that send weights"), **options)
            except GenerationError as error:
                self._name(f"rank {peer.rank}", str(error))
                return False
            return True

        found = await asyncio.gather(*(able(peer) for peer in peers))
        self._able = [peer for peer, one in zip(peers, found, strict=True) if one]
        self._lent = weights
        return time.monotonic() - began

    async def _all_here(self, deadline: Deadline) -> None:
        """Waits for ranks that were invited and are on their way."""
        if self._awaited:
            with suppress(TimeoutError):
                async with within(deadline.seconds / 2):
                    while self._awaited:
                        self._came.clear()
                        await self._came.wait()
        for rank in sorted(self._awaited):
            self._name(f"rank {rank}", f"rank {rank}: it did not come in {deadline.seconds / 2:g} s")
        self._awaited.clear()  # it may still come

    def over(self, version: int) -> None:
        """The ranks go on. Servers that come later are sent this version by rank 0."""
        self._lent, self._able, self._over = None, [], version
        for dealt in self._dealt.values():
            dealt.failed = None  # which holds a whole copy
        for peer in self._peers.values():
            peer.tell("over", version=version)

    def choose(self, server: object, url: str, weights: HostWeights) -> Peer | None:
        """Who sends these weights to a server; None: this process. Only for updates that end before `over`."""
        if weights is not self._lent:
            return None
        live = [peer for _, peer in sorted(self._peers.items()) if not peer.lost and self._reaches(url, peer)]
        able = [peer for peer in live if peer in self._able]
        dealt = self._dealt.get(server)
        if dealt is None or (dealt.peer is not None and (dealt.peer not in live or dealt.failures >= _FAILURES)):
            taken = [one.peer for one in self._dealt.values()]
            pool = live if dealt is None else able  # one that is late once is no worse than others
            dealt = self._dealt[server] = _Dealt(min([None, *pool], key=taken.count))
            self._count()
        if dealt.peer in able and dealt.failed is not weights:
            return dealt.peer
        if dealt.failed is not weights:
            dealt.failures, dealt.failed = dealt.failures + 1, weights
        return None

    def _reaches(self, url: str, peer: Peer) -> bool:
        if on_this_host(url) and peer.host != this_host():
            return False
        return not self._unreached or peer.host in self._reached

    def avoid(self, server: object, url: str, weights: HostWeights, reason: str) -> None:
        """Rank 0 sends these weights, for its sender did not; after a few times, all."""
        dealt = self._dealt.get(server)
        if dealt is None or dealt.peer is None:
            return
        self._name(url, f"{url}, by rank {dealt.peer.rank}: {reason}")
        dealt.failures, dealt.failed = dealt.failures + 1, weights
        if dealt.failures >= _FAILURES:
            dealt.peer = None
            self._count()

    def did(self, server: object) -> None:
        """It has its weights: what failed before was for once."""
        dealt = self._dealt.get(server)
        if dealt is not None and dealt.failed is None:
            dealt.failures = 0

    @asynccontextmanager
    async def trial(self, peer: Peer, deadline: Deadline) -> AsyncIterator[None]:
        """Around a server's joining the group of a rank: on a machine that none has reached yet, one at a time.

        Raises:
            GenerationError: one did not reach such a machine, or had not yet when a third of the deadline was over.
        """
        if peer.host in self._reached:
            yield
            return
        try:
            async with within(min(_JOIN_S, deadline.seconds / 3)):
                await self._trying.acquire()
        except TimeoutError as error:
            raise GenerationError("not tried, while another server tried to reach its machine") from error
        try:
            if self._unreached and peer.host not in self._reached:
                raise GenerationError(f"not tried, {self._unreached}")
            try:
                yield
            except ServerError:  # of the server, which answers, or is gone
                raise
            except GenerationError:
                self._unreached = f"since a server did not reach the machine of rank {peer.rank}"
                raise
            self._reached.add(peer.host)
        finally:
            self._trying.release()

    def report(self) -> list[dict[str, Any]]:
        """Plain values for health reports, of the other ranks; from any thread."""
        return [
            {"rank": peer.rank, "servers": peer.servers, "bytes": peer.sent, "error": peer.lost}
            for _, peer in sorted(list(self._peers.items()))
        ]

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        await cancel_all(self._tasks)
        self._peers, self._expected, self._awaited = {}, set(), set()
        self._able, self._lent = [], None

    def _count(self) -> None:
        taken = [one.peer for one in self._dealt.values()]
        for peer in self._peers.values():
            peer.servers = taken.count(peer)

    def _name(self, who: str, problem: str) -> None:
        """Once for each, whatever it is the next time."""
        if who not in self._named:
            self._named.add(who)
            _log.warning("%s; rank 0 sends weights in its place (to ask no other rank: WeightSync.senders: 1)", problem)
