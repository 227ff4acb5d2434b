"""The part of a model that text goes through.

Promise: where a model has nothing else, that is its body.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def language_model(model: PreTrainedModel) -> nn.Module:
    """All of the body, but for towers and projectors of other inputs."""
    part: nn.Module = model.get_decoder() if hasattr(model.config, "vision_config") else model.base_model
    return part
