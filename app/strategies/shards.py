"""Parameters that the ranks of a group share out among themselves: torch's `fully_shard` (FSDP2), and a rank's part of
one parameter as `ShardedOptimizer` wants it.

Promises: every layer of every transformers model is a unit, gathered for its forward and its backward and freed after
each; gradients are summed over the group as each backward leaves a unit, and accumulate as shards in float32 (float64
for such parameters); several groups add their shards up once a step, when all backwards are done, so that no collective
inside a pass leaves the group. A rank's part of a parameter is a run of its rows: in checkpoints a box like any other.
What an optimizer looks at whole is put together for its step, on one rank of each group.

Embeddings and output projections are cut by rows too, and never gathered: a pass needs them in every chunk, and sends
hidden states instead (`app.tree.CutVocabulary`). Adapters stay whole on every rank, and so do vocabularies they are put
on, float32 parameters in bfloat16 layers (routers), and what makes features of pictures (the ranks of a group run it on
pictures of their own); optimizer state of what stays whole is over all ranks, as ever. What is below adapters is
frozen, and only gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Rows
from torch.nn import Module, Parameter
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from app.strategies.buckets import accumulation_dtype, deal, extremes
from app.strategies.pieces import Piece
from app.strategies.ranks.groups import GroupRanks
from app.tree import CutVocabulary, language_model, own_config, vocabulary_modules

_COMPUTES_IN = "_computes_in"  # attribute of parameters that are kept in another dtype


def refuse_shards(module: Module) -> None:
    """Raises MisconfigurationException for a module that is cut up already: its ranks may be others now."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter.data, DTensor):
            raise MisconfigurationException(
                f"DTAStrategy: parameter '{name}' was sharded before, by an earlier fit or by its own trainer; build"
                " a new module, and go on from a checkpoint (ckpt_path)"
            )


def shard_models(module: Module, group: GroupRanks, receive: Callable[[Tensor, str], None]) -> None:
    """Collective: cuts the layers of all transformers models in `module` into shards, in place, on
    the group's device.

    A layer at a time, so that a rank whose models have no storage yet (meta tensors) never holds more than its shards,
    one layer and what stays whole. `receive(tensor, name)`, a collective of all ranks, puts rank 0's values into it.

    Raises:
        MisconfigurationException: a model whose layers are not known; a tensor without storage that is neither
            parameter nor buffer.
    """
    models = list(_models(module))
    for name, model in models:
        if next(_layers(model), None) is None:
            raise MisconfigurationException(
                f"DTAStrategy(shard_parameters=True): {type(model).__name__} ('{name}') has no layers that transformers"
                " marks as such (GradientCheckpointingLayer), so there is nothing to gather one at a time; set"
                " shard_parameters=False, or use another model"
            )
        text = model.config.get_text_config()
        if text is not model.config and getattr(text, "hidden_size_per_layer_input", None):
            raise MisconfigurationException(
                f"DTAStrategy(shard_parameters=True): {type(model).__name__} ('{name}') has inputs of each layer's own"
                " (hidden_size_per_layer_input), which it looks up outside of its language model, where shards are not"
                " gathered; set shard_parameters=False, or train its language model alone (a ...ForCausalLM)"
            )
    rounded: list[tuple[Module, dict[str, torch.dtype]]] = []
    filled: dict[int, tuple[Tensor, Tensor]] = {}
    apart = {layer for _, model in models for layer in _layers(model)}
    apart |= {part for _, model in models for part in _vocabulary(model)}
    _fill(module, "", apart, filled, group.device, receive)
    for name, model in models:
        body = language_model(model)
        adapted = _is_adapted(model)
        rounded += _cut_vocabulary(name, model, group, filled, receive)
        whole = {
            parameter
            for part in (model.get_input_embeddings(), model.get_output_embeddings())
            for parameter in (part.parameters() if part is not None else ())
        }
        for number, unit in enumerate(_layers(model)):
            _fill(unit, f"{name}layer {number}: ", set(), dict(filled), group.device, receive)
            rounded.append((unit, _shard(unit, group, whole, adapted)))
        rounded.append((body, _shard(body, group, whole, adapted)))
        for own, unit in body.named_modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(1.0)  # sums, not means; neither setting is recursive
                unit.set_force_sum_reduction_for_comms(True)
                where = f"{name}{own}" or type(body).__name__
                gather: Any = _Gather(group, f"the parameters of '{where}'")
                total: Any = _ReduceScatter(group, f"the gradients of '{where}'")
                unit.set_custom_all_gather(gather)
                unit.set_custom_reduce_scatter(total)
    module.to(group.device)  # what rank 0 built in CPU memory and stays whole; makes new parameters
    for unit, dtypes in rounded:
        for name, dtype in dtypes.items():
            setattr(unit.get_parameter(name), _COMPUTES_IN, dtype)


def _is_adapted(model: Module) -> bool:
    """Whether any layer has adapters, as PEFT's have."""
    return any(hasattr(part, "base_layer") for part in model.modules())


def _vocabulary(model: PreTrainedModel) -> list[Module]:
    """Embedding and output projection, those that are cut up; trained beside an adapted base they stay whole."""
    adapted = _is_adapted(model)
    found = vocabulary_modules(model)
    return [part for part in found if not (adapted and any(p.requires_grad for p in part.parameters()))]


def _cut_vocabulary(
    name: str,
    model: PreTrainedModel,
    group: GroupRanks,
    filled: dict[int, tuple[Tensor, Tensor]],
    receive: Callable[[Tensor, str], None],
) -> list[tuple[Module, dict[str, torch.dtype]]]:
    """Cuts what `_vocabulary` says, one matrix at a time; returns which parameters of which modules are kept in another
    dtype than they have for layers, and in which."""
    parts = _vocabulary(model)
    dtypes = {part: {own: p.dtype for own, p in part.named_parameters()} for part in parts}
    mesh = group.mesh

    def cut(parameter: Tensor) -> Tensor:
        dtype = accumulation_dtype(parameter.dtype) if parameter.requires_grad else parameter.dtype
        own = torch.zeros(0, *parameter.shape[1:], dtype=dtype, device=group.device)
        pieces = parameter.detach().chunk(group.size)
        if group.rank < len(pieces):
            own = pieces[group.rank].to(group.device, dtype, copy=True)
        shape, stride = parameter.shape, parameter.stride()
        whole = DTensor.from_local(own, mesh, [Rows(0)], run_check=False, shape=shape, stride=stride)
        return Parameter(whole, parameter.requires_grad)

    for part in parts:
        _fill(part, name, set(), filled, group.device, receive, cut)
    if parts:
        CutVocabulary(model, group, next(iter(dtypes[parts[0]].values())))
    kept = {part: {own: p.dtype for own, p in part.named_parameters()} for part in parts}
    return [(part, {own: was for own, was in dtypes[part].items() if kept[part][own] != was}) for part in parts]


def _fill(
    module: Module,
    path: str,
    but: set[Module],
    filled: dict[int, tuple[Tensor, Tensor]],
    device: torch.device,
    receive: Callable[[Tensor, str], None],
    cut: Callable[[Tensor], Tensor] = lambda parameter: parameter,
) -> None:
    """Parameters and buffers of `module`, those of the modules `but` excepted, get rank 0's values, and memory on
    `device` where they have none; parameters are `cut` then. What is tied stays so, by `filled`: what was filled, and
    what is in its place."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if id(tensor) not in filled:
                new: Tensor = tensor
                if tensor.is_meta:
                    new = torch.empty_like(tensor, device=device)
                    new = Parameter(new, tensor.requires_grad) if isinstance(tensor, Parameter) else new
                receive(new, f"{path}{name}")
                filled[id(tensor)] = tensor, cut(new) if isinstance(new, Parameter) else new
            tensors[name] = filled[id(tensor)][1]  # type: ignore[assignment]
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.is_meta:
            raise MisconfigurationException(
                f"DTAStrategy(shard_parameters=True): '{path}{name}' of {type(module).__name__} is a tensor that is"
                " neither parameter nor buffer, so ranks without weights cannot get it; register it as a buffer"
            )
    for name, child in module.named_children():
        if child not in but:
            _fill(child, f"{path}{name}.", but, filled, device, receive, cut)


def _shard(unit: Module, group: GroupRanks, whole: set[Parameter], adapted: bool) -> dict[str, torch.dtype]:
    """Trained parameters below float32 are kept in float32, as the masters that steps add to, and gathered rounded: to
    the dtypes returned. Those that are trained beside an `adapted` base stay whole, and so do those in float32 beside
    rounded ones: a unit is gathered in one dtype."""
    whole = whole | {parameter for parameter in unit.parameters() if adapted and parameter.requires_grad}
    own = {name: p for name, p in unit.named_parameters() if p not in whole and not isinstance(p.data, DTensor)}
    low = {name: p.dtype for name, p in own.items() if p.requires_grad and accumulation_dtype(p.dtype) != p.dtype}
    if low:
        whole |= {p for p in own.values() if p.is_floating_point() and accumulation_dtype(p.dtype) == p.dtype}
    for name in low:
        own[name].data = own[name].data.float()
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)  # which would copy what chunks hand to layers
    if low:
        dtype = next(iter(low.values()))
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(unit, mesh=group.mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=whole)
    return low


class _Named:
    """A collective of `fully_shard`'s that goes through the group, which names it where it fails."""

    def __init__(self, group: GroupRanks, what: str) -> None:
        self.group, self.what = group, what

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Named):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return self.group.gather_flat(output_tensor, input_tensor, self.what, async_op)


class _ReduceScatter(_Named):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        assert op == ReduceOp.SUM, "as shard_models set it"
        return self.group.reduce_scatter_flat(output_tensor, input_tensor, self.what, async_op)


def computes_in(parameter: Tensor) -> torch.dtype:
    """The dtype a parameter has for layers and in checkpoints."""
    own = getattr(parameter, "quant_state", parameter).dtype  # of 4 bit what they stand for
    dtype: torch.dtype = getattr(parameter, _COMPUTES_IN, own)
    return dtype


def gathers(model: Any, keep: bool) -> Callable[[Iterable[str]], dict[str, Tensor]] | None:
    """A collective over the group of rank 0, which its ranks call with the same names: what of the `state_dict` of
    `model` has these, whole, in CPU memory of its own and in the dtype of checkpoints; nothing but where `keep`. One is
    gathered at a time, so that ranks hold no more than the largest beside it. None for ranks of other groups."""
    named, state = dict(model.named_parameters(remove_duplicate=False)), model.state_dict()
    cut = next(parameter for parameter in named.values() if isinstance(parameter.data, DTensor))
    if not (cut.data.device_mesh.mesh == 0).any():
        return None

    @torch.no_grad()
    def gather(names: Iterable[str]) -> dict[str, Tensor]:
        found = {}
        for name in names:
            value = state[name]
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if keep:
                dtype = computes_in(named[name]) if name in named else whole.dtype
                found[name] = whole.detach().to("cpu", dtype, copy=True)
        return found

    return gather


def take_buffers(model: Module, like: Module) -> None:
    """Copies in CPU memory of the buffers that no state_dict of `model` holds, for a model like it."""
    held = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name not in held:
            owner, _, own = name.rpartition(".")
            like.get_submodule(owner)._buffers[own] = buffer.detach().to("cpu", copy=True)


def without_storage(model: Any) -> Any:
    """A plain model of the same configuration and dtypes on the meta device, and adapters of the same kind where it has
    some; of weights in 4 bit what these stand for."""
    adapted = hasattr(model, "get_base_model")
    inner = model.get_base_model() if adapted else model
    with torch.device("meta"):
        plain = type(inner)(own_config(inner))
        for also in ("generation_config", "_weight_conversions"):
            if hasattr(inner, also):
                setattr(plain, also, copy.deepcopy(getattr(inner, also)))
        for number, (name, adapter) in enumerate(model.peft_config.items() if adapted else ()):
            if number == 0:
                plain = type(model)(plain, copy.deepcopy(adapter), adapter_name=name)
            else:
                plain.add_adapter(name, copy.deepcopy(adapter))
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in plain.named_parameters():
        parameter.data = parameter.data.to(computes_in(named[name]))
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


def _layers(model: PreTrainedModel) -> Iterator[Module]:
    yield from _outermost(language_model(model))


def _outermost(module: Module) -> Iterator[Module]:
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _outermost(child)


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
        stepped: what the optimizer is given: the master.
        dtype: what layers compute in.
        master_is_parameter: whether these are the same.
    """

    def __init__(self, name: str, param: Parameter, group: GroupRanks) -> None:
        assert isinstance(param.data, DTensor)
        self.names, self.params, self._group = [name], [param], group
        local, first = part_of(param.data)
        self.master = local.view(-1)
        self.stepped = [self.master]
        self.dtype = computes_in(param)
        self.master_is_parameter = self.dtype == self.master.dtype
        row = param.numel() // max(1, param.shape[0])
        self._start, self._whole = first * row, param.numel()
        self._address = self.master.data_ptr()

    label = property(lambda self: self.names[0])
    owner: int | None = None  # each rank of the group steps its part

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

    def sum_gradients(self) -> Tensor:
        """Collective: the sum over all groups, [S]; a parameter that nothing used has zeros."""
        self.check_attached()
        grad: Any = self.params[0].grad
        self.params[0].grad = None
        own = torch.zeros_like(self.master) if grad is None else grad.to_local().reshape(-1)
        self._group.sum_over_groups_(own, self.names[0])
        return own

    def gather_parameters(self) -> None:
        """Layers are gathered when they run."""

    def release_gradients(self) -> None:
        self.params[0].grad = None

    def extremes(self) -> Tensor:
        """[2]: least and largest element here."""
        return extremes(self.master)

    def beyond(self, bound: float) -> Iterator[tuple[str, Tensor]]:
        """Name, and whether elements here are not below `bound` in size."""
        yield self.names[0], ~self.master.abs().lt(bound).all()

    def views(self, shard: Tensor) -> list[Tensor]:
        """`shard` [S] as the optimizer steps it."""
        return [shard]

    def cut(self, full: Sequence[Tensor]) -> Tensor:
        """This rank's part [S] of the whole tensor `full[0]`."""
        own = full[0].reshape(-1)[self._start : self._start + self.master.numel()]
        return own.to(self.master.device, self.master.dtype, copy=True)

    def pieces(self, shard: Tensor) -> list[Piece]:
        """What `shard` [S] holds of the parameter, laid out flat."""
        return [Piece(shard, (self._start,), (self._whole,))]


class WholeShard(Shard):
    """This rank's part of a parameter that the optimizer steps whole, on one rank of each group.

    Args:
        owner: that rank's place in the group; the others' parts and gradients go there before a step, and come back.
        name, param, group: as of `Shard`.

    Attributes:
        stepped: the whole parameter, in its shape, from `sum_gradients` to `gather_parameters`; nothing on the others.
    """

    _together = False  # whether `stepped` has the parameter now

    def __init__(self, name: str, param: Parameter, group: GroupRanks, owner: int) -> None:
        super().__init__(name, param, group)
        self.owner, self._place, self._shape = owner, owner, param.shape
        self._most = -(-param.shape[0] // group.size) * (param.numel() // max(1, param.shape[0]))  # of a rank
        self.stepped = [self.master.new_zeros(param.shape)] if owner == group.rank else []

    def sum_gradients(self) -> Tensor:
        """Collective: the sum over all groups, of the whole parameter and flat; nothing on ranks that do not own it."""
        own = super().sum_gradients()
        together = self._gather(self.master)
        for whole in self.stepped:
            whole.view(-1).copy_(together)
        self._together = True
        return self._gather(own)

    def gather_parameters(self) -> None:
        """Collective: every rank's part becomes what was stepped; nothing where no gradients were summed before."""
        if not self._together:
            return
        self._together = False
        part = self.master.new_empty(self._most)
        every = None
        for whole in self.stepped:
            every = self.master.new_zeros(self._group.size, self._most)
            every.view(-1)[: whole.numel()].copy_(whole.view(-1))
        self._group.scatter_from(self._place, part, every, self.names[0])
        self.master.copy_(part[: self.master.numel()])

    def views(self, shard: Tensor) -> list[Tensor]:
        return [shard.view(self._shape) for _ in self.stepped]

    def _gather(self, own: Tensor) -> Tensor:
        """Collective: all parts of what each rank has for its rows, flat; nothing on ranks that do not own it."""
        part = own.new_zeros(self._most)
        part[: own.numel()].copy_(own)
        every = self._group.gather_to(self._place, part, self.names[0])
        return own.new_empty(0) if every is None else every.view(-1)[: self._whole]


def split(
    named: Iterable[tuple[str, Parameter]],
    group: GroupRanks | None,
    looks_at_whole: Callable[[Parameter], bool],
    loads: list[int],
) -> tuple[list[Shard], list[tuple[str, Parameter]]]:
    """Parameters that are cut up, as shards, and those that every rank holds. `looks_at_whole`: of which the optimizer
    does; these are dealt to the ranks of a group. `loads`: elements of each, added to."""
    named = list(named)
    cut = [pair for pair in named if isinstance(pair[1].data, DTensor)]
    held = [pair for pair in named if not isinstance(pair[1].data, DTensor)]
    whole = [param for _, param in cut if looks_at_whole(param)]
    owners = iter(deal([param.numel() for param in whole], loads))
    shards: list[Shard] = []
    for name, param in cut:
        assert group is not None, "shard_models cut it"
        own = WholeShard(name, param, group, next(owners)) if looks_at_whole(param) else Shard(name, param, group)
        shards.append(own)
    return shards, held
