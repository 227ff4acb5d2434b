"""The part of a model that text goes through, how a model that writes is made, and what its configuration should say.

Promises: where a model has nothing else, that part is its body; which tensors are one is told by the tensors.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


def language_model(model: PreTrainedModel) -> nn.Module:
    """All of the body, but for towers and projectors of other inputs."""
    part: nn.Module = model.get_decoder() if hasattr(model.config, "vision_config") else model.base_model
    return part


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' auto class for models that write: `AutoModelForCausalLM`, or `AutoModelForImageTextToText` for
    those that it does not know."""
    sees = getattr(config, "vision_config", None) is not None
    if sees and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Of the names in its `state_dict` those that stand for the same tensor as another, with that one; tensors tell it:
    transformers leaves a projection alone that files have beside the embedding, whatever their configuration says."""
    known: dict[str, str] = model.all_tied_weights_keys
    return {name: source for name, source in known.items() if _tensor(model, name) is _tensor(model, source)}


def own_config(model: PreTrainedModel) -> PretrainedConfig:
    """A copy of its configuration, from which a model with the same tensors is made: not tied where it has two."""
    config: PretrainedConfig = copy.deepcopy(model.config)
    if not tied_names(model):
        for part in (config, config.get_text_config()):
            if getattr(part, "tie_word_embeddings", False):
                part.tie_word_embeddings = False
    return config


def _tensor(model: nn.Module, name: str) -> Any:
    """By its name in a model without adapters."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    while (inside := next((getattr(module, key) for key in _INSIDE if hasattr(module, key)), None)) is not None:
        module = inside
    return getattr(module, own)


_INSIDE = ("base_layer", "original_module")  # where PEFT's layers keep what they are put on
