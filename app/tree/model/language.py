"""The part of a model that text goes through, and how a model that writes is made.

Promise: where a model has nothing else, that part is its body.
"""

from __future__ import annotations

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
