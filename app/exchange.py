"""What a module needs of the ranks it trains on: `Ranks`; and `OneProcess`, its simplest implementation.

    exchange = ranks_of(self.trainer)      # asked once, when the module is set up

Promises: a module that speaks to `Ranks` alone knows no strategy, and trains alike on one process and on many.
`app.strategies.DTAStrategy` provides the other implementation, as its `exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from app.batch import RolloutBatch
from app.tree import RankGroup


class Parts(Protocol):
    """A batch to take sequences from: a `RolloutBatch`, or one that is still packed."""

    def select(self, indices: Sequence[int]) -> RolloutBatch: ...


Said = tuple[Any, Parts | None, Mapping[str, Tensor]]
"""What rank 0 tells all ranks alike: a request (JSON-able), the batch it is about (on other ranks packed, without
columns and metadata, as it was when they first heard of it), and tensors [M] on the CPU by name, M of each's own."""
Answer = Callable[[Any, Parts | None], Tensor]
"""Called with the request and the batch of what rank 0 asks for; returns a float32 tensor on the CPU."""


class Ranks(Protocol):
    """The ranks of a run: rank 0 owns the stream of batches and leads, the others do what it asks for."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def group(self) -> RankGroup | None:
        """The ranks with which this one runs every tree; None: each rank runs trees of its own."""

    @property
    def parts(self) -> int:
        """How many parts the tree of a step is cut into: one a group of ranks. Part p is that of ranks p * size to
        (p + 1) * size - 1, size being the ranks of a group."""

    @property
    def part(self) -> int:
        """Which of them this rank runs."""

    @property
    def partition_options(self) -> Mapping[str, Any]:
        """How `app.tree.partition` is to cut a tree into parts."""

    def lead(self, work: Callable[[], Said], answer: Answer) -> Said:
        """Collective. Rank 0 does `work`, in which it may `ask`; the others answer until it is done, and hear of its
        errors. What `work` returned: rank 0's own object there, an equal one elsewhere."""

    def ask(self, request: Any, parts: Parts | None, answer: Answer) -> list[Tensor]:
        """Rank 0, inside of `lead`: what each part's `answer(request, parts)` returned, by part: flat float32. The
        ranks of a group do the same work, and the first of them answers."""

    def forget(self) -> None:
        """On every rank alike: the batch that was named last will not be needed again."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Collective: the sum of `tensor` over ranks, of the same shape, dtype and device."""

    def gather(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Collective: every part's `tensor` (same shape, dtype and device), in order; of the ranks of a group, which
        have seen the same, the first one's. `group` is accepted for torchmetrics, whose `dist_sync_fn` this can be."""

    def completing(self, parameters: Iterable[nn.Parameter], roots: Sequence[Tensor]) -> None:
        """The next backward, from `roots`, is the last of this rank's step to add to the gradients of `parameters`:
        ranks may begin to sum what it completes while it runs. To be called where that is certain; until `backward` of
        the module has ended, no collective may follow."""

    def observe(self, tokens: int, pairs: int, seconds: float) -> None:
        """Collective, once an optimizer step, after gradients were summed: this rank ran a tree of `tokens` and
        attention `pairs` in `seconds`."""

    def grad_norm(self, optimizer: Optimizer, step: int) -> float:
        """Global 2-norm of the gradients that `optimizer` is about to use in optimizer step `step`, before clipping;
        0 without any.

        Raises:
            ValueError: it is not finite, and nothing here leaves such a step out.
        """


class OneProcess:
    """`Ranks` of a run under any strategy on one process."""

    rank, size = 0, 1
    group, parts, part = None, 1, 0
    partition_options: Mapping[str, Any] = {}

    def lead(self, work: Callable[[], Said], answer: Answer) -> Said:
        return work()

    def ask(self, request: Any, parts: Parts | None, answer: Answer) -> list[Tensor]:
        return [answer(request, parts).view(-1)]

    def forget(self) -> None:
        """Nothing is kept."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        return [tensor]

    def completing(self, parameters: Iterable[nn.Parameter], roots: Sequence[Tensor]) -> None:
        """There is nobody to add to."""

    def observe(self, tokens: int, pairs: int, seconds: float) -> None:
        """There is nothing to balance."""

    def grad_norm(self, optimizer: Optimizer, step: int) -> float:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not grads:
            return 0.0
        norm = torch.nn.utils.get_total_norm(grads)
        if not norm.isfinite():
            raise ValueError(
                f"the gradient norm of step {step} is {float(norm)}: this strategy cannot leave a step out, and the"
                " weights would be lost. Use trainer.strategy=app.strategies.DTAStrategy, which can, or a lower"
                " learning rate or trainer.gradient_clip_val"
            )
        return float(norm)


def ranks_of(trainer: Any) -> Ranks:
    """The ranks of a run, as its strategy has them work; of a strategy that knows nothing of it, one process."""
    exchange: Ranks | None = getattr(trainer.strategy, "exchange", None)
    return OneProcess() if exchange is None else exchange
