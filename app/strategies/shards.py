"""Parameters that the ranks of a group share out among themselves: torch's `fully_shard` (FSDP2), and a rank's part of
one parameter as `ShardedOptimizer` wants it.

Promises: every layer of every transformers model is a unit, gathered for its forward and its backward and freed after
each; gradients are summed over the group as each backward leaves a unit, and accumulate as shards in float32 (float64
for such parameters); several groups add their shards up once a step, when all backwards are done, so that no collective
inside a pass leaves the group. A rank's part of a parameter is a run of its rows: in checkpoints a box like any other.

Embeddings, output projections and adapters stay whole on every rank (with optimizer state over all ranks, as ever): a
pass needs them in every chunk, and their matrices would travel as often. What is below adapters is frozen, and only
gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from app.strategies.buckets import accumulation_dtype
from app.strategies.pieces import Piece
from app.strategies.ranks.groups import GroupRanks

_COMPUTES_IN = "_computes_in"  # attribute of parameters that are kept in another dtype


def refuse_shards(module: Module) -> None:
    """Raises MisconfigurationException for a module that is cut up already: its ranks may be others now."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter.data, DTensor):
            raise MisconfigurationException(
                f"DTAStrategy: parameter '{name}' was sharded before, by an earlier fit or by its own trainer; build"
                " a new module, and go on from a checkpoint (ckpt_path)"
            )


def shard_models(module: Module, group: GroupRanks) -> None:
    """Collective over the group: cuts the layers of all transformers models in `module` into shards, in place.

    Raises:
        MisconfigurationException: a model whose layers are not known.
    """
    for name, model in _models(module):
        body = model.base_model
        layers = list(_outermost(body, GradientCheckpointingLayer))
        if not layers:
            raise MisconfigurationException(
                f"DTAStrategy(shard_parameters=True): {type(model).__name__} ('{name}') has no layers that transformers"
                " marks as such (GradientCheckpointingLayer), so there is nothing to gather one at a time; set"
                " shard_parameters=False, or use another model"
            )
        whole = {
            parameter
            for part in (model.get_input_embeddings(), model.get_output_embeddings())
            for parameter in (part.parameters() if part is not None else ())
        }
        if any(hasattr(part, "base_layer") for part in model.modules()):  # as PEFT's layers have
            whole |= {parameter for parameter in model.parameters() if parameter.requires_grad}
        for unit in (*layers, body):
            _shard(unit, group, whole)
        for unit in body.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(1.0)  # sums, not means; neither setting is recursive
                unit.set_force_sum_reduction_for_comms(True)


def _shard(unit: Module, group: GroupRanks, whole: set[Parameter]) -> None:
    """Trained parameters below float32 are kept in float32, as the masters that steps add to, and gathered rounded."""
    own = {name: p for name, p in unit.named_parameters() if p not in whole and not isinstance(p.data, DTensor)}
    low = {name: p.dtype for name, p in own.items() if p.requires_grad and accumulation_dtype(p.dtype) != p.dtype}
    for name in low:
        own[name].data = own[name].data.float()
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)  # which would copy what chunks hand to layers
    if low:
        dtype = next(iter(low.values()))
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(unit, mesh=group.mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=whole)
    for name, dtype in low.items():
        setattr(unit.get_parameter(name), _COMPUTES_IN, dtype)


def computes_in(parameter: Tensor) -> torch.dtype:
    """The dtype a parameter has for layers and in checkpoints."""
    dtype: torch.dtype = getattr(parameter, _COMPUTES_IN, parameter.dtype)
    return dtype


@torch.no_grad()
def whole_copy(model: Any, keep: bool) -> Any:
    """Collective over the group of rank 0: where `keep`, a plain model in CPU memory with the parameters of all ranks
    (in PEFT's wrapper where `model` is). They are gathered one at a time, so that other ranks hold no more than the
    largest."""
    named = dict(model.named_parameters(remove_duplicate=False))
    cut = next(parameter for parameter in named.values() if isinstance(parameter.data, DTensor))
    if not (cut.data.device_mesh.mesh == 0).any():
        return None
    weights = {}
    for name, value in model.state_dict().items():
        gathered = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            dtype = computes_in(named[name]) if name in named else gathered.dtype
            weights[name] = gathered.detach().to("cpu", dtype, copy=True)
    if not keep:
        return None
    whole = _without_storage(model)
    whole.load_state_dict(weights, assign=True)
    inner = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
    inner.tie_weights()
    for name, buffer in model.named_buffers():  # those that no state_dict holds
        owner, _, own = name.rpartition(".")
        whole.get_submodule(owner)._buffers[own] = buffer.detach().to("cpu", copy=True)
    return whole


def _without_storage(model: Any) -> Any:
    """A plain model of the same configuration, and adapters of the same kind where it has some."""
    adapted = hasattr(model, "get_base_model")
    inner = model.get_base_model() if adapted else model
    with torch.device("meta"):
        plain = type(inner)(copy.deepcopy(inner.config))
        for also in ("generation_config", "_weight_conversions"):
            if hasattr(inner, also):
                setattr(plain, also, copy.deepcopy(getattr(inner, also)))
        for number, (name, adapter) in enumerate(model.peft_config.items() if adapted else ()):
            if number == 0:
                plain = type(model)(plain, copy.deepcopy(adapter), adapter_name=name)
            else:
                plain.add_adapter(name, copy.deepcopy(adapter))
    return plain


def is_sharded(model: Module) -> bool:
    """Whether any parameter is cut up."""
    return any(isinstance(parameter.data, DTensor) for parameter in model.parameters())


def _models(module: Module) -> Iterator[tuple[str, PreTrainedModel]]:
    """The outermost transformers models, by name."""
    found: list[str] = []
    for name, child in module.named_modules():
        if isinstance(child, PreTrainedModel) and not any(f".{name}".startswith(f".{outer}") for outer in found):
            found.append(f"{name}." if name else "")
            yield name, child


def _outermost(module: Module, kind: type[Module]) -> Iterator[Module]:
    for child in module.children():
        if isinstance(child, kind):
            yield child
        else:
            yield from _outermost(child, kind)


def part_of(whole: DTensor) -> tuple[Tensor, int]:
    """This rank's rows of a parameter cut by `shard_models`, and which its first is."""
    rows = -(-whole.shape[0] // whole.device_mesh.size())
    return whole.to_local(), min(rows * whole.device_mesh.get_local_rank(), whole.shape[0])


class Shard:
    """This rank's part of one parameter, as `Bucket` holds many: the same methods, one parameter each.

    Args:
        name: the parameter's. param: cut by `shard_models`.
        group: the ranks that have its other parts.

    Attributes (S = elements here, maybe none):
        master: [S], a view of the parameter's own memory, in the accumulation dtype.
        dtype: what layers compute in.
        master_is_parameter: whether these are the same.
    """

    def __init__(self, name: str, param: Parameter, group: GroupRanks) -> None:
        assert isinstance(param.data, DTensor)
        self.names, self.params, self._group = [name], [param], group
        local, first = part_of(param.data)
        self.master = local.view(-1)
        self.dtype = computes_in(param)
        self.master_is_parameter = self.dtype == self.master.dtype
        row = param.numel() // max(1, param.shape[0])
        self._start, self._whole = first * row, param.numel()
        self._address = self.master.data_ptr()

    label = property(lambda self: self.names[0])

    @property
    def counted(self) -> bool:
        """Whether a sum over all ranks is to count this part: groups have the same ones."""
        return self._group.index == 0

    def zero_gradients(self) -> None:
        self.params[0].grad = None

    def check_attached(self) -> None:
        """Raises RuntimeError if the parameter is no longer where it was."""
        data = self.params[0].data
        if not isinstance(data, DTensor) or data.to_local().data_ptr() != self._address:
            raise RuntimeError(
                f"parameter '{self.names[0]}' got other memory after set-up (module.to(...), param.data = ...), so it"
                " would not be trained; move or replace it before fit starts, or write into it in place"
            )

    def reduce_gradients(self) -> Tensor:
        """The sum over all groups, [S]; a parameter that nothing used has zeros."""
        grad: Any = self.params[0].grad
        self.params[0].grad = None
        own = torch.zeros_like(self.master) if grad is None else grad.to_local().reshape(-1)
        self._group.sum_over_groups_(own, self.names[0])
        return own

    def adopt_written(self) -> None:
        """What is written into the parameter is written into its master."""

    def gather_parameters(self) -> None:
        """Layers are gathered when they run."""

    def release_gradients(self) -> None:
        self.params[0].grad = None

    def extremes(self) -> Tensor:
        """[2]: least and largest element here."""
        return torch.stack(self.master.aminmax()) if self.master.numel() else self.master.new_zeros(2)

    def beyond(self, bound: float) -> Iterator[tuple[str, Tensor]]:
        """Name, and whether elements here are not below `bound` in size."""
        yield self.names[0], ~self.master.abs().lt(bound).all()

    def cut(self, full: Sequence[Tensor]) -> Tensor:
        """This rank's part [S] of the whole tensor `full[0]`."""
        own = full[0].reshape(-1)[self._start : self._start + self.master.numel()]
        return own.to(self.master.device, self.master.dtype, copy=True)

    def pieces(self, shard: Tensor) -> list[Piece]:
        """What `shard` [S] holds of the parameter, laid out flat."""
        return [Piece(shard, (self._start,), (self._whole,))]


def split(
    named: Iterable[tuple[str, Parameter]], group: GroupRanks | None
) -> tuple[list[Shard], list[tuple[str, Parameter]]]:
    """Parameters that are cut up, as shards, and those that every rank holds."""
    shards, whole = [], []
    for name, param in named:
        if isinstance(param.data, DTensor):
            assert group is not None, "shard_models cut it"
            shards.append(Shard(name, param, group))
        else:
            whole.append((name, param))
    return shards, whole
