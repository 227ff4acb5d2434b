"""Collectives of all ranks, as the strategy and the sharded optimizer need them.

Two process groups: gradients and weights travel over the data group (nccl on GPUs), everything else over the control
group, which is gloo's always: there a rank that waits does not keep its GPU busy, and an error names itself. Promises:
with one process nothing is communicated (and no process group is needed); reductions that steer control flow
(`sum_float`) give the same bits on every rank; a collective that fails says on which rank, in what operation and which
ranks are missing, instead of a bare transport error, also when it was only enqueued on a device and hangs there
(`settle`), or began long before it is waited for (`Started`). How long a rank waits for the others is
`DTAStrategy(timeout=...)`, 30 minutes unless told otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.strategies.ranks.watch import Progress, RankWatch

# torch 2.13 renamed the flat collectives and deprecates the names that 2.11 and 2.12 know.
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_POLL = 0.001  # seconds between looks at what a device does


class CollectiveError(RuntimeError):
    """A collective failed or timed out; the message names rank, operation and remedy."""


class Started:
    """A collective of gradients or weights that is under way: its tensors are left alone until `wait`.

    Args:
        ranks: whose it is. what, number: its name, and its place among those that all ranks enter.
        work: the backend's; None where there is nothing to wait for.
        finish: called once it is done.
    """

    def __init__(
        self, ranks: Communicator, what: str, number: int, work: Any | None, finish: Callable[[], Any] | None = None
    ) -> None:
        self._ranks, self._what, self._number, self._work, self._finish = ranks, what, number, work, finish

    @property
    def done(self) -> bool:
        """Whether `wait` will not wait."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """gloo: returns when it is done; nccl: what is enqueued on the current stream from here on comes after it, and
        this thread goes on.

        Raises:
            CollectiveError: it failed.
        """
        if self._work is not None:
            with self._ranks.named(self._what, counted=False, number=self._number):
                self._work.wait()
            self._ranks.progress.forget()
        if self._finish is not None:
            self._finish()
        self._work = self._finish = None


class Communicator:
    """The ranks that train together.

    Args:
        group: process group of all ranks for gradients and weights, or None for a single process without one.
        device: where its tensors must live (the rank's GPU under nccl, the CPU under gloo).
        control: gloo process group of all ranks for everything else, used by this thread alone; by default `group`.
        timeout: seconds that a collective enqueued on a device may take.

    Attributes:
        progress: the collectives so far. watch: who knows what the other ranks do, when there is a watch.
        most_sums: how many reduce-scatters may be under way at once: one where each needs memory of its own.
        promised: what all ranks have to begin before any of them enters a collective of the control group, if this
            one has begun something of the kind.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        control: dist.ProcessGroup | None = None,
        timeout: float = 1800.0,
    ) -> None:
        self.group = group
        self.control = control if control is not None else group
        self.device = device
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        # gloo's reduce-scatter is an all-reduce and moves twice the bytes of an exchange of the parts.
        self._exchanges = group is not None and dist.get_backend(group) == "gloo"
        self._timeout = timeout
        self.most_sums = 1 if self._exchanges else 1 << 30
        self.promised: str | None = None
        self.progress = Progress()
        self.watch: RankWatch | None = None

    # Gradients and weights

    def start_sum_(self, flat: Tensor, what: str, owner: int | None = None) -> Started:
        """Begins to sum `flat` [n * size] over ranks, in place; then this rank's slice [n] is the only part that is
        meaningful. Under gloo takes another `flat` of memory until it is waited for, and adds in rank order.
        `owner`: this rank has all of it [n], of any length, and the others nothing; under gloo it takes `size` of
        it meanwhile."""
        if owner is not None and self._exchanges:  # gloo's reduction moves more
            every = flat.new_empty(self.size, flat.numel()) if self.rank == owner else None
            total = partial(torch.sum, every, dim=0, out=flat) if every is not None else None
            there = {"gather_list": list(every) if every is not None else None, "group_dst": owner}
            return self._start(f"gathering of {what}", dist.gather, flat, finish=total, **there)
        if owner is not None:
            return self._start(f"reduction of {what}", dist.reduce, flat, group_dst=owner)
        if self._exchanges and self.size > 1:
            parts = torch.empty_like(flat)
            mine = self.slice_of(flat)
            add = lambda: torch.sum(parts.view(self.size, -1), dim=0, out=mine)  # noqa: E731
            return self._start(f"reduce-scatter of {what}", dist.all_to_all_single, parts, flat, finish=add)
        return self._start(f"reduce-scatter of {what}", reduce_scatter_flat, self.slice_of(flat), flat)

    def all_gather_(self, flat: Tensor, what: str) -> None:
        """Fills `flat` [n * size], in place, with every rank's own slice of it."""
        self._start(f"all-gather of {what}", all_gather_flat, flat, self.slice_of(flat)).wait()

    def broadcast_weights_(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Overwrites `tensor` with the one of rank `source`, in place."""
        if self.size > 1:
            there = tensor.detach().to(self.device).contiguous()
            self._start(f"broadcast of {what}", dist.broadcast, there, group_src=source).wait()
            if there.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(there)

    def _start(
        self,
        what: str,
        operation: Callable[..., Any],
        *tensors: Tensor,
        finish: Callable[[], Any] | None = None,
        **options: Any,
    ) -> Started:
        if self.size == 1:
            return Started(self, what, 0, None)
        with self.named(what):
            work = operation(*tensors, group=self.group, async_op=True, **options)
            self.progress.enqueue(work.is_completed)
        return Started(self, what, self.progress.count, work, finish)

    def settle(self) -> None:
        """Returns when what was enqueued is done, so that nothing afterwards can wait for it unnamed.

        Raises:
            CollectiveError: it took longer than the timeout.
        """
        while (waiting := self.progress.unfinished) is not None:
            if waiting.seconds > self._timeout:
                raise self._failed(waiting.what, waiting.number, f"not done after {waiting.seconds:.0f} s")
            time.sleep(_POLL)

    def slice_of(self, flat: Tensor) -> Tensor:
        """View [n] of this rank's part of `flat` [n * size]."""
        length = flat.numel() // self.size
        return flat[self.rank * length : (self.rank + 1) * length]

    # Everything else

    def sum(self, tensor: Tensor) -> Tensor:
        """New tensor of the same shape, dtype and device: the sum over ranks."""
        with self.control_traffic("sum over ranks"):
            total = tensor.detach().to("cpu", copy=True)
            if self.size > 1:
                dist.all_reduce(total, group=self.control)
        return total.to(tensor.device)

    def sum_float(self, value: Tensor, what: str) -> float:
        """Sum over ranks of a scalar, in float64. Every rank adds the same numbers in rank order, so that all get the
        same bits and decide alike (an all-reduce may round differently on different ranks)."""
        return float(self.gather(value.detach().double(), what).sum())

    def gather(self, tensor: Tensor, what: str) -> Tensor:
        """[size, *shape] on the CPU: every rank's `tensor`, in rank order."""
        with self.control_traffic(f"all-gather of {what}"):
            mine = tensor.detach().cpu().reshape(-1)
            everyone = torch.empty(self.size * mine.numel(), dtype=mine.dtype)
            if self.size > 1:
                all_gather_flat(everyone, mine, group=self.control)
            else:
                everyone.copy_(mine)
        return everyone.view(self.size, *tensor.shape)

    def barrier(self, what: str) -> None:
        """Returns when every rank has come here."""
        with self.control_traffic(what):
            if self.size > 1:
                dist.barrier(group=self.control)

    def broadcast_object(self, obj: Any, source: int, what: str) -> Any:
        """What rank `source` passed (it is pickled)."""
        box = [obj]
        with self.control_traffic(what):
            if self.size > 1:
                dist.broadcast_object_list(box, group=self.control, group_src=source)
        return box[0]

    def gather_objects(self, obj: Any, what: str) -> list[Any]:
        """What every rank passed, in rank order (it is pickled)."""
        everyone: list[Any] = [obj] * self.size
        with self.control_traffic(what):
            if self.size > 1:
                dist.all_gather_object(everyone, obj, group=self.control)
        return everyone

    def broadcast_bytes(self, message: Tensor | None, what: str) -> Tensor:
        """Rank 0 passes uint8 on the CPU, of any size, the others None; every rank gets it (rank 0 the same object)."""
        size = torch.tensor([len(message) if message is not None else 0])
        self.broadcast_(size, f"{what} (size)")
        if message is None:
            message = torch.empty(int(size), dtype=torch.uint8)
        return self.broadcast_(message, what)

    def collect(self, mine: Tensor, what: str) -> list[Tensor]:
        """On rank 0 what every rank passed, uint8 on the CPU and of any sizes, by rank; [] elsewhere."""
        sizes = self.gather(torch.tensor([len(mine)]), f"{what} (sizes)").view(-1).tolist()
        if self.rank != 0:
            self._point_to_point(dist.isend, [(0, mine)], what)
            return []
        others = [torch.empty(size, dtype=torch.uint8) for size in sizes[1:]]
        self._point_to_point(dist.irecv, list(enumerate(others, 1)), what)
        return [mine, *others]

    def _point_to_point(self, operation: Callable[..., Any], tensors: Sequence[tuple[int, Tensor]], what: str) -> None:
        """Sends to, or receives from, the ranks beside the tensors, all at once. Entered by every rank, so that the
        watch can compare their counts."""
        with self.control_traffic(what):
            found = [dist.P2POp(operation, t, group=self.control, group_peer=rank) for rank, t in tensors if len(t)]
            for work in dist.batch_isend_irecv(found) if found else []:
                work.wait()

    def broadcast_(self, tensor: Tensor, what: str) -> Tensor:
        """Overwrites `tensor`, on the CPU, with rank 0's, in place."""
        with self.control_traffic(f"broadcast of {what}"):
            if self.size > 1:
                dist.broadcast(tensor, group=self.control, group_src=0)
        return tensor

    def require_equal(self, description: str, what: str, remedy: str) -> None:
        """Raises RuntimeError on every rank, naming the ranks and the first differing line, unless all ranks
        passed the same text."""
        if self.size == 1:
            return
        texts = self.gather_objects(description, f"comparison of {what}")
        different = [rank for rank, text in enumerate(texts) if text != texts[0]]
        if different:
            expected, got = texts[0].splitlines(), texts[different[0]].splitlines()
            at = next((i for i, (a, b) in enumerate(zip(expected, got)) if a != b), min(len(expected), len(got)))
            lines = [text[at] if at < len(text) else "nothing" for text in (expected, got)]
            raise RuntimeError(
                f"{what} differ between ranks: rank 0 has {lines[0]!r} where rank {different[0]} has {lines[1]!r}"
                f" (ranks that differ from rank 0: {different}); {remedy}"
            )

    def raise_together(self, error: Exception | None, what: str) -> None:
        """Collective: returns when no rank passes an error; otherwise every rank raises, its own error where it has
        one."""
        failed = torch.tensor([int(error is not None)])
        if not self.sum(failed).any():
            return
        told = f"{type(error).__name__}: {error}" if error else ""
        texts = self.gather_objects(told, f"exchange of errors ({what})")
        if error is not None:
            raise error
        rank = next(rank for rank, text in enumerate(texts) if text)
        raise RuntimeError(f"{what} failed on rank {rank}: {texts[rank]}")

    @contextmanager
    def named(self, what: str, counted: bool = True, number: int | None = None) -> Iterator[None]:
        """Around a collective: an error says which it was and which ranks are missing from it. `counted`: it is one of
        all ranks, whose counts say who is missing. `number`: of one that was entered before.

        Raises:
            CollectiveError: in place of the transport's RuntimeError.
        """
        self.progress.enter(what, counted, number)
        try:
            yield
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise self._failed(what, self.progress.count if number is None else number, error) from error
        finally:
            self.progress.leave()

    @contextmanager
    def control_traffic(self, what: str) -> Iterator[None]:
        """Around a collective of the control group: what the data group still does comes first, so that this one waits
        for ranks alone. With one process there is nothing to enter.

        Raises:
            RuntimeError: this rank has `promised` something that other ranks may not have begun.
        """
        if self.promised is not None:
            raise RuntimeError(
                f"{what}: a collective before all ranks have begun what this one has, {self.promised}; in a tree module"
                " talk to other ranks before its tree pass or after `backward` (in `end_step`), or set"
                " completes_gradients = False"
            )
        self.settle()
        with self.named(what) if self.size > 1 else nullcontext():
            yield

    def _failed(self, what: str, number: int, reason: object) -> CollectiveError:
        explanation = self.watch.explain() if self.watch is not None else "look for the first error of the others"
        return CollectiveError(
            f"rank {self.rank} of {self.size}: {what} failed (collective {number}): {reason}. {explanation}. If a rank"
            " was only slow, raise DTAStrategy(timeout=...)"
        )
