"""Collectives of all ranks, as the strategy and the sharded optimizer need them.

Two process groups: gradients and weights travel over the data group (nccl on GPUs), everything else over the control
group, which is gloo's always: there a rank that waits does not keep its GPU busy, and an error names itself. Promises:
with one process nothing is communicated (and no process group is needed); reductions that steer control flow
(`sum_float`) give the same bits on every rank; a collective that fails says on which rank, in what operation and which
ranks are missing, instead of a bare transport error, also when it was only enqueued on a device and hangs there
(`settle`). How long a rank waits for the others is `DTAStrategy(timeout=...)`, 30 minutes unless told otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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


class Communicator:
    """The ranks that train together.

    Args:
        group: process group of all ranks for gradients and weights, or None for a single process without one.
        device: where its tensors must live (the rank's GPU under nccl, the CPU under gloo).
        control: gloo process group of all ranks for everything else, used by this thread alone; by default `group`.
        timeout: seconds that a collective enqueued on a device may take.

    Attributes:
        progress: the collectives so far. watch: who knows what the other ranks do, when there is a watch.
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
        self.progress = Progress()
        self.watch: RankWatch | None = None

    # Gradients and weights

    def reduce_scatter_sum_(self, flat: Tensor, what: str) -> Tensor:
        """Sums `flat` [n * size] over ranks, in place; returns this rank's slice [n], the only part that is then
        meaningful. Under gloo takes another `flat` of memory for the moment, and adds in rank order."""
        mine = self.slice_of(flat)
        if self.size > 1:
            what = f"reduce-scatter of {what}"
            if self._exchanges:
                parts = torch.empty_like(flat)
                self._enqueue(what, dist.all_to_all_single, parts, flat)
                torch.sum(parts.view(self.size, -1), dim=0, out=mine)
            else:
                self._enqueue(what, reduce_scatter_flat, mine, flat)
        return mine

    def all_gather_(self, flat: Tensor, what: str) -> None:
        """Fills `flat` [n * size], in place, with every rank's own slice of it."""
        if self.size > 1:
            self._enqueue(f"all-gather of {what}", all_gather_flat, flat, self.slice_of(flat))

    def broadcast_weights_(self, tensor: Tensor, what: str) -> None:
        """Overwrites `tensor` with rank 0's, in place."""
        if self.size > 1:
            there = tensor.detach().to(self.device).contiguous()
            self._enqueue(f"broadcast of {what}", dist.broadcast, there, group_src=0)
            if there.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(there)

    def _enqueue(self, what: str, operation: Callable[..., Any], *tensors: Tensor, **options: Any) -> None:
        with self.named(what):
            work = operation(*tensors, group=self.group, async_op=True, **options)
            work.wait()  # gloo: until it is done; nccl: the device's stream will wait, this thread does not
            done = work.is_completed
            if self.device.type == "cuda":
                with torch.cuda.device(self.device):
                    event = torch.cuda.Event()
                    event.record()
                done = event.query
            self.progress.enqueue(done)

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
        texts: list[str] = [""] * self.size
        with self.control_traffic(f"comparison of {what}"):
            dist.all_gather_object(texts, description, group=self.control)
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
        texts: list[str] = [""] * self.size
        if self.size > 1:
            with self.control_traffic(f"exchange of errors ({what})"):
                dist.all_gather_object(texts, f"{type(error).__name__}: {error}" if error else "", group=self.control)
        if error is not None:
            raise error
        rank = next(rank for rank, text in enumerate(texts) if text)
        raise RuntimeError(f"{what} failed on rank {rank}: {texts[rank]}")

    @contextmanager
    def named(self, what: str, counted: bool = True) -> Iterator[None]:
        """Around a collective: an error says which it was and which ranks are missing from it. `counted`: it is one of
        all ranks, whose counts say who is missing.

        Raises:
            CollectiveError: in place of the transport's RuntimeError.
        """
        self.progress.enter(what, counted)
        try:
            yield
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise self._failed(what, self.progress.count, error) from error
        finally:
            self.progress.leave()

    @contextmanager
    def control_traffic(self, what: str) -> Iterator[None]:
        """Around a collective of the control group: what the data group still does comes first, so that this one waits
        for ranks alone. With one process there is nothing to enter."""
        self.settle()
        with self.named(what) if self.size > 1 else nullcontext():
            yield

    def _failed(self, what: str, number: int, reason: object) -> CollectiveError:
        explanation = self.watch.explain() if self.watch is not None else "look for the first error of the others"
        return CollectiveError(
            f"rank {self.rank} of {self.size}: {what} failed (collective {number}): {reason}. {explanation}. If a rank"
            " was only slow, raise DTAStrategy(timeout=...)"
        )
