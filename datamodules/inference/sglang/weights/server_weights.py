"""Brings one SGLang server to a version of the policy's weights: from a directory, by broadcast, in shared memory.

    pause (retract) -> load, caches flushed -> continue        an adapter: load beside the others
    in turns on the trainer's GPU: pause -> leave the memory ... weights back -> load -> the rest back -> continue

Promises: no token is computed on keys of other weights; every reply's `success` is checked; everything is prepared
before the pause (files, host copies, process group), so that a server stands still for its own update and little
else (buckets that are in files alone are read as they are sent); every wait ends with the update's deadline. A server
whose update fails is left paused, to be taken out: the next `bring`, to whatever version, is a full reload from a
fresh start, so a fleet may call it at any time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.client import ServerClient, ServerRefused
from datamodules.inference.sglang.weights.forms import (
    AdapterWeights,
    Bucket,
    DiskWeights,
    HostWeights,
    SharedWeights,
    Weights,
)
from datamodules.inference.sglang.weights.senders import Peer, PeerGroup, Senders
from datamodules.inference.sglang.weights.shared_tensors import SharedTensors
from datamodules.inference.sglang.weights.update_group import Deadline, OwnFault, UpdateGroup, new_name
from datamodules.processes.deadline import deadline as within

_log = logging.getLogger(__name__)
_TIDY_S = 5.0  # for what only tidies up
_MEMORY = ("weights", "kv_cache", "cuda_graph")  # the parts of a server's that it can give up, the weights first


class SyncFailed(GenerationError):
    """One server did not take new weights; the message has its address and its own words.

    Attributes:
        dirty: what it holds may be mixed, and it stands still, until a later `bring` succeeds. False when the update
            failed before it touched the server, which goes on with the weights it had.
        lost: it did not answer, or the connection broke; it did not refuse.
    """

    def __init__(self, message: str, dirty: bool, lost: bool = False) -> None:
        super().__init__(message)
        self.dirty, self.lost = dirty, lost


@dataclass(frozen=True)
class Synced:
    """A server has `version` now.

    Attributes:
        seconds: all in all.
        downtime_s: of those, from the pause on, when it generated nothing.
        update_s: of those, in the server's own update calls.
    """

    version: int
    seconds: float
    downtime_s: float
    update_s: float


class ServerWeights:
    """Keeps one server's weights; owns the process group with it, which lasts from update to update.

    All coroutines run on the event loop of `client`.
    """

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._lock = asyncio.Lock()
        self._group: UpdateGroup | PeerGroup | None = None
        self._shared = SharedTensors(client)
        self._forgotten: list[str] = []  # groups given up that the server may still know
        self._begun = True  # an update may be half done at the server: ours, or one of another trainer before us
        self._away: tuple[str, ...] = ()  # parts of its memory that the server has given up

    async def bring(
        self, weights: Weights, deadline_s: float, senders: Senders | None = None, stay_paused: bool = False
    ) -> Synced:
        """Loads `weights` completely, whatever the server holds; one call at a time, later ones wait.

        Args:
            senders: who may send them besides this process.
            stay_paused: the server was paused on purpose and does not continue.

        Raises:
            SyncFailed: it could not; see its attribute `dirty`.
        """
        began = time.monotonic()
        deadline = Deadline(deadline_s)
        if isinstance(weights, AdapterWeights):
            return await self._add(weights, deadline)
        peer: Peer | None = None
        try:
            async with self._turn(deadline):
                while True:
                    peer = self._sender(weights, senders)
                    used = self._group if isinstance(weights, HostWeights) else None
                    try:
                        paused, update_s = await self._update(weights, peer, senders, deadline)
                        break
                    except GenerationError as error:
                        if peer is not None and used is None and senders is not None:
                            assert isinstance(weights, HostWeights), "others have no sender"
                            senders.avoid(self, self._client.url, weights, str(error))
                        elif used is None:
                            raise
                        if deadline.over:
                            raise
                        if used is not None:
                            # It worked before and may be all that failed: its connection broke, the server is new.
                            _log.warning("%s: %s; once more, with a new process group", self._client.url, error)
                if not stay_paused:
                    await self._come_back(_MEMORY, deadline)
                    await self._post("/continue_generation", {}, deadline, confirmed=False)
        except GenerationError as error:
            by = f", sent by rank {peer.rank}" if peer is not None else ""
            what = f"version {weights.version} of the weights did not reach {self._client.url}{by}"
            lost = not isinstance(error, ServerRefused | OwnFault)
            # Its kind of model was compared when it joined; sizes it does not tell.
            sizes = "; if it serves a model of other sizes, start it with the one that is trained"
            hint = sizes if isinstance(error, ServerRefused) else ""
            raise SyncFailed(f"{what}: {error}{hint}", dirty=self._begun, lost=lost) from error
        if senders is not None:
            senders.did(self)
        now = time.monotonic()
        return Synced(weights.version, now - began, now - paused, update_s)

    @property
    def away(self) -> bool:
        """Whether nothing of the server's is in its GPU's memory."""
        return self._away == _MEMORY

    async def leave(self, deadline_s: float) -> None:
        """The server, which stands still then, gives up the memory of its GPU. Raises GenerationError."""
        deadline = Deadline(deadline_s)
        async with self._turn(deadline):
            if not self.away:
                await self._come_back(_MEMORY, deadline)  # after an update that failed in between
                await self._client.pause(deadline.left("/pause_generation"))
                await self._client.give_up_memory(deadline.left("/release_memory_occupation"))
                self._away = _MEMORY

    async def come_back(self, deadline_s: float) -> None:
        """It has all of its memory again, and the weights that it had or was given since; caches are empty. Raises
        GenerationError."""
        deadline = Deadline(deadline_s)
        async with self._turn(deadline):
            await self._come_back(_MEMORY, deadline)

    async def _come_back(self, parts: Sequence[str], deadline: Deadline) -> None:
        if missing := [part for part in self._away if part in parts]:
            await self._client.take_memory(missing, deadline.left("/resume_memory_occupation"))
            self._away = tuple(part for part in self._away if part not in parts)

    async def _add(self, weights: AdapterWeights, deadline: Deadline) -> Synced:
        """One more adapter; nothing stands still. The server drops the one that was used longest ago when it has more
        than it may, once no request uses that any more."""
        began = time.monotonic()
        try:
            async with self._turn(deadline):
                body = {"lora_name": weights.label, "lora_path": weights.path}
                try:
                    await self._post("/load_lora_adapter", body, deadline)
                except ServerRefused:
                    if not await self._has(weights, deadline):  # by an earlier request, whose answer was lost
                        raise
                if not await self._has(weights, deadline):
                    raise GenerationError(f"it does not list adapter '{weights.label}' afterwards")
        except GenerationError as error:
            what = f"the adapter of version {weights.version} did not reach {self._client.url}"
            raise SyncFailed(f"{what}: {error}", dirty=False, lost=not isinstance(error, ServerRefused)) from error
        seconds = time.monotonic() - began
        return Synced(weights.version, seconds, 0.0, seconds)

    async def _has(self, weights: AdapterWeights, deadline: Deadline) -> bool:
        answer = await self._client.get("/v1/models", deadline.left("/v1/models"))
        found = answer.get("data")
        listed = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        return any(one.get("id") == weights.label and one.get("root") == weights.path for one in listed)

    async def close(self) -> None:
        """Ends the process group, at the server too if it answers within a few seconds; frees shared memory."""
        self._shared.close()
        self._give_up_group()
        with suppress(GenerationError):
            await self._forget_groups(Deadline(_TIDY_S))

    @asynccontextmanager
    async def _turn(self, deadline: Deadline) -> AsyncIterator[None]:
        try:
            async with within(deadline.left("another update of this server")):
                await self._lock.acquire()
        except TimeoutError as error:
            raise GenerationError(f"another update did not end within deadline_s = {deadline.seconds:g} s") from error
        try:
            yield
        finally:
            self._lock.release()

    def _sender(self, weights: Weights, senders: Senders | None) -> Peer | None:
        """Who sends the weights; None: this process. A group of another sender is given up."""
        if not isinstance(weights, HostWeights):
            return None
        peer = None if senders is None else senders.choose(self, self._client.url, weights)
        if self._group is not None and (self._group.peer if isinstance(self._group, PeerGroup) else None) is not peer:
            self._give_up_group()
        return peer

    async def _update(
        self, weights: Weights, peer: Peer | None, senders: Senders | None, deadline: Deadline
    ) -> tuple[float, float]:
        """When the server was told to stand still, and seconds spent in its update calls."""
        try:
            # All that can be done while it still generates.
            if self._begun:
                with suppress(GenerationError):  # "no session is open" is the usual answer
                    await self._post("/end_weight_update", {}, deadline.at_most(_TIDY_S))
            await self._forget_groups(deadline)
            if isinstance(weights, HostWeights) and self._group is None:
                self._group = await self._join(weights, peer, senders, deadline)
            if isinstance(weights, SharedWeights):
                await self._shared.open(weights, deadline)
            self._begun = True
            paused = time.monotonic()
            await self._post("/pause_generation", {"mode": "retract"}, deadline, confirmed=False)
            await self._come_back(("weights",), deadline)
            began = time.monotonic()
            await self._load(weights, deadline)
            self._begun = False
            return paused, time.monotonic() - began
        except BaseException:  # cancelled is as half done as failed
            self._give_up_group()
            raise

    async def _load(self, weights: Weights, deadline: Deadline) -> None:
        if isinstance(weights, DiskWeights):
            body = {"model_path": weights.path, "weight_version": weights.label, "flush_cache": True}
            await self._post("/update_weights_from_disk", body, deadline)
            return
        assert isinstance(weights, HostWeights | SharedWeights), "adapters stand beside each other: see _add"
        if isinstance(self._group, PeerGroup):
            self._group.version = weights.version
        send = self._send if isinstance(weights, HostWeights) else self._shared.send
        await self._post("/begin_weight_update", {}, deadline)
        for bucket in weights.buckets:
            last = bucket is weights.buckets[-1]
            # Tokens carry the version from the moment it is announced, so it comes last; and so does the flush.
            await send(bucket, {"flush_cache": last, "weight_version": weights.label if last else None}, deadline)
        await self._post("/end_weight_update", {}, deadline)

    async def _send(self, bucket: Bucket, options: dict[str, Any], deadline: Deadline) -> None:
        group = self._group
        assert group is not None, "_update joins it"
        await group.stage(bucket, deadline)
        body = {
            "names": bucket.names,
            "dtypes": [bucket.dtype] * len(bucket.names),
            "shapes": bucket.shapes,
            "group_name": group.name,
            "load_format": "flattened_bucket",
            **options,
        }
        request = self._post("/update_weights_from_distributed", body, deadline)
        await _both(request, group.broadcast(deadline))

    async def _join(
        self, weights: HostWeights, peer: Peer | None, senders: Senders | None, deadline: Deadline
    ) -> UpdateGroup | PeerGroup:
        info = await self._client.get("/server_info", deadline.left("/server_info"))
        whole = self._client.whole
        if (whole(info, "pp_size", 1, 1) or 1) > 1:
            raise OwnFault("pipeline-parallel servers cannot take broadcast weights; set WeightSync.method: disk")
        size, url = 1 + (whole(info, "tp_size", 1, 1) or 1), self._client.url
        on_gpu = info.get("device") == "cuda" and weights.device.type == "cuda"
        if peer is None or senders is None:
            here = UpdateGroup(url, new_name(), size, weights.device if on_gpu else torch.device("cpu"))
            return await self._together(here, size, deadline)
        async with senders.trial(peer, deadline):
            there = PeerGroup(peer)
            try:
                await there.open(url, size, weights.version, on_gpu, deadline)
            except BaseException:
                there.close()
                raise
            return await self._together(there, size, deadline)

    async def _together(self, group: UpdateGroup | PeerGroup, size: int, deadline: Deadline) -> UpdateGroup | PeerGroup:
        """All ranks of the group join it."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": group.name,
            "backend": group.backend,
        }
        try:
            await _both(self._post("/init_weights_update_group", body, deadline), group.join(deadline))
        except BaseException:
            group.close()
            self._forgotten.append(group.name)
            raise
        return group

    def _give_up_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
            self._forgotten.append(group.name)

    async def _forget_groups(self, deadline: Deadline) -> None:
        while self._forgotten:
            name = self._forgotten.pop()
            with suppress(GenerationError):  # it may know nothing of it
                await self._post("/destroy_weights_update_group", {"group_name": name}, deadline.at_most(_TIDY_S))

    async def _post(
        self, path: str, body: dict[str, Any], deadline: Deadline, confirmed: bool = True
    ) -> dict[str, Any]:
        """`confirmed`: the answer has to say that it succeeded."""
        return await self._client.post(path, body, deadline.left(f"{self._client.url}{path}"), confirmed)


async def _both(request: Any, collective: Any) -> None:
    """Waits for both ends of a collective. The server's words come first: they say more than a broken connection."""
    asking, taking = asyncio.ensure_future(request), asyncio.ensure_future(collective)
    try:
        done, _ = await asyncio.wait((asking, taking), return_when=asyncio.FIRST_EXCEPTION)
        if asking not in done:  # our side failed: the server is about to notice
            await asyncio.wait((asking,), timeout=_TIDY_S)
        for task in (asking, taking):
            if task.done():
                task.result()
    finally:
        for task in (asking, taking):
            task.cancel()
        await asyncio.gather(asking, taking, return_exceptions=True)
