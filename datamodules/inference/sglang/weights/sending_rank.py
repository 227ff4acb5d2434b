"""A rank that sends weights beside rank 0: what it is asked for over its connection, it does (`senders.py`).

Promises: it sends the version it was lent, while `lend` lasts, and nothing else; files, where the weights are in some,
it reads by itself; `lend` returns when rank 0 says that the update is over, or is not connected any more, and nothing
that is read of the parameters after that is sent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.inference.protocol import GenerationError, Invitation, WeightSenders
from datamodules.inference.sglang.loop_thread import LoopThread, cancel_all
from datamodules.inference.sglang.weights.forms import HostWeights
from datamodules.inference.sglang.weights.senders import Senders, keep_alive, on_this_host, this_host
from datamodules.inference.sglang.weights.update_group import Deadline, UpdateGroup, on_thread
from datamodules.processes.deadline import deadline as within

_log = logging.getLogger(__name__)
_CONNECT_S = 60.0
_CLOSE_S = 10.0


class SendingRank:
    """Connects as it is made.

    Args:
        invitation: rank 0's.
        rank: this one's.

    Raises:
        GenerationError: rank 0 is not reached.
    """

    def __init__(self, invitation: Invitation, rank: int) -> None:
        self.invitation = invitation
        self._rank = rank
        self._thread = LoopThread("weights-sender")
        # Of the loop alone.
        self._changed = asyncio.Event()
        self._lent: HostWeights | None = None
        self._version = self._over = -1  # lent, and gone through
        self._groups: dict[str, UpdateGroup] = {}
        self._lost = self._why = ""
        self._told = False
        self._copying = 0  # threads that read parameters
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            self._thread.call(self._connect(), 2 * _CONNECT_S)
        except BaseException:
            self._thread.stop(_CLOSE_S)
            raise

    def lend(self, version: int, weights: Callable[[], dict[str, Tensor]] | None, deadline_s: float) -> None:
        """Holds a version still until rank 0 has brought it to the servers, and sends it where it is asked to. Without
        a connection to rank 0 it holds nothing: rank 0 sends in its place.

        Args:
            weights: makes it, as `export.checkpoint_weights` has it; None where rank 0 has it in files.

        Raises:
            GenerationError: rank 0 was not done within the deadline.
        """
        lent, why = None, "" if weights is None else "it has no weights"
        try:
            lent = None if weights is None or self._lost else HostWeights.live_in(weights(), version)
        except Exception as error:  # rank 0 makes them too: it ends the run, or sends in its place
            why = f"it cannot make its weights: {error}"
        self._thread.call(self._hold(version, lent, why, deadline_s), deadline_s + _CLOSE_S)

    def close(self) -> None:
        with suppress(GenerationError, TimeoutError):
            self._thread.call(self._shut(), _CLOSE_S)
            self._thread.stop(_CLOSE_S)

    # ------------------------------------------------------------------------------------------------- on the loop

    async def _connect(self) -> None:
        where = f"rank 0 at {self.invitation.address}:{self.invitation.port}"
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(self.invitation.address, self.invitation.port)
        except (OSError, TimeoutError) as error:
            raise GenerationError(
                f"rank {self._rank} cannot help to send weights: {where}: {error or 'no connection in time'}; set"
                " WeightSync.senders: 1 if ranks do not reach each other"
            ) from error
        hello = {"rank": self._rank, "host": this_host(), "token": self.invitation.token}
        keep_alive(writer)
        writer.write(json.dumps(hello).encode() + b"\n")
        self._keep(self._serve(reader, writer))

    async def _hold(self, version: int, lent: HostWeights | None, why: str, deadline_s: float) -> None:
        self._lent, self._why, self._version = lent, why, version
        self._changed.set()
        try:
            async with within(deadline_s):
                # What is being copied from parameters has to be what they are now.
                while (self._over < version and not self._lost) or self._copying:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise GenerationError(f"rank 0 did not end the update to version {version} in {deadline_s:g} s") from error
        finally:
            self._lent, self._version = None, -1
        if self._lost and not self._told:
            self._told = True
            _log.warning(
                "rank %d sends no weights any more: rank 0, which does, is not connected: %s", self._rank, self._lost
            )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        why = "it closed the connection"
        try:
            while line := await reader.readline():
                asked = json.loads(line)
                if asked["do"] == "over":
                    self._over = max(self._over, asked["version"])
                    self._changed.set()
                elif asked["do"] == "close":
                    self._close(asked["group"])
                else:
                    self._keep(self._answer(asked, writer))
        except Exception as error:
            why = f"the connection broke: {error}"
        finally:
            self._lost = why
            self._changed.set()
            for name in list(self._groups):
                self._close(name)
            writer.close()

    async def _answer(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            said = await self._do(asked, Deadline(asked["seconds"]))
        except GenerationError as error:
            said = {"error": str(error)}
        except Exception as error:  # whatever it is, rank 0 waits for an answer
            said = {"error": f"{type(error).__name__}: {error}"}
        writer.write(json.dumps({"number": asked["number"], **said}).encode() + b"\n")

    async def _do(self, asked: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        if asked["do"] == "have":
            await self._have(asked, deadline)
            return {}
        if asked["do"] == "open":
            lent = self._held(asked["version"])
            device = lent.device if asked["on_gpu"] else torch.device("cpu")
            group = UpdateGroup(asked["url"], asked["group"], asked["size"], device)
            self._groups[group.name] = group
            return {"backend": group.backend, "address": group.address, "port": group.port}
        found = self._groups.get(asked["group"])
        if found is None:
            raise GenerationError(f"it has no process group {asked['group']}")
        if asked["do"] == "join":
            await found.join(deadline)
        elif asked["do"] == "stage":
            await self._stage(found, asked, deadline)
        else:
            sent = found.sent
            await found.broadcast(deadline)
            return {"bytes": found.sent - sent}
        return {}

    async def _stage(self, group: UpdateGroup, asked: dict[str, Any], deadline: Deadline) -> None:
        lent = self._held(asked["version"])
        bucket = next(one for one in lent.buckets if one.names[0] == asked["bucket"])
        if not bucket.live:
            return await group.stage(bucket, deadline)
        copied = asyncio.ensure_future(group.stage(bucket, deadline))
        self._copying += 1

        def end(_: Any) -> None:
            self._copying -= 1
            self._changed.set()

        copied.add_done_callback(end)
        await copied

    def _held(self, version: int) -> HostWeights:
        if self._lent is None or self._version != version:
            raise GenerationError(f"it does not hold version {version} still now")
        return self._lent

    async def _have(self, asked: dict[str, Any], deadline: Deadline) -> None:
        version, path = asked["version"], asked["path"]
        try:
            async with within(deadline.left(f"version {version}")):
                while self._version != version:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise GenerationError(f"it did not come to version {version}") from error
        if path is not None:
            seen: list[HostWeights] = []
            await on_thread(lambda left: seen.append(HostWeights.in_files(Path(path), version)), deadline, path)
            if not seen[0].written:
                raise GenerationError(f"{path} does not say that it is rank 0's own; write it with WeightFiles")
            if self._version == version:
                self._lent = seen[0]
        if self._lent is None:
            raise GenerationError(self._why or "rank 0 names no files")
        if self._lent.table != asked["table"]:
            self._lent = None
            raise GenerationError(
                "its weights are others than those of rank 0 (names, shapes, types, or files that were written at"
                " another time)"
            )

    def _close(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()

    def _keep(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _shut(self) -> None:
        await cancel_all(self._tasks)


class SharedSending(WeightSenders):
    """The `WeightSenders` of an engine with servers: of rank 0 what `attach` was given, elsewhere a `SendingRank`."""

    def __init__(self) -> None:
        self._here: tuple[LoopThread, Senders, list[str]] | None = None
        self._rank: SendingRank | None = None

    def attach(self, thread: LoopThread, senders: Senders, urls: list[str]) -> None:
        """The engine runs here, on this thread, with servers at these addresses."""
        self._here = thread, senders, urls

    def invite(
        self, ranks: int, local_ranks: int, most: int | None, address: str, listen: Callable[[], socket.socket]
    ) -> Invitation | None:
        assert self._here is not None, "the engine was started"
        thread, senders, urls = self._here
        pool = local_ranks if all(on_this_host(url) for url in urls) else ranks
        count = min(pool, len(urls), pool if most is None else most)
        if count < 2:
            return None
        invited = [pool * number // count for number in range(1, count)]  # of as many machines as there are
        return thread.call(senders.invite(invited, address, listen()), _CONNECT_S)

    def join(self, invitation: Invitation, rank: int) -> bool:
        if self._rank is not None and self._rank.invitation != invitation:
            self.leave()
        if rank in invitation.ranks and self._rank is None:
            self._rank = SendingRank(invitation, rank)
        return self._rank is not None

    def lend(self, version: int, weights: Callable[[], dict[str, Tensor]] | None, deadline_s: float) -> None:
        assert self._rank is not None, "it joined"
        self._rank.lend(version, weights, deadline_s)

    def leave(self) -> None:
        """On rank 0 as its engine is closed."""
        self._here = None
        rank, self._rank = self._rank, None
        if rank is not None:
            rank.close()
