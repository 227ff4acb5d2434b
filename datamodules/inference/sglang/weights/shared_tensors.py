"""Weights through memory that this process and a server on the same host both have: what `/update_weights_from_tensor`
is told is where they are.

    a bucket -> /dev/shm, or the memory of a GPU that both see -> each rank of the server copies its part -> freed

Written to what SGLang 0.5.21 reads, without its packages: `SafeUnpickler` (`utils/common.py`) takes torch's own
functions and plain data, each rank its own element (`managers/tp_worker.py`), devices by UUID (`utils/patch_torch.py`),
a `flattened_bucket` as a dictionary (`model_executor/model_runner_components/weight_updater.py`). It ends at what it
cannot open, so that nothing is sent that it could not, and what it may be about to open stays.

Promises: each server has a bucket at a time in shared memory; it goes when the server has answered, and after one that
did not answer when it answers a later bucket or ends. A process that is killed leaves no file: torch's manager of this
process's shared memory, a process that survives it, removes them two seconds later (or when the last child that was
forked meanwhile ends); a server's removes them when that ends. A server is told to stand still when it is known to be
of a kind that can read what is there, and its first bucket is. On GPUs, where nobody has seen this yet, a bucket that a
killed server never opened stays with torch until this process ends.
"""

from __future__ import annotations

import base64
import os
import pickle
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from datamodules.inference.sglang.client import ServerClient, ServerRefused
from datamodules.inference.sglang.weights.forms import Bucket, SharedWeights
from datamodules.inference.sglang.weights.local_server import REMEDY, SHARED_MEMORY, find, sees_our_gpus
from datamodules.inference.sglang.weights.update_group import Deadline, OwnFault, on_thread

_PATH = "/update_weights_from_tensor"
_CPU = torch.device("cpu")
_ALLOCATOR = threading.Lock()  # its settings are the process's
_DEVICE = 6  # its place among the arguments of torch's rebuild_cuda_tensor


class SharedTensors:
    """What one server reads of this process's memory: `open`, then `send` bucket after bucket, on one event loop."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._device = _CPU
        self._server: psutil.Process | None = None
        self._ranks = 1
        self._ready: tuple[Bucket, OnHost | OnGPU] | None = None  # not sent yet
        self._lent: list[OnHost | OnGPU] = []

    async def open(self, weights: SharedWeights, deadline: Deadline) -> None:
        """All that can be done while the server still generates.

        Raises:
            GenerationError: the server is not on this host, or of a kind that takes no shared memory; or there is not
                enough of that.
        """
        info = await self._client.get("/server_info", deadline.left("/server_info"))
        for key, remedy in (("pp_size", "disk"), ("dp_size", "disk"), ("nnodes", "distributed")):
            if (size := self._client.whole(info, key, 1, 1) or 1) > 1:
                raise OwnFault(
                    f"WeightSync.method: tensor is not for servers with {key} {size}, as {self._client.url} has; set it"
                    f" to {remedy}"
                )
        self._ranks = self._client.whole(info, "tp_size", 1, 1) or 1
        on_gpu = weights.device.type == "cuda" and info.get("device") == "cuda"

        def look(left: float) -> None:
            self._server = find(self._client.url)
            self._device = weights.device if on_gpu and sees_our_gpus(self._server) else _CPU

        await on_thread(look, deadline, f"{self._client.url}: looking for its process")
        self._free_ready()
        _free_of(lambda server: not _runs(server))
        if self._device == _CPU:
            check_room(max(sum(bucket.sizes) for bucket in weights.buckets))
        first = weights.buckets[0]
        self._ready = first, await self._lend(first, deadline)

    async def send(self, bucket: Bucket, options: dict[str, Any], deadline: Deadline) -> None:
        """Returns when every rank of the server has it. `options`: more of the request. Raises GenerationError."""
        ready, self._ready = self._ready, None
        lent = ready[1] if ready is not None and ready[0] is bucket else await self._lend(bucket, deadline)
        self._lent.append(lent)
        body = {
            "serialized_named_tensors": [told(bucket, lent) for _ in range(self._ranks)],
            "load_format": "flattened_bucket",
            **options,
        }
        try:
            await self._client.post(_PATH, body, deadline.left(f"{self._client.url}{_PATH}"), confirmed=True)
        except ServerRefused:
            self._free_lent()
            raise
        self._free_lent()  # it has done what was asked of it before, too
        _free_of(lambda server: server == self._server)

    def close(self) -> None:
        """Frees what is left, but for what a server that still runs has been told of: it may be about to open that, and
        ends if it cannot. Idempotent."""
        self._free_ready()
        if self._lent and self._server is not None and _runs(self._server):
            _KEPT.extend((self._server, lent) for lent in self._lent)
            self._lent.clear()
        self._free_lent()
        _free_of(lambda server: not _runs(server))

    async def _lend(self, bucket: Bucket, deadline: Deadline) -> OnHost | OnGPU:
        lent: list[OnHost | OnGPU] = []

        def copy(left: float) -> None:
            data = bucket.read()
            lent.append(OnHost(data) if self._device == _CPU else OnGPU(data, self._device))

        await on_thread(copy, deadline, f"{self._client.url}: putting weights into shared memory")
        return lent[0]

    def _free_ready(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            ready[1].free()

    def _free_lent(self) -> None:
        while self._lent:
            self._lent.pop().free()


_KEPT: list[tuple[psutil.Process, OnHost | OnGPU]] = []
"""What servers were told of that have not answered, until they answer what comes later, or end."""


def _free_of(which: Callable[[psutil.Process], bool]) -> None:
    for kept in [one for one in _KEPT if which(one[0])]:
        kept[1].free()
        _KEPT.remove(kept)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it has just ended
        return False


class OnHost:
    """A copy of bytes [N] in a file of /dev/shm, which goes with `free`, or with this object.

    Raises:
        GenerationError: there is no room for it.
    """

    def __init__(self, data: Tensor) -> None:
        check_room(data.nbytes)
        try:
            self._storage = torch.UntypedStorage._new_using_filename_cpu(data.nbytes)
        except RuntimeError as error:
            raise _no_room(data.nbytes, str(error)) from error
        # torch counts who has the file, and ends the process that finds it gone when it is the last: so the count, in
        # the file, has one too many, and the file goes by its name.
        self._storage._shared_incref()
        _, self._handle, _ = self._storage._share_filename_cpu_()
        self.file = SHARED_MEMORY / os.fsdecode(self._handle).lstrip("/")
        self.free = weakref.finalize(self, _remove, self.file)
        torch.empty(0, dtype=torch.uint8).set_(self._storage).copy_(data)

    def opened(self) -> Reduced:
        """How one other process gets the tensor. With no name of a manager it has a manager of its own, and needs none
        of ours, which would then wait for it to end."""
        self._storage._shared_incref()  # that of the process, which takes it back
        size = self._storage.nbytes()
        file = Reduced(reductions.rebuild_storage_filename, torch.UntypedStorage, b"", self._handle, size)
        storage = Reduced(reductions.rebuild_typed_storage, file, torch.uint8)
        return Reduced(reductions.rebuild_tensor, Tensor, storage, (0, (size,), (1,), False))


class OnGPU:
    """A copy of bytes [N] in a GPU's memory, for processes that see it; the last of them to have it frees it."""

    def __init__(self, data: Tensor, device: torch.device) -> None:
        with torch.cuda.device(device), _whole_segments():
            self._tensor: Tensor | None = data.to(device, non_blocking=True)
            torch.cuda.current_stream().synchronize()

    def opened(self) -> Reduced:
        """How one other process gets the tensor, which counts for one."""
        assert self._tensor is not None, "it was freed"
        function, arguments = reductions.reduce_tensor(self._tensor)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)  # its number may be another there
        return Reduced(function, *arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])

    def free(self) -> None:
        self._tensor = None
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()  # a server that shares the GPU in turns takes what it needs next


class Reduced:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._function, self._arguments


def told(bucket: Bucket, lent: OnHost | OnGPU) -> str:
    """What one rank of a server is told of a bucket, in base64. For one rank each: they are counted."""
    ends = list(accumulate(bucket.sizes))
    metadata = [
        SimpleNamespace(
            name=name,
            shape=tuple(shape),
            dtype=getattr(torch, bucket.dtype),
            start_idx=end - size,
            end_idx=end,
            numel=size,
        )
        for name, shape, size, end in zip(bucket.names, bucket.shapes, bucket.sizes, ends, strict=True)
    ]
    return base64.b64encode(pickle.dumps({"flattened_tensor": lent.opened(), "metadata": metadata})).decode()


def check_room(size: int) -> None:
    """Raises GenerationError when so many bytes do not fit into shared memory."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        raise _no_room(size, str(error)) from error
    if size > free:
        raise _no_room(size, f"{free:,} are free")


def _no_room(size: int, reason: str) -> OwnFault:
    return OwnFault(
        f"{SHARED_MEMORY} has no room for {size:,} bytes of weights ({reason}): enlarge it (docker run --shm-size=8g;"
        f" mount -o remount,size=8g {SHARED_MEMORY}), or {REMEDY}"
    )


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink()


@contextmanager
def _whole_segments() -> Iterator[None]:
    """What the allocator takes here is no part of a segment that expands, as `arborist` asks for: of those another
    process gets memory only when it may trace this one (pytorch/pytorch#165685)."""
    with _ALLOCATOR:
        settings = _allocator_settings()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        try:
            yield
        finally:
            torch._C._accelerator_setAllocatorSettings(settings)


def _allocator_settings() -> str:
    """Those of now; where this torch cannot be asked (2.11), those it was started with."""
    asked = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if asked is not None:
        return str(asked())
    started = (os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return next(filter(None, started), "expandable_segments:False")
