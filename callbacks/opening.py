"""What a fit begins with, in a few lines: where it goes on, what is trained, how the first batch was run, what a rank
holds.

    goes on from step 40 of runs/a/checkpoints/last.ckpt
    policy: llama of 30 layers, 139 M parameters, 4.88 M of them trained (3.5%): LORA of rank 16
    first batch: 64 sequences, 2,881 tokens, 1,004 as a tree (2.9 times fewer), in 1 chunk, nothing runs twice
    memory of a rank: weights 532 MiB, gradients 18.6 MiB, optimizer 37.3 MiB; the process held at most 2.31 GiB so far

(`TreeModule` adds which attention, scans and output layer compute it.) Promises: counted and measured, never estimated;
said once, by rank 0, of itself; nothing is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.tree import elements, quantised_layers, scales, tower_parameters
from modules import TreeModule
from modules.models import inner_model, stacked_experts


class Opening(Callback):
    """Prints these lines when training starts and after its first step."""

    def __init__(self) -> None:
        self._said = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._said = False
        if trainer.ckpt_path is not None:
            pl_module.print(f"goes on from step {trainer.global_step} of {trainer.ckpt_path}")
        for line in (*models(pl_module), *optimizers(trainer)):
            pl_module.print(line)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._said or not isinstance(pl_module, TreeModule):
            return
        self._said = True
        for line in (*_first_batch(pl_module, trainer.world_size), _memory(trainer, pl_module)):
            pl_module.print(line)


# ---- what is trained


def models(module: nn.Module) -> Iterator[str]:
    """A line a part of `module` that has parameters; what parts share counts for the first."""
    seen: set[int] = set()
    for name, part in module.named_children():
        own = [one for one in part.parameters() if id(one) not in seen]
        seen.update(map(id, own))
        if own:
            yield f"{name}: {', '.join((*_kind(part), *_counts(part, own)))}"


def _kind(part: nn.Module) -> Iterator[str]:
    config = getattr(part, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        yield f"{config.model_type} of {config.get_text_config().num_hidden_layers} layers"


def _counts(part: nn.Module, parameters: list[nn.Parameter]) -> Iterator[str]:
    every, trained = _elements(parameters), _elements(one for one in parameters if one.requires_grad)
    yield f"{_million(every)} parameters"
    adapters = [f"{one.peft_type.value} of rank {one.r}" for one in getattr(part, "peft_config", {}).values()
                if hasattr(one, "r")]  # fmt: skip
    with_ = f": {', '.join(adapters)}{_places(part)}" if adapters else ""
    if trained in (0, every):
        yield ("all trained" if trained else "frozen") + with_
    else:
        yield f"{_million(trained)} of them trained ({trained / every:.1%}){with_}"
    in_bits = _elements(layer.weight for layer in quantised_layers(part).values())
    if in_bits:
        yield f"{_million(in_bits)} of them kept in 4 bit"
    tower = tower_parameters(inner_model(part)) if hasattr(part, "config") else []
    if tower:
        state = "trained" if any(one.requires_grad for one in tower) else "frozen"
        yield f"{_million(_elements(tower))} in the tower that sees, {state}"


def _places(part: nn.Module) -> str:
    """What adapters are on; experts that are one tensor a layer have some in the families that PEFT knows alone."""
    tuner: Any = part.base_model
    of_modules = {name.rpartition(".")[2] for name in tuner.targeted_module_names}
    of_parameters = {name.removesuffix(".weight").rpartition(".")[2] for name in tuner.targeted_parameter_names}
    left = sorted(stacked_experts(part) - of_parameters)
    without = f", none on experts' {', '.join(left)} (model.adapter.target_parameters)" if left else ""
    return f" on {', '.join(sorted(of_modules | of_parameters))}{without}"


def _elements(parameters: Iterable[Tensor]) -> int:
    return sum(elements(one) for one in parameters)


def _million(count: int) -> str:
    return f"{count / 1e9:.3g} G" if count >= 1e9 else f"{count / 1e6:.3g} M" if count >= 1e6 else f"{count:,}"


def optimizers(trainer: Trainer) -> Iterator[str]:
    """What those say that step some parameters otherwise than others."""
    for optimizer in trainer.optimizers:
        if described := getattr(optimizer, "described", ""):
            yield f"optimizer: {described}"


# ---- how the first batch was run


def _first_batch(module: TreeModule, ranks: int) -> Iterator[str]:
    tree, plan = module.last_tree, module.engine.last_plan
    if tree is None or not tree.num_sequences or plan is None:
        return
    fewer = tree.num_dense_tokens / tree.num_tokens
    said = f"first batch: {tree.num_sequences:,} sequences, {tree.num_dense_tokens:,} tokens"
    said += f", {tree.num_tokens:,} as a tree ({fewer:.3g} times fewer)"
    if ranks > 1:
        said += f"; of them rank 0 {plan.tree.num_tokens:,}"
    chunks, again = len(plan.chunks), plan.extra_forward_tokens
    said += ", every sequence alone" if plan.dense else f", in {chunks} chunk{'s' * (chunks != 1)}"
    said += f", {again:,} tokens run forward twice" if again else ", nothing runs twice"
    yield said


# ---- what a rank holds


def _memory(trainer: Trainer, module: nn.Module) -> str:
    counted: set[int] = set()
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    masters = [one for group in groups for one in group["params"]]  # with DTAStrategy shards of their own
    parameters = [*module.parameters(), *module.buffers(), *(scale for _, scale in scales(module))]
    states = [value for one in trainer.optimizers for state in one.state.values() for value in state.values()]
    parts = {
        "weights": _bytes(parameters, counted),
        "gradients": _bytes([one.grad for one in (*module.parameters(), *masters)], counted),
        "optimizer": _bytes([*masters, *states], counted),
    }
    shown = ", ".join(f"{name} {_size(value)}" for name, value in parts.items())
    return f"memory of a rank: {shown}{_peak(getattr(module, 'device', torch.device('cpu')))}"


def _peak(device: torch.device) -> str:
    if device.type == "cuda":
        return f"; the GPU held at most {_size(torch.cuda.max_memory_allocated(device))} so far"
    try:
        import resource
    except ImportError:  # not on Windows
        return ""
    unit = 1 if sys.platform == "darwin" else 1024
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"; the process held at most {_size(held)} so far"


def _bytes(values: Iterable[Any], counted: set[int]) -> int:
    """Of the storages of tensors that are not in `counted`, which learns them."""
    total = 0
    for value in values:
        if not isinstance(value, Tensor):
            continue
        storage = (value.to_local() if isinstance(value, DTensor) else value).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _size(count: float) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"
