"""Optimizer state to and from checkpoints: what a `ShardedOptimizer` saves, and how it takes it back on any number of
ranks.

Two forms are read. *Sharded*: a description of primitives (the optimizer's class, parameter groups, scalars such as
`step`, which state each parameter has), by parameter names, and beside it one tensor `optimizer/<key>/<parameter>` a
parameter and key: flat where it has a value for each element, of which each rank writes and reads its own part; of
state of other shapes, which only parameters that are stepped whole have, all by their owner. *Whole*: what a
plain torch optimizer saves, for runs that began under another strategy. Masters are the key `master`, where parameters
are bfloat16.

Promises: on restore masters come from the checkpoint, not from rounded weights; an option that was configured
otherwise than for the checkpoint keeps its new value, one that only the checkpoint's schedule set has the configured
one, and one that only this run's schedule sets begins there; a checkpoint that does not fit is refused before anything
is changed, naming the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from app.strategies.buckets import Bucket
from app.strategies.pieces import Piece
from app.strategies.shards import Shard
from app.strategies.zero1 import ShardedOptimizer, is_elementwise

_MASTER = "master"
_WEIGHTS_ALONE = "start from the checkpoint's weights alone (arborist export, then model.model.path)"
# State that torch.optim keeps once a parameter; its shape does not tell where parameters are scalars themselves.
_SCALARS = ("step", "eta", "mu", "mu_product")
Read = Callable[[dict[str, Piece]], None]


@torch.no_grad()
def save_sharded(sharded: ShardedOptimizer) -> tuple[dict[str, Any], dict[str, Piece]]:
    """Collective: the description (equal on all ranks, primitives and scalar tensors) and this rank's pieces by name
    (views)."""
    scalars: dict[str, dict[str, Any]] = {}
    tensors: dict[str, list[str]] = {}
    shapes: dict[str, dict[str, list[int]]] = {}
    dtypes: dict[str, dict[str, str]] = {}
    pieces: dict[str, Piece] = {}
    sharded.adopt_written()
    for bucket in sharded.buckets:
        if not bucket.master_is_parameter:
            for name, piece in zip(bucket.names, bucket.pieces(bucket.master)):
                pieces[_file_name(_MASTER, name)] = piece
                tensors.setdefault(name, []).append(_MASTER)
        keyed = sharded.optimizer.state.get(bucket.master, {}) if bucket.owner is None else {}
        for key, value in keyed.items():
            if is_elementwise(key, value, bucket):
                for name, piece in zip(bucket.names, bucket.pieces(value)):
                    pieces[_file_name(key, name)] = piece
                    tensors.setdefault(name, []).append(key)
            else:
                for name in bucket.names:  # clones: optimizers count steps in place
                    scalars.setdefault(name, {})[key] = _scalar(value)
    for name, shape, keyed in _owned(sharded):
        for key, value in keyed.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                scalars.setdefault(name, {})[key] = _scalar(value)
                continue
            tensors.setdefault(name, []).append(key)
            if value.shape != shape:
                shapes.setdefault(name, {})[key] = list(value.shape)
            dtypes.setdefault(name, {})[key] = str(value.dtype).removeprefix("torch.")
            pieces[_file_name(key, name)] = _whole_piece(value, shape)
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": sharded.names_of(params)}
        for group, params in zip(sharded.optimizer.param_groups, sharded.groups)
    ]
    kind = _kind(sharded.optimizer)
    description = {"optimizer": kind, "configured": sharded.configured, "param_groups": groups}
    return {**description, "scalars": scalars, "tensors": tensors, "shapes": shapes, "dtypes": dtypes}, pieces


@torch.no_grad()
def load_sharded(sharded: ShardedOptimizer, description: Mapping[str, Any], read: Read) -> None:
    """Collective: the inverse of `save_sharded`; `read` fills pieces in place (see `load_pieces`).

    Raises:
        ValueError: class, groups, parameters or state do not match this optimizer; the message names the parameter.
    """
    saved = description["param_groups"]
    _check_kind(sharded, description.get("optimizer"), saved)
    _check_groups(sharded, [group["params"] for group in saved])
    shapes = description.get("shapes", {})  # of older versions: no parameter was stepped whole
    dtypes = description.get("dtypes", {})  # of older versions: the parameter's
    states: list[list[dict[str, Any]]] = []
    masters: list[Tensor | None] = []
    wanted: dict[str, Piece] = {}
    for bucket in sharded.buckets:
        per_param = [description["tensors"].get(name, ()) for name in bucket.names]
        scalars = [description["scalars"].get(name, {}) for name in bucket.names]
        flat: dict[str, Tensor] = {}
        for key in _common_keys(bucket, per_param) if bucket.owner is None else {_MASTER}.intersection(*per_param):
            flat[key] = torch.zeros_like(bucket.master, device="cpu")
            named = zip(bucket.names, bucket.pieces(flat[key]))
            wanted.update({_file_name(key, name): piece for name, piece in named})
        masters.append(flat.pop(_MASTER, None))
        if bucket.owner is None:
            same = {key: [entry[key] for entry in scalars] for key in _common_keys(bucket, scalars)}
            states.append([{**flat, **{key: _common_scalar(bucket, key, values) for key, values in same.items()}}])
            continue
        states.append([])
        for name, tensor, saved_keys, own in zip(bucket.names, bucket.stepped, per_param, scalars):
            state = dict(own)
            for key in (key for key in saved_keys if key != _MASTER):
                shape, dtype = (found.get(name, {}).get(key) for found in (shapes, dtypes))
                state[key] = torch.zeros(shape or tensor.shape, dtype=getattr(torch, dtype) if dtype else tensor.dtype)
                wanted[_file_name(key, name)] = _whole_piece(state[key], tensor.shape)
            states[-1].append(state)
    read(wanted)
    first = _first_values(sharded)
    _adopt(sharded, saved, states, masters)
    said = [ended | begun for ended, begun in zip(_end_schedules(sharded), _begin_schedules(sharded, first))]
    if "configured" in description:
        _keep_changes(sharded, description["configured"], said)


@torch.no_grad()
def load_whole(sharded: ShardedOptimizer, full: Mapping[str, Any]) -> None:
    """Collective: takes a plain torch optimizer's `state_dict`; every rank passes the whole and keeps its shard.

    Raises:
        ValueError: as `load_sharded`.
    """
    saved = full["param_groups"]
    _check_kind(sharded, None, saved)
    mine = [sharded.names_of(params) for params in sharded.groups]
    names = [group.get("param_names", own) for group, own in zip(saved, mine)]
    _check_groups(sharded, [n if len(n) == len(g["params"]) else g["params"] for n, g in zip(names, saved)])
    entries = {
        name: full["state"].get(index, {})
        for own, group in zip(mine, saved)
        for name, index in zip(own, group["params"])
    }
    states: list[list[dict[str, Any]]] = []
    masters: list[Tensor | None] = []
    for bucket in sharded.buckets:
        per_param = [entries[name] for name in bucket.names]
        found = [entry[_MASTER] for entry in per_param if _MASTER in entry]
        masters.append(bucket.cut(found) if len(found) == len(per_param) else None)
        if bucket.owner is not None:
            own = [{key: value for key, value in entry.items() if key != _MASTER} for entry in per_param]
            states.append(own[: len(bucket.stepped)])  # all or none
            continue
        state: dict[str, Any] = {}
        for key in _common_keys(bucket, per_param):
            values = [entry[key] for entry in per_param]
            for name, param, value in zip(bucket.names, bucket.params, values):
                if isinstance(value, Tensor) and value.dim() > 0 and value.shape != param.shape:
                    raise ValueError(
                        f"optimizer state '{key}' of '{name}' has shape {tuple(value.shape)}, the parameter"
                        f" {tuple(param.shape)}: the checkpoint belongs to another model"
                    )
            like_params = (isinstance(v, Tensor) and v.shape == p.shape for v, p in zip(values, bucket.params))
            whole = key not in _SCALARS and all(like_params)
            state[key] = bucket.cut(values) if whole else _common_scalar(bucket, key, values)
        state.pop(_MASTER, None)
        states.append([state])
    first = _first_values(sharded)
    _adopt(sharded, saved, states, masters)
    _end_schedules(sharded)
    _begin_schedules(sharded, first)


def _adopt(
    sharded: ShardedOptimizer,
    saved: list[dict[str, Any]],
    states: list[list[dict[str, Any]]],
    masters: list[Tensor | None],
) -> None:
    """Hands the states, of each bucket one for each tensor that is stepped, to the optimizer; parameters are set from
    the masters, one a bucket where the checkpoint has it."""
    everything = [state for of_bucket in states for state in of_bucket]
    counter = iter(range(len(everything)))
    groups = [
        {
            **{key: value for key, value in group.items() if key not in ("params", "param_names")},
            "params": [next(counter) for bucket in buckets for _ in bucket.stepped],
        }
        for group, buckets in zip(saved, sharded.buckets_by_group)
    ]
    filled = {i: state for i, state in enumerate(everything) if state}
    sharded.optimizer.load_state_dict({"state": filled, "param_groups": groups})
    for bucket, master in zip(sharded.buckets, masters):
        if master is not None:
            bucket.master.copy_(master)
        elif not bucket.master_is_parameter and filled and bucket.master.dtype != bucket.dtype:
            rank_zero_warn(
                f"the checkpoint has no float32 masters for {bucket.label} (it was trained in another precision):"
                f" masters start from the {bucket.dtype} weights"
            )
    sharded.gather_parameters()


def _end_schedules(sharded: ShardedOptimizer) -> list[set[str]]:
    """Options that a schedule set which this run does without are as configured, not as it left them; this is said.
    Returns which, of each parameter group."""
    found = []
    for number, (group, now) in enumerate(zip(sharded.optimizer.param_groups, sharded.configured)):
        ended = {key for key in now.keys() - sharded.scheduled[number] if f"initial_{key}" in group}
        for key in sorted(ended):
            del group[f"initial_{key}"]
            last, group[key] = group[key], now[key]
            rank_zero_warn(
                f"optimizer, parameter group {number}: {key} followed a schedule to {last}; this run has none, and it"
                f" is {now[key]} from here on"
            )
        found.append(ended)
    return found


def _first_values(sharded: ShardedOptimizer) -> list[dict[str, Any]]:
    """Of each parameter group what schedules of this run have set before their first step, and what they keep there."""
    return [{key: value for key, value in group.items() if key != "params"} for group in sharded.optimizer.param_groups]


def _begin_schedules(sharded: ShardedOptimizer, first: list[dict[str, Any]]) -> list[set[str]]:
    """Options that a schedule of this run sets and none of the checkpoint's did begin it, at their `first` values; this
    is said. Returns which, of each parameter group."""
    found = []
    for number, (group, start) in enumerate(zip(sharded.optimizer.param_groups, first)):
        begun = {key for key in sharded.scheduled[number] if f"initial_{key}" not in group}
        for key in sorted(begun):
            last, group[key] = group[key], start[key]
            rank_zero_warn(
                f"optimizer, parameter group {number}: {key} was {last} in the checkpoint, which has no schedule of it;"
                f" this run's begins here, at {group[key]}"
            )
        if begun:
            group.update({key: value for key, value in start.items() if key not in group})
        found.append(begun)
    return found


def _keep_changes(sharded: ShardedOptimizer, before: list[dict[str, Any]], said: list[set[str]]) -> None:
    """Options that the user has changed since the checkpoint, which `_adopt` has set back, apply; this is said, but for
    those of which it was `said`."""
    groups = zip(sharded.optimizer.param_groups, before, sharded.configured, said)
    for number, (group, then, now, done) in enumerate(groups):
        changed = [key for key in now if key in then and key not in done and not _same(then[key], now[key])]
        for key in changed:
            told = f"optimizer, parameter group {number}: {key} was {then[key]} and is {now[key]}"
            if f"initial_{key}" in group:  # the scheduler computes it, from its own state
                rank_zero_warn(
                    f"{told}, which has no effect: the learning rate's schedule goes on as in the checkpoint"
                )
            else:
                group[key] = now[key]
                rank_zero_warn(f"{told} from here on")


def _same(one: Any, other: Any) -> bool:
    return (list(one) if isinstance(one, tuple) else one) == (list(other) if isinstance(other, tuple) else other)


def _kind(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _check_kind(sharded: ShardedOptimizer, saved: str | None, groups: list[dict[str, Any]]) -> None:
    """`saved`: the class that the checkpoint names, where it does. Groups of another one lack what this one reads in
    its first step."""
    mine = _kind(sharded.optimizer)
    lacking = [key for key in sharded.optimizer.defaults if any(key not in group for group in groups)]
    if saved not in (None, mine) or (saved is None and lacking):
        theirs = saved or f"an optimizer without {', '.join(lacking)}"
        raise ValueError(
            f"ckpt_path: the checkpoint holds the state of {theirs}, this run's optimizer is {mine}: resume with the"
            " optimizer that wrote it (model.optimizer), or start from the checkpoint's weights alone (arborist export,"
            " then model.model.path)"
        )


def _check_groups(sharded: ShardedOptimizer, saved: list[list[Any]]) -> None:
    if len(saved) != len(sharded.groups):
        raise ValueError(
            f"ckpt_path: the checkpoint's optimizer has {len(saved)} parameter groups, this one {len(sharded.groups)}:"
            f" resume with the configure_optimizers that wrote it, or {_WEIGHTS_ALONE}"
        )
    for number, (names, params) in enumerate(zip(saved, sharded.groups)):
        mine = sharded.names_of(params)
        if names != mine:
            odd = sorted(map(str, set(names) ^ set(mine)))
            differ = ", ".join(odd[:3]) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
            raise ValueError(
                f"ckpt_path: parameter group {number} of the checkpoint's optimizer has {len(names)} parameters, this"
                f" one {len(mine)}; they differ in {differ or 'their order or number'}. What is trained was changed:"
                " set model.model.freeze, model.model.adapter and model.model.train_tower (or your own"
                f" configure_optimizers) back to what they were, or {_WEIGHTS_ALONE}"
            )


def _owned(sharded: ShardedOptimizer) -> list[tuple[str, torch.Size, dict[str, Any]]]:
    """Collective: name, shape and state of every parameter that some rank owns; tensors of others' without storage."""
    buckets = [bucket for bucket in sharded.buckets if bucket.owner is not None]
    if not buckets:
        return []
    pairs = [pair for bucket in buckets for pair in zip(bucket.names, bucket.stepped)]
    mine = {name: sharded.optimizer.state.get(tensor, {}) for name, tensor in pairs}
    told = {
        name: {k: v.to("meta") if isinstance(v, Tensor) and v.dim() else _scalar(v) for k, v in keyed.items()}
        for name, keyed in mine.items()
    }
    everyone = sharded.ranks.gather_objects(told, "state of whole parameters")
    every = {name: keyed for one in everyone for name, keyed in one.items()}
    named = [pair for bucket in buckets for pair in zip(bucket.names, bucket.params)]
    return [(name, param.shape, mine.get(name, every[name])) for name, param in named]


def _whole_piece(value: Tensor, shape: torch.Size) -> Piece:
    """All of a piece of state, flat where it is of the parameter's `shape`; nothing of one on the meta device."""
    whole = value.reshape(-1) if value.shape == shape else value
    size = tuple(whole.shape)
    if whole.is_meta:
        whole = torch.empty((0,) * whole.dim(), dtype=whole.dtype)
    return Piece(whole, (0,) * len(size), size)


def _scalar(value: Any) -> Any:
    return value.cpu().clone() if isinstance(value, Tensor) else value


def _common_keys(bucket: Bucket | Shard, per_param: list[Any]) -> list[str]:
    """State keys of a bucket's parameters, which share one flat shard and so must all have them."""
    keys = list(dict.fromkeys(key for entry in per_param for key in entry))
    for key in keys:
        for name, entry in zip(bucket.names, per_param):
            if key not in entry:
                raise ValueError(
                    f"optimizer state '{key}' of '{name}' is missing although {bucket.label} share one flat shard: was"
                    " the parameter frozen when the checkpoint was written? Start from its weights alone instead"
                )
    return keys


def _common_scalar(bucket: Bucket | Shard, key: str, values: list[Any]) -> Any:
    for name, value in zip(bucket.names, values):
        if value != values[0]:
            raise ValueError(
                f"optimizer state '{key}' is {value} for '{name}' but {values[0]} for '{bucket.names[0]}', which share"
                " one flat shard: the checkpoint trained them for different numbers of steps; start from its"
                " weights alone instead"
            )
    return values[0].clone() if isinstance(values[0], Tensor) else values[0]


def _file_name(key: str, parameter: str) -> str:
    return f"optimizer/{key}/{parameter}"
