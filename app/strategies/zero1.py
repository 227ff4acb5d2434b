"""ZeRO-1: an ordinary torch optimizer whose state and float32 masters are sharded over ranks.

`ShardedOptimizer` takes over the optimizer a module's `configure_optimizers` returned, in place: each parameter
group keeps its dictionary (learning rate, betas, ...) and only its parameters are exchanged for the rank's flat master
shards. LR schedulers, `LearningRateMonitor` and whatever else holds the optimizer therefore keep working. One step:

    zero_grad()            gradient buffer zeroed, views attached as param.grad
    (tree pass)            gradients accumulate into the buffer; `completing`: the last backward comes, and sums begin
    reduce()               one reduce-scatter (SUM) a bucket; global norm; not finite -> nothing to step on any rank
    optimizer.step()       the stock optimizer, on this rank's shards
    gather_parameters()    one all-gather a bucket, in the parameters' dtype

An optimizer that looks at whole parameters (torch's Muon and Adafactor; those of bitsandbytes, whose state is quantised
in blocks of a parameter; one that says of which it does, `looks_at_whole(param)`, as `muon.py` does) steps whole ones,
which are dealt to ranks: their buckets are reduced to one rank each, and broadcast from there. Those that groups of
ranks have cut up are put together in each.

Weights written in place from outside (a hook that loads a state dict, weight averaging) are taken over into the
masters, before each step and into each checkpoint. Every rank has to write them alike, for each takes over its part.

Bytes per rank for a bfloat16 parameter under Adam on N ranks: 2 + 4 (gradient) + 12 / N; the last in CPU memory with
`offload`.

Checkpoints: see `checkpoint/optimizer_state.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Adagrad, Optimizer

from app.strategies.buckets import Bucket, build_buckets, build_owned
from app.strategies.ranks.collectives import Communicator
from app.strategies.ranks.groups import GroupRanks
from app.strategies.shards import Shard, split
from app.strategies.sums import GradientSums, in_turns

_ABSURD = 1e12  # parameters beyond it have diverged, although they are numbers: no gradient of theirs will be one
_WHOLE = ("Muon", "Adafactor")  # of torch.optim: they look at whole parameters
_REFUSED = ("LBFGS", "SparseAdam")


class ShardedOptimizer:
    """Shards `optimizer` over `ranks`, in place.

    Args:
        optimizer: a fresh (never stepped) torch optimizer over parameters of `module`, element-wise or one that looks
            at whole parameters (above); of those that make state before their first step, Adagrad alone.
        module: gives parameters their names.
        ranks: who shares the work.
        bucket_elements: most elements of a bucket (a larger parameter has one of its own).
        offload: masters and optimizer state live in CPU memory, and the optimizer steps there.
        group: the ranks among which parameters are cut up (`shards.py`), where any are: each steps its part of these.

    Attributes:
        grad_norm: global 2-norm of the last reduced gradient, before clipping; nan before the first.
        finite: whether the last reduced gradient was; False means that the step was (or will be) skipped.
        groups: the parameters of each parameter group, as the module's optimizer had them (frozen ones included).
        configured: the options of each parameter group as configured, before schedulers and checkpoints change them.
        scheduled: which of these options schedules of this run set, in each parameter group.
        buckets_by_group: the buckets of each.
        sums: the sums of gradients over ranks, but for those of parameters that are cut up.

    Raises:
        ValueError: an optimizer that looks at more than a parameter, has other weights to evaluate, or already has
            state; no trainable parameter, parameters that overlap in memory without being the same object.
        RuntimeError: ranks disagree about names, shapes or dtypes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: Module,
        ranks: Communicator,
        bucket_elements: int = 1 << 26,
        offload: bool = False,
        group: GroupRanks | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.ranks = ranks
        self.grad_norm = math.nan
        self.finite = True
        self.configured = [
            {key: group.get(f"initial_{key}", group[key]) for key in optimizer.defaults if _is_plain(group[key])}
            for group in optimizer.param_groups
        ]
        self.scheduled = [
            {key for key in optimizer.defaults if f"initial_{key}" in group} for group in optimizer.param_groups
        ]
        self._reduced = False
        # remove_duplicate keeps a tied parameter's first name.
        self._names = {id(param): name for name, param in module.named_parameters()}
        self.groups: list[list[Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        self._trainable = {id(p) for params in self.groups for p in params if p.requires_grad}
        self._check_optimizer()
        ranks.require_equal(
            "\n".join(
                f"{self._name(p)} {tuple(p.shape)} {p.dtype} {'trained' if p.requires_grad else 'frozen'}, group {i}"
                for i, params in enumerate(self.groups)
                for p in params
            ),
            "the optimizer's parameters",
            "build the same model and optimizer on every rank",
        )
        self.buckets_by_group: list[list[Bucket | Shard]] = []
        loads, of_group = [0] * ranks.size, [0] * (group.size if group is not None else 1)
        for options, params in zip(optimizer.param_groups, self.groups):
            named = [(self._name(p), p) for p in params if p.requires_grad]
            shards, held = split(named, group, self._looks_at_whole, of_group)
            whole = [pair for pair in held if self._looks_at_whole(pair[1])]
            flat = [pair for pair in held if not self._looks_at_whole(pair[1])]
            owned = build_owned(whole, loads, ranks, bucket_elements, offload)
            self.buckets_by_group.append([*build_buckets(flat, ranks, bucket_elements, offload), *owned, *shards])
            options["params"] = [tensor for bucket in self.buckets_by_group[-1] for tensor in bucket.stepped]
            options.pop("param_names", None)
        if type(optimizer) is Adagrad:  # which has made its state already, of whole parameters
            again = Adagrad([{**group} for group in optimizer.param_groups], **optimizer.defaults)
            optimizer.state = again.state
        self._hand_on_overrides()
        positions = {name: number for number, name in enumerate(self._names.values())}
        self.sums = GradientSums(in_turns((b for b in self.buckets if isinstance(b, Bucket)), positions), ranks)
        # Lightning and users call these on the optimizer itself; LR schedulers wrap `step` in the same way.
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        optimizer.add_param_group = self._refuse_param_group  # type: ignore[method-assign]
        self.zero_grad()

    @property
    def buckets(self) -> list[Bucket | Shard]:
        """All buckets, group by group."""
        return [bucket for buckets in self.buckets_by_group for bucket in buckets]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradient buffers and attaches their views. `set_to_none` is accepted for the callers of torch's
        signature; there is one behaviour."""
        self._check_trainable()
        self.sums.reset()
        for bucket in self.buckets:
            bucket.zero_gradients()
        self._forget_gradients()
        self._reduced = False

    @torch.no_grad()
    def reduce(self) -> bool:
        """Collective, once per step after the backward pass: sums gradients over ranks and gives each shard its part.

        Returns:
            Whether the global gradient is finite. If not, the shards get no gradient, and the optimizer's step leaves
            parameters and state alone, on all ranks.
        """
        if self._reduced:
            raise RuntimeError(
                "gradients were already summed over ranks in this step: one backward pass per optimizer step, with"
                " optimizer.zero_grad() before it"
            )
        self.sums.finish()
        self.adopt_written()
        shards = [bucket.summed if isinstance(bucket, Bucket) else bucket.sum_gradients() for bucket in self.buckets]
        # On the gradients' device, squared in float64: only the squares of norms are added over buckets and ranks.
        own = [shard for bucket, shard in zip(self.buckets, shards) if bucket.counted]
        squares = sum(
            (torch.linalg.vector_norm(shard).double().square() for shard in own), shards[0].new_zeros(()).double()
        )
        self.grad_norm = math.sqrt(self.ranks.sum_float(squares, "gradient norm"))
        self.finite = math.isfinite(self.grad_norm)
        if self.finite:
            for bucket, shard in zip(self.buckets, shards):
                for tensor, grad in zip(bucket.stepped, bucket.views(shard.to(bucket.master.device))):
                    tensor.grad = grad
        self._reduced = True
        return self.finite

    @torch.no_grad()
    def adopt_written(self) -> None:
        """Takes into the masters what was written into parameters since the last step; waits for the device once."""
        apart = [one for one in self.buckets if isinstance(one, Bucket) and not one.master_is_parameter]
        answers = torch.stack([bucket.was_written() for bucket in apart]).tolist() if apart else []
        for bucket, was_written in zip(apart, answers):
            if was_written:
                bucket.adopt_written()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> None:
        """Scales the reduced gradient as `torch.nn.utils.clip_grad_norm_` would (2-norm over all parameters of
        all ranks)."""
        scale = max_norm / (self.grad_norm + 1e-6)
        if self.finite and scale < 1.0:
            for tensor in (tensor for bucket in self.buckets for tensor in bucket.stepped):
                if tensor.grad is not None:  # a module may leave a group out of a step
                    tensor.grad.mul_(scale)

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Collective, after the optimizer's step: parameters of all ranks become the new masters in the
        parameters' dtype. Raises as `is_elementwise`."""
        for bucket in self.buckets:
            for key, value in self.optimizer.state.get(bucket.master, {}).items() if bucket.owner is None else ():
                is_elementwise(key, value, bucket)  # told in the first step, not when it is to be saved
            bucket.gather_parameters()

    @torch.no_grad()
    def bad_parameter(self) -> str | None:
        """Collective: what is wrong with the first trained parameter that holds nan, inf or absurd numbers, or None.
        Reads every element once, in shards, without memory of its own; the name is looked for only when needed."""
        ends = [bucket.extremes().double() for bucket in self.buckets]
        sound = torch.stack(ends).abs().lt(_ABSURD).all()  # nan is not
        if not self.ranks.sum_float((~sound).double(), "parameters that are not finite"):
            return None
        named = (pair for bucket in self.buckets for pair in bucket.beyond(_ABSURD))
        name = next(name for name, odd in named if self.ranks.sum_float(odd, "parameters that are not finite"))
        return f"parameter '{name}' is not finite or beyond {_ABSURD:g}"

    def release_gradients(self) -> None:
        """Frees gradient memory after the last step; the state can still be saved."""
        self._forget_gradients()
        for bucket in self.buckets:
            bucket.release_gradients()

    def _forget_gradients(self) -> None:
        for tensor in (tensor for bucket in self.buckets for tensor in bucket.stepped):
            tensor.grad = None

    def _looks_at_whole(self, param: Parameter) -> bool:
        asked = getattr(self.optimizer, "looks_at_whole", None)
        return asked(param) if asked is not None else self._is_known_whole()

    def _is_known_whole(self) -> bool:
        kind = type(self.optimizer)
        quantises = any(base.__module__.startswith("bitsandbytes.") for base in kind.__mro__)
        return kind.__name__ in _WHOLE or quantises

    def _hand_on_overrides(self) -> None:
        """bitsandbytes keeps options of single parameters (its GlobalOptimManager) by the objects, and by their places
        in groups, at which others are now."""
        manager = getattr(self.optimizer, "mng", None)
        options = getattr(manager, "pid2config", None)
        if manager is None or options is None:
            return
        options |= {id(getattr(module, name)): own for module, name, own in manager.module_weight_config_triple}
        for param, tensor in (pair for bucket in self.buckets for pair in zip(bucket.params, bucket.stepped)):
            if id(param) in options:
                options[id(tensor)] = options[id(param)]
        manager.index2config.clear()

    def _check_optimizer(self) -> None:
        kind = type(self.optimizer)
        if kind.__name__ in _REFUSED:
            raise ValueError(
                f"optimizer {kind.__name__} looks at more than a parameter at a time, or at gradients that are not"
                " dense, so its state cannot be shared out; use another with DTAStrategy (AdamW, Muon, ...), or"
                " trainer.strategy=auto on one device"
            )
        if all(callable(getattr(self.optimizer, switch, None)) for switch in ("train", "eval")):  # schedule-free
            raise ValueError(
                f"optimizer {kind.__name__} trains other weights than those to evaluate (it has train() and eval()),"
                " and the engine samples, validates and saves what is trained; use another (AdamW, Muon, ...), with"
                " model.lr_scheduler"
            )
        asks = hasattr(self.optimizer, "looks_at_whole")
        if not asks and not kind.__module__.startswith("torch.optim") and not self._is_known_whole():
            rank_zero_warn(
                f"optimizer {kind.__module__}.{kind.__name__} is sharded as if it updated element by element; if it"
                " looks at whole parameters (matrix norms, per-parameter trust ratios), results are wrong, unless a"
                " subclass of it says so: `def looks_at_whole(self, param): return True`"
            )
        began = [key for state in self.optimizer.state.values() for key in state]
        if kind is Adagrad:
            began = [key for state in self.optimizer.state.values() for key in state if state["step"]]
        if began:
            raise ValueError(
                f"configure_optimizers returned an optimizer ({kind.__name__}) that already has state"
                f" ({', '.join(dict.fromkeys(began))}), which cannot be cut into shards: return a fresh one, of a class"
                " that makes its state in its first step"
            )
        if not self._trainable:
            raise ValueError(
                "the optimizer has no parameter that requires gradients; check configure_optimizers and frozen modules"
            )
        owners: dict[tuple[torch.device, int], Parameter] = {}
        whole = (p for params in self.groups for p in params if not isinstance(p.data, DTensor))
        for param in (p for p in whole if p.requires_grad and p.numel()):
            other = owners.setdefault((param.device, param.data_ptr()), param)
            if other is not param:
                names = self.names_of([other, param])
                remedy = "tie them by assigning the same torch.nn.Parameter to both modules"
                if any(".lora_" in name for name in names):
                    remedy = "leave ensure_weight_tying out of model.adapter"
                raise ValueError(f"parameters '{names[0]}' and '{names[1]}' share memory but are two objects; {remedy}")
            if not param.is_floating_point():
                raise ValueError(
                    f"parameter '{self._name(param)}' is {param.dtype}: only floating-point parameters are trained"
                )

    def _check_trainable(self) -> None:
        for param in (p for params in self.groups for p in params):
            if param.requires_grad != (id(param) in self._trainable):
                state = "frozen" if id(param) in self._trainable else "unfrozen"
                raise RuntimeError(
                    f"parameter '{self._name(param)}' was {state} after the optimizer was set up: flat buckets are"
                    " built once; set requires_grad before fit starts (in configure_model) and begin a new fit to"
                    " change it"
                )

    def _refuse_param_group(self, param_group: dict[str, Any]) -> None:
        raise RuntimeError(
            "add_param_group after set-up: DTAStrategy builds its flat buckets once; give the optimizer all its"
            " parameters in configure_optimizers"
        )

    def names_of(self, params: Sequence[Parameter]) -> list[str]:
        """The module's names of parameters."""
        return [self._name(param) for param in params]

    def _name(self, param: Parameter) -> str:
        return self._names.get(id(param), "(a parameter that is not the module's)")


def is_elementwise(key: str, value: Any, bucket: Bucket | Shard) -> bool:
    """Whether a piece of a flat bucket's optimizer state has a value for each element, rather than being a scalar that
    all ranks share. Raises ValueError where it is neither."""
    if isinstance(value, Tensor) and value.shape == bucket.master.shape:
        return True
    if isinstance(value, Tensor) and value.dim() > 0:
        raise ValueError(
            f"optimizer state '{key}' of {bucket.label} has shape {tuple(value.shape)}, neither a scalar nor one value"
            " per element: this optimizer looks at whole parameters and cannot be cut into shards; name a subclass of"
            " it as model.optimizer that says so: `def looks_at_whole(self, param): return True`"
        )
    return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
