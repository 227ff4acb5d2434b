"""Norms, rotary embeddings and activations of the layers, fused by torch.compile: `elementwise="compile"`.

Promises: inside `layers_as` the parts of every layer (norms, MLP, attention up to the attention function) run compiled,
with lengths as symbols, so that no new length is compiled anew, and once a class, so that all layers share it; the
attention function, states and experts stay as they are. Dense execution is never compiled, so the engine's self-check
compares with the model's own code. Modules are left as they were found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from app.tree.attention.function import ATTENTION_NAME, tree_attention
from app.tree.model.language import body_of, language_model
from app.tree.model.projections import summed_in_place

ELEMENTWISE = ("eager", "compile")
"""How the element-wise parts of layers run: operator by operator, or fused by torch.compile."""

BACKEND = "inductor"
"""Of torch.compile."""

_VARIANTS = 64
"""Most compilations of a class of modules: with and without gradient, of one token and of more, in each dtype."""

_FIRST = 2**63 - 1
"""A place in autograd's order before all others but sums into `.grad`."""


@contextmanager
def layers_as(elementwise: str, model: PreTrainedModel, skipped: set[int]) -> Iterator[None]:
    """Forwards of the model's layers inside, and their backwards: weight gradients summed in place where that is
    possible, and with "compile" element-wise parts fused. `skipped`: layers that carry states, by index."""
    with summed_in_place(body_of(model), opaque=elementwise == "compile"):
        if elementwise == "eager":
            yield
            return
        _hide_attention()
        found = list(_parts(model, skipped))
        copies = list(_copies(found))
        try:
            for module, name, copy in copies:
                module.__dict__[name] = copy
            for part in found:
                part.__dict__["forward"] = partial(_compiled(type(part).forward, BACKEND), part)
            yield
        finally:
            for part in found:
                part.__dict__.pop("forward", None)
            for module, name, _ in copies:
                module.__dict__.pop(name, None)


def refuse_elementwise(name: str) -> None:
    """Raises ValueError for a name that is not in `ELEMENTWISE`."""
    if name not in ELEMENTWISE:
        raise ValueError(f"elementwise must be one of {ELEMENTWISE}, got {name!r}")


def _parts(model: PreTrainedModel, skipped: set[int]) -> Iterator[nn.Module]:
    for module in language_model(model).modules():
        if isinstance(module, GradientCheckpointingLayer):
            for part in module.children():
                stateful = getattr(part, "layer_idx", None) in skipped
                experts = any(p.dim() > 2 for p in part.parameters()) or hasattr(part, "experts")
                if not stateful and not experts and "forward" not in part.__dict__:
                    yield part


def _copies(parts: list[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Of trained vectors in low precision (weights of norms, biases), by module and name, copies to be read in their
    place: torch.compile makes no graph of what reads a parameter whose gradient has another dtype, and gradients are
    summed in float32. They hand their gradients on as soon as they have them, so that sums over ranks need not wait for
    the end of a backward. Not of shards, which change as they run."""
    for module in (module for part in parts for module in part.modules() if "forward" not in module.__dict__):
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dim() != 1 or isinstance(parameter, DTensor):
                continue
            if parameter.requires_grad and parameter.dtype != torch.promote_types(torch.float32, parameter.dtype):
                with torch.enable_grad():
                    copy = parameter.clone()
                node: Any = copy.grad_fn
                if node is not None:  # in inference mode; autograd takes the youngest first, and this one would be last
                    node._set_sequence_nr(_FIRST)
                torch._dynamo.mark_static(copy)
                yield module, name, copy


@cache
def _compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    own = {"recompile_limit": _VARIANTS, "isolate_recompiles": True}  # of newer torch
    known = signature(torch.compile).parameters.keys()
    options: dict[str, Any] = {name: value for name, value in own.items() if name in known}
    return torch.compile(forward, dynamic=True, backend=backend, **options)


@cache
def _hide_attention() -> None:
    """The attention function runs as it is: what it is given of a chunk is no tensor."""
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(tree_attention))
