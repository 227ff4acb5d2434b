"""What ranks run in the tests of the sharded optimizer (importable, hence not in a test file)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from app.strategies.checkpoint.optimizer_state import load_whole, save_sharded
from app.strategies.ranks.balance import Calibration
from app.strategies.ranks.collectives import Communicator
from app.strategies.zero1 import ShardedOptimizer
from tests.app.strategies.toy_model import SAMPLES, Toy, sgd, values


def communicator() -> Communicator:
    return Communicator(dist.group.WORLD if dist.is_initialized() else None, torch.device("cpu"))


def train(
    make_optimizer: Callable[[nn.Module], Optimizer] = sgd,
    steps: int = 3,
    make_scheduler: Callable[[Optimizer], Any] | None = None,
    clip: float | None = None,
    bucket_elements: int = 1 << 20,
    idle_rank: int | None = None,
    poison: tuple[int, int] | None = None,
    first_step: int = 0,
    state: dict[str, Any] | None = None,
    weights: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    only: str | None = None,
    offload: bool = False,
) -> dict[str, Any]:
    """Trains `Toy` with a sharded optimizer, the samples dealt over the ranks.

    Args:
        idle_rank: a rank without samples. poison: (rank, step) whose gradient becomes nan.
        first_step, state, weights: where to continue.
        only: the one parameter that is trained.

    Returns:
        parameters, skipped steps, gradient norms, the whole optimizer state, bytes of this rank's state.
    """
    ranks = communicator()
    model = Toy(seed=0, dtype=dtype)
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    if only is not None:
        for name, param in model.named_parameters():
            param.requires_grad_(name == only)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    sharded = ShardedOptimizer(optimizer, model, ranks, bucket_elements, offload)
    if state is not None:
        load_whole(sharded, state)
    skipped, norms = [], []
    for step in range(first_step, first_step + steps):
        optimizer.zero_grad()
        model.backward(_share(ranks, idle_rank), step)
        if poison == (ranks.rank, step):
            assert model.hidden.bias.grad is not None
            model.hidden.bias.grad[1] = float("nan")
        if not sharded.reduce():
            skipped.append(step)
        norms.append(sharded.grad_norm)
        if clip is not None:
            sharded.clip_grad_norm_(clip)
        optimizer.step()
        sharded.gather_parameters()
        if scheduler:
            scheduler.step()
    tensors = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor) and t.dim()]
    return {
        "parameters": values(model),
        "skipped": skipped,
        "norms": norms,
        "state": whole_state(sharded),
        "state_elements": sum(t.numel() for t in tensors),
        "master_elements": sum(bucket.master.numel() for bucket in sharded.buckets),
        "gradient_dtypes": {bucket.gradients.dtype for bucket in sharded.buckets if bucket.gradients is not None},
    }


def whole_state(sharded: ShardedOptimizer) -> dict[str, Any]:
    """The optimizer state in torch's own form, put together from all ranks' pieces."""
    description, pieces = save_sharded(sharded)
    everyone: list[Any] = [pieces]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, pieces)
    shapes = {n: p.shape for b in sharded.buckets for n, p in zip(b.names, b.params)}
    names = [name for group in description["param_groups"] for name in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for name, keys in description["tensors"].items():
        for key in keys:
            parts = [part[f"optimizer/{key}/{name}"] for part in everyone]
            whole = torch.full(parts[0].size, float("nan"))
            for part in parts:
                ends = zip(part.offsets, part.local.shape)
                whole[tuple(slice(start, start + length) for start, length in ends)] = part.local
            shape = description["shapes"].get(name, {}).get(key, shapes[name])
            state.setdefault(names.index(name), {})[key] = whole.view(shape)
    for name, scalars in description["scalars"].items():
        state.setdefault(names.index(name), {}).update(scalars)
    groups = [
        {**group, "params": [names.index(name) for name in group["params"]], "param_names": group["params"]}
        for group in description["param_groups"]
    ]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _share(ranks: Communicator, idle_rank: int | None) -> Iterable[int]:
    if idle_rank is None:
        return range(ranks.rank, SAMPLES, ranks.size)
    workers = [rank for rank in range(ranks.size) if rank != idle_rank]
    return [] if ranks.rank == idle_rank else range(workers.index(ranks.rank), SAMPLES, len(workers))


def bytes_per_parameter(dtype: torch.dtype) -> float:
    """Measured bytes of parameters, gradients, masters and AdamW state on this rank, a parameter."""
    model = nn.Sequential(nn.Linear(700, 800), nn.Linear(800, 300)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    sharded = ShardedOptimizer(optimizer, model, communicator())
    model(torch.ones(2, 700, dtype=dtype)).sum().backward()
    sharded.reduce()
    optimizer.step()
    sharded.gather_parameters()
    tensors = [t for entry in optimizer.state.values() for t in entry.values()]
    for bucket in sharded.buckets:
        assert bucket.gradients is not None
        tensors += [bucket.flat, bucket.gradients, *([] if bucket.master_is_parameter else [bucket.master])]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) / sum(p.numel() for p in model.parameters())


def different_models() -> None:
    ranks = communicator()
    model = Toy()
    if ranks.rank == 1:
        model.hidden.bias = nn.Parameter(torch.zeros(6))
    ShardedOptimizer(sgd(model), model, ranks)


def sum_tensor() -> tuple[Tensor, Tensor]:
    ranks = communicator()
    mine = torch.tensor([ranks.rank + 1, 10])
    return mine, ranks.sum(mine)


def calibrate(enabled: bool) -> tuple[list[float], list[float]]:
    """Ratio and imbalance after each of 30 steps in which rank 1 takes twice as long as rank 0."""
    ranks, calibration = communicator(), Calibration(enabled)
    ratios, imbalances = [], []
    for step in range(30):
        tokens, depth = 1000 * (ranks.rank + 1), 1000 + 400 * (step % 7)
        calibration.observe(ranks, tokens, tokens * depth, (1 + ranks.rank) * (1e-2 + 3e-6 * depth))
        ratios.append(calibration.ratio)
        imbalances.append(calibration.imbalance)
    return ratios, imbalances


def die_in_collective() -> None:
    """Rank 1 dies, without a word, while rank 0 waits for it."""
    ranks = communicator()
    if ranks.rank == 1:
        os._exit(3)
    ranks.sum(torch.ones(1))
