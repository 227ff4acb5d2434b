"""The numbers of a model that costs depend on, with what its configuration does not say.

Promise: nothing is allocated or run; modules are told by the shapes of their weights and by what they are made of.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import GELUActivation, GELUTanh, ReLUSquaredActivation

from app.tree.model.language import language_model
from app.tree.planning.cost import FUSED_NORMS_KEEP, NORM_KEEPS, ModelShape

_GATED, _PLAIN, _WRITTEN_OUT = 4, 2, 5
"""Intermediate sizes of values that an MLP keeps; the last where its activation is several operations."""
_ONE_OPERATION = (nn.GELU, nn.SiLU, nn.ReLU, GELUActivation, GELUTanh, ReLUSquaredActivation)


def shape_of(model: PreTrainedModel) -> ModelShape:
    """As `ModelShape.of` its configuration, and what its first MLP is: gated, with three matrices between the hidden
    and the intermediate size, or with two; and its norms: how many a layer, torch's own or written out.

    What shows neither (experts in one tensor, sizes that attention has too) counts as gated, which needs more memory.
    """
    shape = ModelShape.of(model.config)
    parts = list(language_model(model).modules())
    shape = replace(shape, norms_keep=_norms_keep(parts, shape))
    intermediate = shape.feed_forward[0]
    if intermediate == shape.hidden or any(intermediate == layer.heads * layer.head_dim for layer in shape.attention):
        return shape
    for module in parts:
        matrices = sum(_matrices(child, shape.hidden, intermediate) for child in module.children())
        if matrices == 2:
            fused = any(isinstance(child, _ONE_OPERATION) for child in module.children())
            return replace(shape, gated=False, mlp_keeps=_PLAIN if fused else _WRITTEN_OUT)
        if matrices == 3:
            break
    return replace(shape, gated=True, mlp_keeps=_GATED)


def _norms_keep(parts: list[nn.Module], shape: ModelShape) -> int:
    """Two norms a layer are what most have; others have more (Gemma's after attention and MLP too)."""
    norms = [part for part in parts if type(part).__name__.endswith("Norm")]
    if norms and all(isinstance(norm, nn.LayerNorm) for norm in norms):
        return FUSED_NORMS_KEEP
    weights = (getattr(norm, "weight", None) for norm in norms)
    more = sum(weight is not None and weight.shape == (shape.hidden,) for weight in weights) // shape.layers - 2
    return shape.norms_keep + NORM_KEEPS * max(0, more)


def _matrices(module: nn.Module, hidden: int, intermediate: int) -> int:
    """How many matrices between hidden and intermediate size a layer is: two where it is gate and up projection."""
    weight = getattr(getattr(module, "base_layer", module), "weight", None)  # below an adapter
    if weight is None or weight.dim() != 2:
        return 0
    sizes = getattr(weight, "quant_state", weight).shape  # codes of 4 bit have others
    for one, other in (sizes, sizes[::-1]):
        if one == hidden and other % intermediate == 0:
            return int(other // intermediate)
    return 0
