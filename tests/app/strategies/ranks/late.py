"""A process group that behaves as NCCL's does, on CPUs: operations are enqueued, waiting for one returns at once, and a
thread does them (over gloo) in their order. It knows what gradients and weights need, and nothing else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class LateWork(dist._Work):
    def __init__(self, prompt: bool) -> None:
        super().__init__()
        self.finished = threading.Event()
        self._prompt = prompt

    def is_completed(self) -> bool:
        return self.finished.is_set()

    def wait(self, timeout: Any = None) -> bool:
        """At once; a `prompt` group stands for a device whose every reader waits for its stream."""
        return self.finished.wait(60.0) if self._prompt else True


class LateGroup(dist.ProcessGroup):
    """Args: gloo: does the work. prompt: see `LateWork.wait`."""

    def __init__(self, rank: int, size: int, gloo: dist.ProcessGroup, prompt: bool) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._gloo, self._prompt = rank, size, gloo, prompt
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], LateWork]] = queue.SimpleQueue()
        self.operations: list[str] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _reduce_scatter_base(self, output: Tensor, flat: Tensor, options: Any = None) -> LateWork:
        def run() -> None:
            parts = torch.empty_like(flat)
            dist.all_to_all_single(parts, flat, group=self._gloo)
            torch.sum(parts.view(self._size, -1), dim=0, out=output)

        return self._enqueue("reduce-scatter", run)

    def _allgather_base(self, flat: Tensor, mine: Tensor, options: Any = None) -> LateWork:
        def run() -> None:
            dist.all_gather(list(flat.view(self._size, -1)), mine.clone(), group=self._gloo)

        return self._enqueue("all-gather", run)

    # torch 2.13 calls them by these names.
    reduce_scatter_single, all_gather_single = _reduce_scatter_base, _allgather_base

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> LateWork:
        return self._enqueue("broadcast", lambda: dist.broadcast(tensors[0], group=self._gloo, group_src=0) and None)

    def _enqueue(self, name: str, run: Callable[[], None]) -> LateWork:
        self.operations.append(name)
        work = LateWork(self._prompt)
        self._queue.put((run, work))
        return work

    def _run(self) -> None:
        torch.set_num_threads(1)
        while True:
            run, work = self._queue.get()
            run()
            work.finished.set()

    def getBackendName(self) -> str:
        return "late"

    def __getattribute__(self, name: str) -> Any:
        if name in (
            "allreduce",
            "allgather",
            "barrier",
            "send",
            "recv",
            "alltoall_base",
            "scatter",
            "gather",
            "reduce",
        ):
            raise AssertionError(f"{name} over the group of gradients and weights")
        return super().__getattribute__(name)


def late_group(timeout: float, prompt: bool = False) -> LateGroup:
    """Collective."""
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def make(store: Any, rank: int, size: int, timeout: Any) -> LateGroup:
        return LateGroup(rank, size, gloo, prompt)

    if not hasattr(dist.Backend, "LATE"):
        dist.Backend.register_backend("late", lambda *arguments: _make(*arguments), devices=["cpu"])
    global _make
    _make = make
    group: Any = dist.new_group(backend="late")
    return group


_make: Callable[..., LateGroup]


@contextmanager
def as_default(group: LateGroup) -> Iterator[None]:
    """The group of all ranks is `group`, as it would be on GPUs."""
    before = dist.GroupMember.WORLD
    dist.GroupMember.WORLD = group
    try:
        yield
    finally:
        dist.GroupMember.WORLD = before
