"""A process group of one rank of the trainer and the ranks of one SGLang server, over which weights are broadcast.

Promises: torch's default process group, which the trainer's ranks may use, is neither needed nor touched; whatever
can block runs on a daemon thread while the event loop waits with a deadline, so a server that hangs costs the
deadline and no more; the store listens on the one address the server is reached from (loopback for a local server),
on a free port. A group that failed once is of no more use: `close` it and join another.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, BackendConfig

from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.weights.forms import Bucket
from datamodules.processes.awake import awake
from datamodules.processes.deadline import deadline as within

# NCCL's own watchdog ends the whole process at its time-out: ours come first, always.
_NEVER = timedelta(days=7)


class Deadline:
    """Counts down from `seconds`, but for those in which this process was stopped."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends = awake() + seconds

    @property
    def over(self) -> bool:
        return awake() >= self._ends

    def at_most(self, seconds: float) -> Deadline:
        """An earlier deadline, for something that may fail."""
        return Deadline(max(0.0, min(seconds, self._ends - awake())))

    def left(self, what: str) -> float:
        """Seconds left for `what`, above 0. Raises GenerationError when there are none."""
        left = self._ends - awake()
        if left <= 0:
            raise GenerationError(f"{what}: nothing left of the deadline_s = {self.seconds:g} s of this weight update")
        return left


class OwnFault(GenerationError):
    """What keeps weights from a server, and is no sign that it is lost: it is to be told, not waited for."""


def new_name() -> str:
    """Of a group."""
    return f"arborist-{uuid4().hex[:12]}"


class UpdateGroup:
    """Made by `join`.

    Args:
        url: of the server.
        name: of the group, at the server; torch refuses one that was used before.
        size: ranks of the group: this process and the server's.
        device: that broadcasts start from: a CUDA device for NCCL, the CPU for gloo.

    Attributes:
        backend: "gloo" or "nccl".
        address, port: where the server joins it.
        sent: bytes that were broadcast.
    """

    def __init__(self, url: str, name: str, size: int, device: torch.device) -> None:
        self.name = name
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._url = url
        self._size = size
        self._pg: Any = None
        self._device = device
        self._staged: Tensor | None = None
        self.sent = 0
        # Where the server can reach this process: the address that this process reaches the server from.
        family, self.address = _local_address(url)
        listener = socket.create_server((self.address, 0), family=family)
        self.port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(
            self.address, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    async def join(self, deadline: Deadline) -> None:
        """Returns when all ranks have joined; ask the server to, at the same time."""
        await on_thread(self._join, deadline, f"{self._url}: waiting for all ranks to join the weight update group")

    async def stage(self, bucket: Bucket, deadline: Deadline) -> None:
        """Makes what is broadcast next; a file system that hangs holds nothing up. Before the server is asked for it:
        one that waits for a broadcast that never comes is of no more use.

        Raises:
            GenerationError: a file cannot be read, or not within the deadline.
        """
        folders = sorted({str(path.parent) for path in bucket.files.values()})
        what = f"weights to be read from {', '.join(folders)}" if folders else "a copy of weights"
        if bucket.data is not None:
            self._staged = bucket.data
        else:
            await on_thread(lambda left: self._stage(bucket), deadline, f"{self._url}: waiting for {what}")

    async def broadcast(self, deadline: Deadline) -> None:
        """Sends what was staged to the server's ranks; ask the server to receive it, at the same time."""
        staged, self._staged = self._staged, None
        assert staged is not None, "nothing was staged"
        what = f"{self._url}: waiting for a broadcast of {staged.nbytes:,} bytes"
        await on_thread(lambda left: self._broadcast(staged, left), deadline, what)
        self.sent += staged.nbytes

    def close(self) -> None:
        """Gives the group up, whatever it is doing: a thread inside a collective ends by itself, the server sees the
        connections close."""
        pg, self._pg = self._pg, None
        if pg is not None:
            with suppress(Exception):  # not every backend of every torch can
                pg.abort()

    def _join(self, left: float) -> None:
        # The same nesting of prefixes as torch.distributed gives the server's side.
        device = next(iter(BackendConfig(Backend(self.backend)).get_device_backend_map()))
        store = dist.PrefixStore(
            f"{device}/", dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, self._store))
        )
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _NEVER
            self._pg = dist.ProcessGroupNCCL(store, 0, self._size, options)
            return  # NCCL connects with the first broadcast
        store.set_timeout(timedelta(seconds=left))
        options = cast(Any, dist.ProcessGroupGloo)._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
        options._timeout = timedelta(seconds=left)
        self._pg = dist.ProcessGroupGloo(store, 0, self._size, options)

    def _stage(self, bucket: Bucket) -> None:
        self._staged = bucket.read(self._device if self.backend == "nccl" else None)

    def _broadcast(self, tensor: Tensor, left: float) -> None:
        pg = self._pg
        if pg is None:
            raise RuntimeError("the group was closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self.backend == "nccl":
            with torch.cuda.device(self._device):
                staged = tensor.to(self._device, non_blocking=True)
                pg.broadcast([staged], options).wait()
                torch.cuda.current_stream().synchronize()
            return
        options.timeout = timedelta(seconds=left)
        pg.broadcast([tensor], options).wait()


async def on_thread(function: Callable[[float], None], deadline: Deadline, what: str) -> None:
    """Calls a function that may hang, with the seconds that are left.

    Args:
        what: the wait, in errors.

    Raises:
        GenerationError: by `function`, of whatever it raised, or it was not done within the deadline.
    """
    left = deadline.left(what)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def work() -> None:
        error: BaseException | None = None
        try:
            function(left)
        except BaseException as failure:  # it belongs to whoever waits
            error = failure
        with suppress(RuntimeError):  # the loop has gone: nobody waits
            loop.call_soon_threadsafe(settle, error)

    # A daemon, not an executor's thread: those are joined when the process ends, and a collective may hang.
    threading.Thread(target=work, name="weights", daemon=True).start()
    try:
        async with within(left):
            await done
    except TimeoutError as error:
        raise GenerationError(f"{what}: not done within deadline_s = {deadline.seconds:g} s") from error
    except GenerationError:
        raise
    except Exception as error:
        raise GenerationError(f"{what}: {error}") from error


def _local_address(url: str) -> tuple[socket.AddressFamily, str]:
    """Family and address of this machine's side of a connection to `url`; nothing is sent."""
    parts = urlsplit(url)
    family, kind, protocol, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return family, probe.getsockname()[0]
