"""Collectives over one explicit process group, as the strategy and the sharded optimizer need them.

Promises: with one process nothing is communicated (and no process group is needed); reductions that steer
control flow (`sum_float`) give the same bits on every rank; a collective that fails says on which rank, in what
operation and which ranks are missing, instead of a bare transport error. How long a rank waits for the others is the
timeout of the process group (`DTAStrategy(timeout=...)`, 30 minutes unless told otherwise).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.strategies.watch import Progress, RankWatch

# torch 2.13 renamed the flat collectives and deprecates the names that 2.11 and 2.12 know.
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveError(RuntimeError):
    """A collective failed or timed out; the message names rank, operation and remedy."""


class Communicator:
    """The ranks that train together.

    Args:
        group: process group of all ranks, or None for a single process without one.
        device: where tensors must live to be communicated (the rank's GPU under nccl, the CPU under gloo).

    Attributes:
        progress: the collectives so far. watch: who knows what the other ranks do, when there is a watch.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        # gloo's reduce-scatter is an all-reduce and moves twice the bytes of an exchange of the parts.
        self._exchanges = group is not None and dist.get_backend(group) == "gloo"
        self.progress = Progress()
        self.watch: RankWatch | None = None

    def reduce_scatter_sum_(self, flat: Tensor, what: str) -> Tensor:
        """Sums `flat` [n * size] over ranks, in place; returns this rank's slice [n], the only part that is then
        meaningful. Under gloo takes another `flat` of memory for the moment, and adds in rank order."""
        mine = self.slice_of(flat)
        if self.size > 1:
            with self.named(f"reduce-scatter of {what}"):
                if self._exchanges:
                    parts = torch.empty_like(flat)
                    dist.all_to_all_single(parts, flat, group=self.group)
                    torch.sum(parts.view(self.size, -1), dim=0, out=mine)
                else:
                    _reduce_scatter_flat(mine, flat, group=self.group)
        return mine

    def all_gather_(self, flat: Tensor, what: str) -> None:
        """Fills `flat` [n * size], in place, with every rank's own slice of it."""
        if self.size > 1:
            with self.named(f"all-gather of {what}"):
                _all_gather_flat(flat, self.slice_of(flat), group=self.group)

    def slice_of(self, flat: Tensor) -> Tensor:
        """View [n] of this rank's part of `flat` [n * size]."""
        length = flat.numel() // self.size
        return flat[self.rank * length : (self.rank + 1) * length]

    def sum(self, tensor: Tensor) -> Tensor:
        """New tensor of the same shape, dtype and device: the sum over ranks."""
        total = tensor.detach().to(self.device, copy=True)
        if self.size > 1:
            with self.named("sum over ranks"):
                dist.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def sum_float(self, value: Tensor, what: str) -> float:
        """Sum over ranks of a scalar, in float64. Every rank adds the same numbers in rank order, so that all get the
        same bits and decide alike (an all-reduce may round differently on different ranks)."""
        values = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        values[self.rank] = value
        self.all_gather_(values, what)
        return float(values.sum())

    def gather(self, tensor: Tensor, what: str) -> Tensor:
        """[size, *shape] on the CPU: every rank's `tensor`, in rank order."""
        everyone = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype, device=self.device)
        self.slice_of(everyone).copy_(tensor.reshape(-1))
        self.all_gather_(everyone, what)
        return everyone.cpu().view(self.size, *tensor.shape)

    def scatter(self, parts: Sequence[Tensor] | None, what: str) -> Tensor:
        """Rank 0 passes uint8 tensors on the CPU, one a rank and of any sizes, the others None; every rank gets its
        own, on the CPU (rank 0 the same object)."""
        sizes = torch.tensor([len(part) for part in parts]) if parts is not None else torch.zeros(self.size).long()
        self.broadcast_(sizes, f"{what} (sizes)")
        if parts is not None:
            others = [(rank, part.to(self.device)) for rank, part in enumerate(parts) if rank]
            self._point_to_point(dist.isend, others, what)
            return parts[0]
        mine = torch.empty(int(sizes[self.rank]), dtype=torch.uint8, device=self.device)
        self._point_to_point(dist.irecv, [(0, mine)], what)
        return mine.cpu()

    def collect(self, mine: Tensor, what: str) -> list[Tensor]:
        """On rank 0 what every rank passed, uint8 on the CPU and of any sizes, by rank; [] elsewhere."""
        sizes = self.gather(torch.tensor([len(mine)]), f"{what} (sizes)").view(-1).tolist()
        if self.rank != 0:
            self._point_to_point(dist.isend, [(0, mine.to(self.device))], what)
            return []
        others = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes[1:]]
        self._point_to_point(dist.irecv, list(enumerate(others, 1)), what)
        return [mine, *(other.cpu() for other in others)]

    def _point_to_point(self, operation: Callable[..., Any], tensors: Sequence[tuple[int, Tensor]], what: str) -> None:
        """Sends to, or receives from, the ranks beside the tensors, all at once. Entered by every rank, so that the
        watch can compare their counts."""
        with self.named(what):
            found = [dist.P2POp(operation, t, group=self.group, group_peer=rank) for rank, t in tensors if len(t)]
            for work in dist.batch_isend_irecv(found) if found else []:
                work.wait()

    def broadcast_(self, tensor: Tensor, what: str) -> Tensor:
        """Overwrites `tensor` with rank 0's, in place."""
        if self.size > 1:
            there = tensor.detach().to(self.device).contiguous()
            with self.named(f"broadcast of {what}"):
                dist.broadcast(there, group=self.group, group_src=0)
            if there.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(there)
        return tensor

    def require_equal(self, description: str, what: str, remedy: str) -> None:
        """Raises RuntimeError on every rank, naming the ranks and the first differing line, unless all ranks
        passed the same text."""
        if self.size == 1:
            return
        texts: list[str] = [""] * self.size
        with self.named(f"comparison of {what}"):
            dist.all_gather_object(texts, description, group=self.group)
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
        failed = torch.tensor([int(error is not None)], device=self.device)
        if not self.sum(failed).any():
            return
        texts: list[str] = [""] * self.size
        if self.size > 1:
            with self.named(f"exchange of errors ({what})"):
                dist.all_gather_object(texts, f"{type(error).__name__}: {error}" if error else "", group=self.group)
        if error is not None:
            raise error
        rank = next(rank for rank, text in enumerate(texts) if text)
        raise RuntimeError(f"{what} failed on rank {rank}: {texts[rank]}")

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Around a collective: an error says which it was and which ranks are missing from it.

        Raises:
            CollectiveError: in place of the transport's RuntimeError.
        """
        self.progress.enter(what)
        try:
            yield
        except RuntimeError as error:
            explanation = self.watch.explain() if self.watch is not None else "look for the first error of the others"
            raise CollectiveError(
                f"rank {self.rank} of {self.size}: {what} failed (collective {self.progress.count}): {error}."
                f" {explanation}. If a rank was only slow, raise DTAStrategy(timeout=...)"
            ) from error
        finally:
            self.progress.leave()
