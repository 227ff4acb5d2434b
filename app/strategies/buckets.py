"""Flat buckets: parameters of one dtype and one parameter group in one buffer, cut into one shard per rank, or whole
the shard of one.

Promises: after construction every parameter is a view of its bucket's buffer (same values, same shape), so that a
whole bucket is communicated in one call without packing; every gradient is a view of a flat buffer in the accumulation
dtype, promote(float32, parameter dtype). A shard's *master* is the copy the optimizer updates: the parameters'
own memory where they are already in the accumulation dtype, a separate tensor for bfloat16. An optimizer that goes
element by element steps it flat; one that looks at whole parameters has those that its rank owns, in their shapes.
Knows nothing of optimizers or Lightning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from app.strategies.pieces import Piece
from app.strategies.ranks.collectives import Communicator, Started

# Elements. Every parameter starts at a multiple of it: kernels want aligned rows (64 bytes in bfloat16), and a matrix
# product may round differently on unaligned memory. Padding is zeros and stays zeros under element-wise optimizers.
ALIGNMENT = 32
_DEALT = 4  # buckets that an owner gets, about: fewer would be dealt unevenly, more would be more to communicate


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which gradients of a parameter of `dtype` are accumulated and its master is kept."""
    return torch.promote_types(torch.float32, dtype)


class Bucket:
    """Parameters of one dtype, device and parameter group.

    Args:
        named: (name, parameter) pairs; each parameter once, all of one dtype and device.
        ranks: who shares the work.
        offload: keep the master, and with it the optimizer's state, in CPU memory.
        owner: the rank whose shard is the whole bucket; None: every rank has an even one.

    Attributes (P = padded elements, S = P / ranks; with an owner P there and 0 on the others):
        flat: [P], parameter dtype; the parameters are views of it.
        gradients: [P], accumulation dtype; None when detached for good (`release_gradients`).
        master: [S], accumulation dtype, this rank's shard; a view of `flat` where dtype and device are equal.
        stepped: what the optimizer is given: the master, or an owner's views of it in the parameters' shapes.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        ranks: Communicator,
        offload: bool = False,
        owner: int | None = None,
    ) -> None:
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        self.ranks, self.owner = ranks, owner
        self.spans: list[tuple[int, int]] = []
        end = 0
        for param in self.params:
            self.spans.append((end, end + param.numel()))
            end += -(-param.numel() // ALIGNMENT) * ALIGNMENT
        shards = ranks.size if owner is None else 1
        padded = -(-end // (shards * ALIGNMENT)) * ALIGNMENT * shards
        first = self.params[0]
        dtype = accumulation_dtype(first.dtype)
        self.flat = torch.zeros(padded, dtype=first.dtype, device=first.device)
        self.gradients: Tensor | None = torch.zeros(padded, dtype=dtype, device=first.device)
        self._gradient_views: list[Tensor] = []
        self._addresses: list[int] = []
        for param, (start, stop) in zip(self.params, self.spans):
            view = self.flat[start:stop].view(param.shape)
            view.copy_(param.detach())
            param.data = view
            self._addresses.append(view.data_ptr())
            param.grad = None
            if param.dtype != dtype:
                param.grad_dtype = dtype  # autograd then adds bfloat16 gradients into the float32 view
            self._gradient_views.append(self.gradients[start:stop].view(param.shape))
        mine = self._shard_of(self.flat)
        self.master_is_parameter = dtype == first.dtype and not offload
        self.master = mine
        if not self.master_is_parameter:
            self.master = mine.to("cpu" if offload else mine.device, dtype, copy=True)
            if offload and mine.is_cuda:
                self.master = self.master.pin_memory()
        self.stepped = self.views(self.master) if owner is not None else [self.master]

    counted = True  # in sums over all ranks: every element is one rank's

    @property
    def dtype(self) -> torch.dtype:
        """The parameters'."""
        return self.flat.dtype

    def extremes(self) -> Tensor:
        """[2]: least and largest element of this rank's part."""
        return extremes(self._shard_of(self.flat))

    def beyond(self, bound: float) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name, and whether any of its elements is not below `bound` in size."""
        for name, param in zip(self.names, self.params):
            yield name, ~param.abs().lt(bound).all()

    @property
    def label(self) -> str:
        """For messages: its first parameter and how many more there are."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} and {len(self.names) - 1} more"

    def zero_gradients(self) -> None:
        """Zeroes the buffer and attaches its views as `param.grad`."""
        assert self.gradients is not None, "a bucket whose gradients were released is not trained again"
        self.gradients.zero_()
        for param, view in zip(self.params, self._gradient_views):
            param.grad = view

    def check_attached(self) -> None:
        """Raises RuntimeError, naming the parameter, if it or its gradient is no longer the view of the buffer."""
        for name, param, view, address in zip(self.names, self.params, self._gradient_views, self._addresses):
            if param.data_ptr() != address:
                raise RuntimeError(
                    f"parameter '{name}' got other memory after set-up (module.to(...), param.data = ...), so it would"
                    " not be trained; move or replace it before fit starts, or write into it in place (param.copy_)"
                )
            if param.grad is not view:
                found = "None" if param.grad is None else "another tensor"
                raise RuntimeError(
                    f"gradient of '{name}': param.grad is {found}, not the view of the flat buffer that DTAStrategy"
                    " reduces, so this gradient would be lost; clear gradients with optimizer.zero_grad() only (not"
                    " module.zero_grad() or param.grad = ...) and let backward add to them"
                )

    def start_sum(self) -> Started:
        """Begins to sum over ranks: `summed`, once it is waited for. Detaches `param.grad`: outside this rank's shard
        the buffer then holds partial sums, and None is better than a wrong gradient."""
        assert self.gradients is not None
        for param in self.params:
            param.grad = None
        return self.ranks.start_sum_(self.gradients, f"gradients ({self.label})", self.owner)

    @property
    def summed(self) -> Tensor:
        """This rank's shard [S] of the sum, in the buffer's own memory."""
        assert self.gradients is not None
        return self._shard_of(self.gradients)

    def check_detached(self) -> None:
        """Raises RuntimeError, naming the parameter, if it got a gradient after `start_sum`."""
        for name, param in zip(self.names, self.params):
            if param.grad is not None:
                raise RuntimeError(
                    f"gradient of '{name}' was added to after ranks had begun to sum it, so this part would be lost: a"
                    " tree module that does so after its tree pass sets completes_gradients = False"
                )

    def was_written(self) -> Tensor:
        """Whether this rank's part of the parameters was written in place (`load_state_dict` in a hook, weight
        averaging), so that a separate master no longer rounds to it. Values are compared, one read of the part, and
        nobody waits for it: autograd counts no writes to `param.data`."""
        written = self._shard_of(self.flat).to(self.master.device)
        return (self.master.to(written.dtype) != written).any()

    def adopt_written(self) -> None:
        """Takes it into the master: where this no longer rounds to the parameter, the parameter wins."""
        written = self._shard_of(self.flat).to(self.master.device)
        same = self.master.to(written.dtype) == written
        self.master.copy_(torch.where(same, self.master, written.to(self.master.dtype)))

    def gather_parameters(self) -> None:
        """Every rank's parameters become the ranks' masters, rounded to the parameter dtype."""
        if not self.master_is_parameter:
            self._shard_of(self.flat).copy_(self.master)
        if self.owner is None:
            self.ranks.all_gather_(self.flat, f"parameters ({self.label})")
        else:
            self.ranks.broadcast_weights_(self.flat, f"parameters ({self.label})", self.owner)

    def release_gradients(self) -> None:
        """Frees the gradient memory; the bucket can still be saved, not trained."""
        for param in self.params:
            param.grad = None
        self.gradients, self._gradient_views = None, []

    def views(self, shard: Tensor) -> list[Tensor]:
        """`shard` [S] as the optimizer steps it: see `stepped`."""
        if self.owner is None:
            return [shard]
        mine = zip(self.spans, self.params) if self.owner == self.ranks.rank else ()
        return [shard[start:stop].view(param.shape) for (start, stop), param in mine]

    def cut(self, full: Sequence[Tensor]) -> Tensor:
        """This rank's shard [S], accumulation dtype, of one full tensor a parameter (in the bucket's order)."""
        shard = torch.zeros_like(self.master)
        for tensor, span in zip(full, self.spans):
            low, high, offset = self._mine(span)
            shard[low - offset : high - offset].copy_(tensor.reshape(-1)[low - span[0] : high - span[0]])
        return shard

    def pieces(self, shard: Tensor) -> list[Piece]:
        """What this rank's shard [S] holds of each parameter (in the bucket's order), parameters laid out flat; views,
        some of them empty."""
        pieces = []
        for span in self.spans:
            low, high, offset = self._mine(span)
            pieces.append(Piece(shard[low - offset : high - offset], (low - span[0],), (span[1] - span[0],)))
        return pieces

    def _mine(self, span: tuple[int, int]) -> tuple[int, int, int]:
        """The part [low, high) of a parameter's span in this rank's shard (low = high: none), and the shard's start."""
        offset = self.ranks.rank * self.master.numel() if self.owner is None else 0
        low, high = (min(max(bound, offset), offset + self.master.numel()) for bound in span)
        return low, high, offset

    def _shard_of(self, flat: Tensor) -> Tensor:
        """View [S] of this rank's part of `flat` [P]."""
        if self.owner is None:
            return self.ranks.slice_of(flat)
        return flat if self.owner == self.ranks.rank else flat[:0]


def extremes(part: Tensor) -> Tensor:
    """[2]: least and largest element of `part`; zeros where it has none."""
    return torch.stack(part.aminmax()) if part.numel() else part.new_zeros(2)


def build_buckets(
    named: Sequence[tuple[str, Parameter]], ranks: Communicator, max_elements: int, offload: bool = False
) -> list[Bucket]:
    """Packs parameters, in order, into buckets of one dtype and device and at most `max_elements` (or one
    parameter)."""
    return [Bucket(items, ranks, offload) for items in _packed(named, max_elements)]


def build_owned(
    named: Sequence[tuple[str, Parameter]], loads: list[int], ranks: Communicator, max_elements: int, offload: bool
) -> list[Bucket]:
    """Packs parameters as `build_buckets`, some buckets a rank, and deals these to owners. Neighbours stay together,
    since they are complete together. `loads` [ranks]: elements of each, added to; the same on all ranks, as the owners
    then are."""
    total = sum(param.numel() for _, param in named)
    packed = _packed(named, min(max_elements, -(-total // (_DEALT * ranks.size))))
    owners = deal([sum(param.numel() for _, param in items) for items in packed], loads)
    return [Bucket(items, ranks, offload, owner) for items, owner in zip(packed, owners)]


def deal(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """An owner for each of `sizes`, the largest first to whoever has least. `loads`: what each has already, added
    to."""
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += sizes[number]
    return owners


def _packed(named: Sequence[tuple[str, Parameter]], max_elements: int) -> list[list[tuple[str, Parameter]]]:
    open_buckets: dict[tuple[torch.dtype, torch.device], list[tuple[str, Parameter]]] = {}
    packed: list[list[tuple[str, Parameter]]] = []
    for name, param in named:
        key = (param.dtype, param.device)
        current = open_buckets.get(key)
        if current is None or sum(p.numel() for _, p in current) + param.numel() > max_elements:
            current = open_buckets[key] = []
            packed.append(current)
        current.append((name, param))
    return packed
