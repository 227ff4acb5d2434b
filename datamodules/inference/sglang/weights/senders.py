"""Ranks that send weights beside rank 0, which alone talks to servers: each has servers of its own to send to.

    rank 0: invite ── address, token ──> ranks: join (`sending_rank.py`)
    an update:  have? ──> each holds the version still     open, join, stage, broadcast ──> over its own group
                over  ──> each goes on

Without them 64 servers take 64 copies of the weights from one link. A line of JSON asks and one answers, over a
connection a rank; tensors never travel on it. Promises: a rank sends what rank 0 would (the tables of both are
compared) or nothing; one that cannot (it sees no files, servers do not reach it, it is gone) is named once, and rank 0
sends in its place; a server stays with its sender; who has no token is not answered.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from datamodules.inference.protocol import GenerationError, Invitation
from datamodules.inference.sglang.loop_thread import cancel_all
from datamodules.inference.sglang.weights.forms import Bucket, HostWeights, Weights
from datamodules.inference.sglang.weights.update_group import Deadline

_log = logging.getLogger(__name__)
_HAVE_S = 60.0  # for a rank to come to the same version
_JOIN_S = 60.0  # for a server to reach a rank
_HELLO_S = 10.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


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
    return urlsplit(url).hostname in _LOOPBACK


class Peer:
    """Another rank that sends, as rank 0 sees it.

    Attributes:
        rank: of the trainer.
        host: see `this_host`.
        lost: why it sends no more; "" while it does.
        sent: bytes it has sent to servers.
    """

    def __init__(self, rank: int, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.rank, self.host, self.lost = rank, host, ""
        self.sent = 0
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
            async with asyncio.timeout(seconds):
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
        except (OSError, ValueError, KeyError) as error:
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
    """A process group of another rank and the ranks of one server, with the methods of an `UpdateGroup`."""

    def __init__(self, peer: Peer, opened: dict[str, Any]) -> None:
        self.peer = peer
        self.name: str = opened["name"]
        self.backend: str = opened["backend"]
        self.address: str = opened["address"]
        self.port: int = opened["port"]

    @classmethod
    async def open(cls, peer: Peer, url: str, size: int, on_gpu: bool, deadline: Deadline) -> PeerGroup:
        left = deadline.left(f"rank {peer.rank} to open a process group")
        return cls(peer, await peer.ask("open", left, url=url, size=size, on_gpu=on_gpu))

    async def join(self, deadline: Deadline) -> None:
        await self._ask("join", deadline.at_most(_JOIN_S))

    async def stage(self, bucket: Bucket, deadline: Deadline) -> None:
        await self._ask("stage", deadline, bucket=bucket.names[0])

    async def broadcast(self, deadline: Deadline) -> None:
        answer = await self._ask("broadcast", deadline)
        self.peer.sent += answer["bytes"]

    def close(self) -> None:
        self.peer.tell("close", group=self.name)

    async def _ask(self, do: str, deadline: Deadline, **options: Any) -> dict[str, Any]:
        return await self.peer.ask(do, deadline.left(f"rank {self.peer.rank} to {do}"), group=self.name, **options)


@dataclass(frozen=True)
class _Dealt:
    """A server's sender; None is rank 0 itself."""

    peer: Peer | None


class Senders:
    """Rank 0's side. Made with its engine; coroutines and `choose` run on the engine's loop."""

    def __init__(self) -> None:
        self._peers: dict[int, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._token = ""
        self._expected: set[int] = set()
        self._awaited: set[int] = set()
        self._came = asyncio.Event()
        self._over = -1
        self._lent: HostWeights | None = None
        self._able: list[Peer] = []
        self._dealt: WeakKeyDictionary[object, _Dealt] = WeakKeyDictionary()
        self._named: set[str] = set()

    async def invite(self, ranks: list[int], host: str) -> Invitation:
        """What those ranks `join` with; `host`: where they reach this process, as they know it."""
        self._token = self._token or secrets.token_hex(32)
        self._awaited |= set(ranks) - self._expected
        self._expected |= set(ranks)
        if self._server is None:
            try:
                self._server = await asyncio.start_server(self._welcome, host, 0)
            except OSError:  # its name is that of an address in front of this machine
                self._server = await asyncio.start_server(self._welcome, None, 0)
        return Invitation(host, self._server.sockets[0].getsockname()[1], self._token, tuple(ranks))

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HELLO_S):
                said = json.loads(await reader.readline())
            rank, host = said["rank"], said["host"]
            known = hmac.compare_digest(str(said["token"]).encode(), self._token.encode()) and rank in self._expected
        except (TimeoutError, OSError, ValueError, KeyError, TypeError):
            known = False
        if not known:
            writer.close()
            return
        peer = self._peers[rank] = Peer(rank, str(host), reader, writer)
        peer.tell("over", version=self._over)  # one that comes late does not wait for what has been
        self._awaited.discard(rank)
        self._came.set()
        task = asyncio.create_task(peer.listen())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def lend(self, weights: Weights, seconds: float) -> None:
        """Asks all ranks to hold the version of these weights still, until `over`; returns when all have, or cannot."""
        if not isinstance(weights, HostWeights):
            return
        await self._all_here()
        peers = [peer for peer in self._peers.values() if not peer.lost]
        path = None if weights.path is None else str(weights.path.absolute())
        options = {"version": weights.version, "table": weights.table, "path": path}

        async def able(peer: Peer) -> bool:
            try:
                await peer.ask("have", min(_HAVE_S, seconds), **options)
            except GenerationError as error:
                self._name(str(error))
                return False
            return True

        found = await asyncio.gather(*(able(peer) for peer in peers))
        self._able = [peer for peer, one in zip(peers, found, strict=True) if one]
        self._lent = weights

    async def _all_here(self) -> None:
        """Waits for ranks that were invited and are on their way."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_HAVE_S):
                while self._awaited:
                    self._came.clear()
                    await self._came.wait()
        for rank in sorted(self._awaited):
            self._name(f"rank {rank}: it did not come within {_HAVE_S:g} s")
        self._awaited.clear()  # it may still come

    def over(self, version: int) -> None:
        """The ranks go on. Servers that come later are sent this version by rank 0."""
        self._lent, self._able, self._over = None, [], version
        for peer in self._peers.values():
            peer.tell("over", version=version)

    def choose(self, server: object, url: str, weights: HostWeights) -> Peer | None:
        """Who sends these weights to a server; None: this process."""
        if weights is not self._lent:
            return None
        here = this_host() if on_this_host(url) else ""
        able = [None, *(peer for peer in self._able if not peer.lost and here in ("", peer.host))]
        dealt = self._dealt.get(server)
        if dealt is not None and dealt.peer in able:
            return dealt.peer
        taken = [one.peer for one in self._dealt.values()]
        chosen = min(able, key=taken.count)
        self._dealt[server] = _Dealt(chosen)
        return chosen

    def avoid(self, server: object, url: str, reason: str) -> None:
        """Its sender could not reach it, or the other way round: rank 0 sends from now on."""
        self._name(f"{url}: {reason}")
        self._dealt[server] = _Dealt(None)

    def report(self) -> list[dict[str, Any]]:
        """Plain values for health reports, of the other ranks."""
        dealt = [one.peer for one in self._dealt.values()]
        return [
            {"rank": peer.rank, "servers": dealt.count(peer), "bytes": peer.sent, "error": peer.lost}
            for _, peer in sorted(self._peers.items())
        ]

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        await cancel_all(self._tasks)
        self._peers, self._token = {}, ""
        self._expected, self._awaited = set(), set()
        self._able, self._lent = [], None

    def _name(self, problem: str) -> None:
        if problem not in self._named:
            self._named.add(problem)
            _log.warning("%s; rank 0 sends weights in its place", problem)
