"""The part of a model that text goes through, how a model that writes is made, what its configuration should say, and
what of it is never in half precision.

Promises: where a model has nothing else, that part is its body; which tensors are one is told by the tensors.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)


def body_of(model: PreTrainedModel) -> Any:
    """All of it but the projection to the vocabulary."""
    base: Any = model.base_model
    return getattr(model, "model", model) if base is model else base  # Llama 4 calls it what others have inside


def language_model(model: PreTrainedModel) -> nn.Module:
    """All of the body, but for towers and projectors of other inputs."""
    part: nn.Module = model.get_decoder() if hasattr(model.config, "vision_config") else body_of(model)
    return part


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' auto class for models that write: `AutoModelForCausalLM`, or `AutoModelForImageTextToText` for
    those that it does not know, and for those that see by the class that the configuration is of (Qwen3.5 has two)."""
    sees = getattr(config, "vision_config", None) is not None
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    if sees and (type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or whole in (config.architectures or ())):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Of the names in its `state_dict` those that stand for the same tensor as another, with that one; tensors tell it:
    transformers leaves a projection alone that files have beside the embedding, whatever their configuration says."""
    known: dict[str, str] = model.all_tied_weights_keys
    return {name: source for name, source in known.items() if _tensor(model, name) is _tensor(model, source)}


def parted_ties(model: PreTrainedModel) -> list[tuple[str, str]]:
    """Of `tied_names` those with adapters, as PEFT's, on one module alone or others on each, which merged are no model
    of the kind. Adapters of tokens that PEFT shares have parameters in one of the two alone."""
    parted = []
    for name, source in tied_names(model).items():
        sides = [model.get_submodule(one.rpartition(".")[0]) for one in (name, source)]
        adapted = [hasattr(side, "base_layer") or hasattr(side, "original_module") for side in sides]
        own = [{id(p) for p in side.parameters() if p.requires_grad} for side in sides]
        if adapted[0] != adapted[1] or (any(adapted) and all(own) and own[0] != own[1]):
            parted.append((name, source))
    return parted


def moves_base(model: Any) -> str | None:
    """The option of PEFT's `model` by whose value new adapters take something away from the weights below them, which
    then are no longer the model that was loaded; None where those stay as they are."""
    for config in getattr(model, "peft_config", {}).values():
        began = getattr(config, "init_lora_weights", None)
        if isinstance(began, str) and began.lower().startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
            return began
    return None


def own_config(model: PreTrainedModel) -> PretrainedConfig:
    """A copy of its configuration, from which a model with the same tensors is made: not tied where it has two."""
    config: PretrainedConfig = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if not tied_names(model):
        for part in (config, config.get_text_config()):
            if getattr(part, "tie_word_embeddings", False):
                part.tie_word_embeddings = False
    return config


def kept_in_float32(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters and buffers, by name, that `from_pretrained` leaves in float32 where it loads the transformers
    models in `module` in `dtype`: frequencies of rotary embeddings, whose error grows with the position, and what their
    classes name (routers and their biases, say). None where `dtype` is not half precision."""
    if dtype not in (torch.float16, torch.bfloat16):
        return {}
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named |= dict(module.named_buffers(remove_duplicate=False))
    found = {name for name in named if name.endswith("inv_freq")}
    for path, part in module.named_modules():
        rules = _float32_rules(part, dtype) if isinstance(part, PreTrainedModel) else None
        if rules is not None:
            start = f"{path}." if path else ""
            plain = {name: name.removeprefix(start).replace("base_layer.", "") for name in named}  # without adapters
            found |= {name for name in named if name.startswith(start) and rules.search(plain[name])}
    return {name: tensor for name, tensor in named.items() if name in found and tensor.is_floating_point()}


def _float32_rules(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Looked for anywhere in a name, as transformers does."""
    rules = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        rules |= set(model._keep_in_fp32_modules or ())
    return re.compile("|".join(sorted(rule.replace("*", ".*") for rule in rules))) if rules else None


def _tensor(model: nn.Module, name: str) -> Any:
    """By its name in a model without adapters."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    while (inside := next((getattr(module, key) for key in _INSIDE if hasattr(module, key)), None)) is not None:
        module = inside
    return getattr(module, own)


_INSIDE = ("base_layer", "original_module")  # where PEFT's layers keep what they are put on
