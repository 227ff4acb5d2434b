"""Where a model comes from: a directory (or hub name) with weights, or a configuration to start from at random.

Promises: exactly one of the two; every mistake is an error that names the field; an unknown configuration key is
refused (transformers would keep it and ignore it). The attention implementation is left alone: the tree engine sets its
own.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class ModelSource:
    """Names a causal language model; `build_model` makes it.

    Attributes:
        path: directory written by `save_pretrained`, or a name on the Hugging Face hub.
        config: `model_type` and any fields of that type's transformers configuration; weights start at random, drawn
            from torch's global generator (`seed_everything`).
        dtype: parameter dtype: "float32", "bfloat16" or "float64".

    Raises:
        ValueError: both or neither of path and config, or another dtype.
    """

    path: str | None = None
    config: dict[str, Any] | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.config is None):
            given = "both are" if self.path is not None else "neither is"
            raise ValueError(f"model: give either model.path or model.config, {given} set")
        if self.dtype not in _DTYPES:
            raise ValueError(f"model.dtype: '{self.dtype}' is not one of {', '.join(_DTYPES)}")


def build_model(source: ModelSource) -> PreTrainedModel:
    """The model of `source`, in training mode, on the current default device.

    Raises:
        ValueError: naming the field of `source` that cannot be used.
    """
    dtype = _DTYPES[source.dtype]
    if source.path is not None:
        try:
            model = AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype)
        except (OSError, ValueError) as error:
            raise ValueError(f"model.path: '{source.path}' holds no causal language model: {error}") from error
    else:
        assert source.config is not None
        model = AutoModelForCausalLM.from_config(_make_config(source.config), dtype=dtype)
    # from_pretrained leaves evaluation mode on, in which dropout and gradient checkpointing would be off in silence.
    return model.train()


def _make_config(fields: dict[str, Any]) -> PretrainedConfig:
    options = dict(fields)
    model_type = options.pop("model_type", None)
    if model_type is None:
        raise ValueError("model.config.model_type is missing: name an architecture of transformers, for example qwen3")
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError as error:
        raise ValueError(f"model.config.model_type: '{model_type}' is not an architecture of transformers") from error
    known = {*default.to_dict(), *default.attribute_map, "num_labels", "head_dim", "rope_theta", "rope_scaling"}
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"model.config.{key} is not an option of {model_type}{hint}")
    try:
        return AutoConfig.for_model(model_type, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"model.config: {error}") from error
