"""Groups of ranks that run one plan together: their collectives, as `app.tree.RankGroup` wants them.

Promises: ranks g * size to (g + 1) * size - 1 are group g, so that torchrun's and SLURM's order keeps a group on one
host; collectives of a group are not counted with those of all ranks, since groups run different plans; one that fails
says in which group and operation, and who is missing or died, as those of all ranks do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from app.strategies.ranks.collectives import Communicator, all_gather_flat, reduce_scatter_flat


class GroupRanks:
    """The group of this rank, of `size` ranks each. Made by every rank of `ranks`, at the same time.

    Args:
        ranks: all ranks of the run, a multiple of `size`.
        timeout: how long a rank waits for the others in one collective.

    Attributes:
        rank: this rank's place in its group. index: which group that is. device: where its tensors are.
    """

    def __init__(self, ranks: Communicator, size: int, timeout: timedelta) -> None:
        self._ranks, self.size, self.device = ranks, size, ranks.device
        self.rank, self.index = ranks.rank % size, ranks.rank // size
        # Every rank takes part in the making of every group.
        made = [
            dist.new_group(list(range(first, first + size)), timeout=timeout) for first in range(0, ranks.size, size)
        ]
        self._group = made[self.index]
        # The ranks with the same place in all groups, which hold the same shards where parameters are sharded.
        across = [dist.new_group(list(range(place, ranks.size, size)), timeout=timeout) for place in range(size)]
        self._across = across[self.rank]

    @property
    def mesh(self) -> DeviceMesh:
        """The group's, of one dimension, for `fully_shard`."""
        return DeviceMesh.from_group(self._group, self._ranks.device.type)

    def sum_over_groups_(self, tensor: Tensor, what: str) -> None:
        """Collective of all ranks: `tensor` becomes the sum over groups of those at this rank's place, the same bits in
        each."""
        if self._ranks.size > self.size:
            with self._ranks.named(f"sum over groups of the gradient of {what}"):
                dist.all_reduce(tensor, group=self._across)

    def exchange(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        received = pieces[0].new_empty(sum(sizes))
        lengths = [piece.numel() for piece in pieces]
        self._run(
            "exchange of rows and heads", dist.all_to_all_single, received, torch.cat(list(pieces)), sizes, lengths
        )
        return list(received.split(list(sizes)))

    def gather_flat(self, whole: Tensor, own: Tensor, what: str, async_op: bool) -> Any:
        """Collective: `whole` [n * size] becomes what each rank has as `own` [n]; with `async_op` once what is returned
        is waited for."""
        return self._run(f"gather of {what}", all_gather_flat, whole, own, async_op=async_op)

    def reduce_scatter_flat(self, own: Tensor, whole: Tensor, what: str, async_op: bool) -> Any:
        """Collective: `own` [n] becomes this rank's part of the sum of all ranks' `whole` [n * size]."""
        return self._run(f"sum of {what}", reduce_scatter_flat, own, whole, async_op=async_op)

    def gather_to(self, owner: int, own: Tensor, what: str) -> Tensor | None:
        """Collective: at the place `owner` [size, n], what each rank has as `own` [n]; None at the others."""
        every = own.new_empty(self.size, *own.shape) if self.rank == owner else None
        parts = None if every is None else list(every)
        self._run(f"gather of {what}", dist.gather, own, parts, group_dst=owner)
        return every

    def scatter_from(self, owner: int, own: Tensor, every: Tensor | None, what: str) -> None:
        """Collective: `own` [n] becomes this rank's row of `every` [size, n], which the place `owner` has."""
        parts = None if every is None else list(every)
        self._run(f"scattering of {what}", dist.scatter, own, parts, group_src=owner)

    def sum_(self, tensor: Tensor) -> None:
        there = tensor.to(self._ranks.device)
        self._run("sum of outputs", dist.all_reduce, there)
        if there is not tensor:
            tensor.copy_(there)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        mine = torch.tensor([list(values)], dtype=torch.float64, device=self._ranks.device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self._run("agreement on a plan", dist.all_gather, everyone, mine)
        return [found[0].tolist() for found in everyone]

    def _run(self, what: str, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._ranks.named(f"{what} in group {self.index}", counted=False):
            return operation(*arguments, group=self._group, **options)
