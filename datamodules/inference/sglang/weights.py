"""Brings one SGLang server to a version of the policy's weights, from a directory or by broadcast.

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
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from datamodules.inference.protocol import GenerationError, WeightUpdate
from datamodules.inference.sglang.client import ServerClient, ServerRefused
from datamodules.inference.sglang.update_group import Deadline, UpdateGroup
from datamodules.inference.weight_files import split

_log = logging.getLogger(__name__)
BUCKET_BYTES = 256 << 20
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
class Bucket:
    """Tensors of one dtype, one after another in `data`, uint8 [bytes] on the CPU; or in `files`, by name."""

    names: list[str]
    shapes: list[list[int]]
    dtype: str
    data: Tensor | None
    files: Mapping[str, Path] = field(default_factory=dict)

    def read(self) -> Tensor:
        """What `data` is, or would be.

        Raises:
            GenerationError: a file cannot be read.
        """
        if self.data is not None:
            return self.data
        tensors = {}
        for name in self.names:
            try:
                with safe_open(self.files[name], framework="pt") as file:
                    tensors[name] = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise GenerationError(f"{self.files[name]} cannot be read: {error}") from error
        return _flat(tensors)


@dataclass(frozen=True)
class HostWeights:
    """A copy of the weights in host memory or on disk, for broadcasts: the trainer may go on, servers may ask later.

    Attributes:
        device: where the trainer has them. From a GPU to servers on GPUs they travel by NCCL, else by gloo.
    """

    version: int
    nbytes: int
    buckets: tuple[Bucket, ...]
    device: torch.device

    @classmethod
    def copy_of(cls, weights: dict[str, Tensor], version: int, bucket_bytes: int = BUCKET_BYTES) -> HostWeights:
        """Copies tensors on any device; the names are those of a checkpoint (`export.checkpoint_weights`)."""
        buckets = [_bucket(tensors, _flat(tensors)) for tensors in _cut(weights, bucket_bytes)]
        device = next((tensor.device for tensor in weights.values() if tensor.is_cuda), torch.device("cpu"))
        return cls(version, sum(tensor.nbytes for tensor in weights.values()), tuple(buckets), device)

    @classmethod
    def in_files(cls, path: Path, version: int, bucket_bytes: int = BUCKET_BYTES) -> HostWeights:
        """Those in a directory of `WeightFiles`, which are read one bucket at a time when they are sent.

        Raises:
            GenerationError: there are none, or they cannot be read.
        """
        found: dict[str, Tensor] = {}
        where: dict[str, Path] = {}
        for file in _files_in(path):
            try:
                with safe_open(file, framework="pt") as content:
                    for name in content.keys():  # noqa: SIM118, it is no mapping
                        view = content.get_slice(name)
                        dtype = view[:0].dtype if view.get_shape() else content.get_tensor(name).dtype
                        found[name] = torch.empty(view.get_shape(), dtype=dtype, device="meta")
                        where[name] = file
            except (OSError, SafetensorError) as error:
                raise GenerationError(f"WeightUpdate.path: {file} cannot be read: {error}") from error
        buckets = [_bucket(tensors, None, {n: where[n] for n in tensors}) for tensors in _cut(found, bucket_bytes)]
        return cls(version, sum(tensor.nbytes for tensor in found.values()), tuple(buckets), torch.device("cpu"))


@dataclass(frozen=True)
class DiskWeights:
    """A directory of `WeightFiles` that the server sees under the same path."""

    version: int
    nbytes: int
    path: str


@dataclass(frozen=True)
class AdapterWeights:
    """A directory of a PEFT adapter, which the server sees under the same path and knows as `name` beside others:
    requests under way go on with the adapter they began with."""

    version: int
    nbytes: int
    path: str
    name: str


Weights = HostWeights | DiskWeights | AdapterWeights


def weights_of(update: WeightUpdate, adapter: bool = False, one_gpu: bool = False) -> Weights:
    """What servers are brought to by this update; copies its tensors, so it may take a while for a large model.
    `adapter`: its path is that of an adapter. `one_gpu`: servers are on the trainer's, which NCCL refuses."""
    if update.state_dict is not None:
        weights = HostWeights.copy_of(update.state_dict, update.version)
        return replace(weights, device=torch.device("cpu")) if one_gpu else weights
    if update.path is None:
        raise GenerationError("WeightUpdate.parts: servers take no parts; give state_dict, or path")
    if update.read_here:
        return HostWeights.in_files(Path(update.path), update.version)
    files = _files_in(Path(update.path))
    size, path = sum(file.stat().st_size for file in files), str(Path(update.path).absolute())
    if adapter:  # its name is its own: a server may have had another run's before
        return AdapterWeights(update.version, size, path, f"v{update.version}-{uuid.uuid4().hex[:8]}")
    return DiskWeights(update.version, size, path)


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
        self._group: UpdateGroup | None = None
        self._forgotten: list[str] = []  # groups given up that the server may still know
        self._begun = True  # an update may be half done at the server: ours, or one of another trainer before us
        self._away: tuple[str, ...] = ()  # parts of its memory that the server has given up

    async def bring(self, weights: Weights, deadline_s: float, stay_paused: bool = False) -> Synced:
        """Loads `weights` completely, whatever the server holds; one call at a time, later ones wait.

        Args:
            stay_paused: the server was paused on purpose and does not continue.

        Raises:
            SyncFailed: it could not; see its attribute `dirty`.
        """
        began = time.monotonic()
        deadline = Deadline(deadline_s)
        if isinstance(weights, AdapterWeights):
            return await self._add(weights, deadline)
        try:
            async with self._turn(deadline):
                used = self._group if isinstance(weights, HostWeights) else None
                try:
                    paused, update_s = await self._update(weights, deadline)
                except GenerationError as error:
                    if used is None or deadline.over:
                        raise
                    # A group that worked before may be all that failed: its connection broke, the server is a new one.
                    _log.warning("%s: %s; once more, with a new process group", self._client.url, error)
                    paused, update_s = await self._update(weights, deadline)
                if not stay_paused:
                    await self._come_back(_MEMORY, deadline)
                    await self._post("/continue_generation", {}, deadline, confirmed=False)
        except GenerationError as error:
            what = f"version {weights.version} of the weights did not reach {self._client.url}"
            raise SyncFailed(
                f"{what}: {error}", dirty=self._begun, lost=not isinstance(error, ServerRefused)
            ) from error
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
                body = {"lora_name": weights.name, "lora_path": weights.path}
                try:
                    await self._post("/load_lora_adapter", body, deadline)
                except ServerRefused:
                    if not await self._has(weights, deadline):  # by an earlier request, whose answer was lost
                        raise
                if not await self._has(weights, deadline):
                    raise GenerationError(f"it does not list adapter '{weights.name}' afterwards")
        except GenerationError as error:
            what = f"the adapter of version {weights.version} did not reach {self._client.url}"
            raise SyncFailed(f"{what}: {error}", dirty=False, lost=not isinstance(error, ServerRefused)) from error
        seconds = time.monotonic() - began
        return Synced(weights.version, seconds, 0.0, seconds)

    async def _has(self, weights: AdapterWeights, deadline: Deadline) -> bool:
        answer = await self._client.get("/v1/models", deadline.left("/v1/models"))
        found = answer.get("data")
        listed = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        return any(one.get("id") == weights.name and one.get("root") == weights.path for one in listed)

    async def close(self) -> None:
        """Ends the process group, at the server too if it answers within a few seconds."""
        self._give_up_group()
        with suppress(GenerationError):
            await self._forget_groups(Deadline(_TIDY_S))

    @asynccontextmanager
    async def _turn(self, deadline: Deadline) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(deadline.left("another update of this server")):
                await self._lock.acquire()
        except TimeoutError as error:
            raise GenerationError(f"another update did not end within deadline_s = {deadline.seconds:g} s") from error
        try:
            yield
        finally:
            self._lock.release()

    async def _update(self, weights: Weights, deadline: Deadline) -> tuple[float, float]:
        """When the server was told to stand still, and seconds spent in its update calls."""
        try:
            # All that can be done while it still generates.
            if self._begun:
                with suppress(GenerationError):  # "no session is open" is the usual answer
                    await self._post("/end_weight_update", {}, deadline.at_most(_TIDY_S))
            await self._forget_groups(deadline)
            if isinstance(weights, HostWeights) and self._group is None:
                self._group = await self._join(weights.device, deadline)
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
        version = str(weights.version)
        if isinstance(weights, DiskWeights):
            body = {"model_path": weights.path, "weight_version": version, "flush_cache": True}
            await self._post("/update_weights_from_disk", body, deadline)
            return
        assert isinstance(weights, HostWeights), "adapters stand beside each other: see _add"
        await self._post("/begin_weight_update", {}, deadline)
        for bucket in weights.buckets:
            last = bucket is weights.buckets[-1]
            # Tokens carry the version from the moment it is announced, so it comes last; and so does the flush.
            await self._send(bucket, {"flush_cache": last, "weight_version": version if last else None}, deadline)
        await self._post("/end_weight_update", {}, deadline)

    async def _send(self, bucket: Bucket, options: dict[str, Any], deadline: Deadline) -> None:
        group = self._group
        assert group is not None, "_update joins it"
        data = bucket.data
        if data is None:
            folders = sorted({str(path.parent) for path in bucket.files.values()})
            data = await group.read(bucket.read, deadline, f"weights to be read from {', '.join(folders)}")
        body = {
            "names": bucket.names,
            "dtypes": [bucket.dtype] * len(bucket.names),
            "shapes": bucket.shapes,
            "group_name": group.name,
            "load_format": "flattened_bucket",
            **options,
        }
        request = self._post("/update_weights_from_distributed", body, deadline)
        await _both(request, group.broadcast(data, deadline))

    async def _join(self, device: torch.device, deadline: Deadline) -> UpdateGroup:
        info = await self._client.get("/server_info", deadline.left("/server_info"))
        whole = self._client.whole
        if (whole(info, "pp_size", 1, 1) or 1) > 1:
            raise GenerationError(
                "pipeline-parallel servers cannot take broadcast weights; set WeightSync.method: disk"
            )
        size = 1 + (whole(info, "tp_size", 1, 1) or 1)
        group = UpdateGroup(self._client.url, size, device if info.get("device") == "cuda" else torch.device("cpu"))
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


def _files_in(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise GenerationError(f"WeightUpdate.path: {path} holds no *.safetensors file; write it with WeightFiles")
    return files


def _cut(weights: dict[str, Tensor], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """In parts of one dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in weights.values()):
        same = {name: tensor for name, tensor in weights.items() if tensor.dtype == dtype}
        yield from ({name: same[name] for name in names} for names in split(same, bucket_bytes))


def _bucket(tensors: dict[str, Tensor], data: Tensor | None, files: Mapping[str, Path] | None = None) -> Bucket:
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    return Bucket(list(tensors), [list(tensor.shape) for tensor in tensors.values()], dtype, data, files or {})


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    """A copy, uint8 [bytes] on the CPU."""
    pinned = any(tensor.is_cuda for tensor in tensors.values())
    data = torch.empty(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8, pin_memory=pinned)
    offset = 0
    for tensor in tensors.values():
        data[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        offset += tensor.nbytes
    return data
