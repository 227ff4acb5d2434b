"""A model's first layers as a small model of their own, in float32.

Promise: the model itself is as before, and shares nothing with the copy; memory is that of the layers asked for and the
embeddings, for as long as the copy lives.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from app.tree.model.language import language_model


def first_layers(model: PreTrainedModel, depth: int) -> PreTrainedModel | None:
    """The model with its first `depth` layers alone, adapters included; None where they are not one list of layers, or
    their parameters are in shards, of which this process has no whole ones."""
    text = language_model(model)
    if any(isinstance(parameter, DTensor) for parameter in text.parameters()):
        return None
    stacks = {id(module) for module in text.modules() if _is_stack(module)}
    holder = next((name for name, module in model.named_modules() if id(module) in stacks), None)
    if holder is None:
        return None
    parent = model.get_submodule(holder.rpartition(".")[0])
    name = holder.rpartition(".")[2]
    layers: Any = getattr(parent, name)
    # Only what is copied is taken apart: layers beyond `depth` would cost their memory once more.
    parent._modules[name] = nn.ModuleList(list(layers)[:depth])
    try:
        shallow = copy.deepcopy(model)
    finally:
        parent._modules[name] = layers
    settings = shallow.config.get_text_config().__dict__  # past validators that compare one with the other
    for kinds in ("layer_types", "layers_block_type"):
        if settings.get(kinds):
            settings[kinds] = settings[kinds][:depth]
    if "num_hidden_layers" in settings:
        settings["num_hidden_layers"] = depth
    for module in shallow.modules():  # what others hang on a model would be called for the copy as well
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    nn.Module.to(shallow, torch.float32)  # transformers' own refuses layers in 4 bit, which compute in any dtype
    return shallow


def _is_stack(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and any(isinstance(m, GradientCheckpointingLayer) for m in module)
