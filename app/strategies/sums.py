"""When which bucket of gradients is summed over ranks: as soon as the step's last backward has completed it.

Promises: all ranks begin the same sums in the same order, whatever each of them runs and however far it is: a bucket
waits for its turn, and what a rank has not begun by the end of its backward passes it begins then. The bits are those
of sums that all begin at the end. A gradient that is added to a bucket after its sum began is an error that names the
parameter; so is a collective of the control group between the first sum and the end of `finish`, which other ranks
might be in before any sum. Nothing waits inside a backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn import Parameter

from app.strategies.buckets import Bucket
from app.strategies.ranks.collectives import Communicator, Started


class GradientSums:
    """The sums of one step after another.

    Args:
        buckets: in the order of their turns, see `in_turns`.
        ranks: whose gradients are added.

    Attributes:
        early: how many sums of the step began before `finish`.
    """

    def __init__(self, buckets: Sequence[Bucket], ranks: Communicator) -> None:
        self._buckets, self._ranks = buckets, ranks
        self._bucket_of = {id(param): k for k, bucket in enumerate(buckets) for param in bucket.params}
        self._hooks: list[Any] = []
        self._under_way: deque[Started] = deque()
        self.reset()

    def reset(self) -> None:
        """Before a step: no gradient is complete."""
        self._disarm()
        self._under_way.clear()
        self._incomplete = [{id(param) for param in bucket.params} for bucket in self._buckets]
        self._begun = self.early = 0
        self._ranks.promised = None

    def completing(self, parameters: Iterable[Parameter], roots: Sequence[Tensor]) -> None:
        """The next backward, from `roots`, is the step's last to add to the gradients of `parameters`: those that it
        does not reach are complete now, the others when it has passed them."""
        if self._ranks.size == 1:
            return
        self._disarm()
        reached, hides = _accumulators(roots)
        for key in {id(param) for param in parameters} & self._bucket_of.keys():
            incomplete, node = self._incomplete[self._bucket_of[key]], reached.get(key)
            if node is None and not hides:
                incomplete.discard(key)
            elif node is not None:
                incomplete.add(key)  # again, where a pass is repeated
                self._hooks.append(node.register_hook(partial(self._complete, key)))
        self._begin_complete()

    @torch.no_grad()
    def finish(self) -> None:
        """Collective, after all backward passes: begins what has not begun, and returns when each bucket has its
        `summed` (on the current stream)."""
        self._disarm()
        for bucket in self._buckets[: self._begun]:
            bucket.check_detached()
        for bucket in self._buckets[self._begun :]:
            bucket.check_attached()
        self.early = self._begun
        while self._begun < len(self._buckets):
            while len(self._under_way) >= self._ranks.most_sums:
                self._under_way.popleft().wait()
            self._begin_next()
        while self._under_way:
            self._under_way.popleft().wait()
        self._ranks.promised = None

    def _complete(self, key: int, *unused: Any) -> None:
        self._incomplete[self._bucket_of[key]].discard(key)
        self._begin_complete()

    @torch.no_grad()
    def _begin_complete(self) -> None:
        """What is complete and has its turn, as far as this takes no waiting."""
        while self._begun < len(self._buckets) and not self._incomplete[self._begun]:
            if len(self._under_way) >= self._ranks.most_sums:
                if not self._under_way[0].done:
                    return
                self._under_way.popleft().wait()
            self._buckets[self._begun].check_attached()
            self._begin_next()

    def _begin_next(self) -> None:
        self._under_way.append(self._buckets[self._begun].start_sum())
        self._begun += 1
        self._ranks.promised = "to sum the gradients of a step over ranks"  # until all have: others may have begun none

    def _disarm(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _accumulators(roots: Iterable[Tensor]) -> tuple[dict[int, Any], bool]:
    """The nodes that add to the gradients of leaves, of all that a backward from `roots` runs, by the leaf's id. Their
    hooks are called when all has been added, also where a layer adds to `.grad` itself and gives autograd nothing. And
    whether there may be others: reentrant checkpointing makes its graph in backward."""
    seen: set[Any] = set()
    hides = False
    found: dict[int, Any] = {}
    left = [root.grad_fn for root in roots]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        hides |= node.name().startswith("CheckpointFunction")
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = node
        left += [above for above, _ in node.next_functions]
    return found, hides


def in_turns(buckets: Iterable[Bucket], positions: Mapping[str, int]) -> list[Bucket]:
    """Buckets roughly as a step completes them: one child of the module after another (the policy runs before its
    critic), each from its last layer to its first. `positions`: the module's parameters in their order; the same on
    all ranks, as the turns then are."""
    first: dict[str, int] = {}  # parameter of a child
    for name, position in positions.items():
        first.setdefault(name.split(".")[0], position)

    def turn(bucket: Bucket) -> tuple[int, int]:
        child = max(first.get(name.split(".")[0], len(positions)) for name in bucket.names)
        return child, -min(positions.get(name, len(positions)) for name in bucket.names)

    return sorted(buckets, key=turn)


def read_after_backward(trainer: pl.Trainer) -> bool:
    """Whether the module or a callback may read or change a rank's own gradients when backward has ended: all of them
    have to be there then."""
    callbacks: list[pl.Callback] = trainer.callbacks
    hook = "on_after_backward"
    return is_overridden(hook, trainer.lightning_module) or any(is_overridden(hook, c, pl.Callback) for c in callbacks)
