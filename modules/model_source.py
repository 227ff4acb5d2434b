"""Where a model comes from: a directory (or hub name) with weights, or a configuration to start from at random.

Promises: exactly one of the two; every mistake is an error that names the field; an unknown configuration key is
refused (transformers would keep it and ignore it). The attention implementation is left alone: the tree engine sets its
own.
"""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

_LARGEST = 2**31 - 1
_MOST_LAYERS = 10_000
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class ModelSource:
    """Names a causal language model; `build_model` makes it.

    Attributes:
        path: directory written by `save_pretrained`, or a name on the Hugging Face hub.
        config: `model_type` and any fields of that type's transformers configuration; weights start at random, drawn
            from torch's global generator (`seed_everything`). Without `eos_token_id` the tokenizer alone says what ends
            a sequence: some types would name a token of another tokenizer.
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
        config = _make_config(source.config)
        padding, size = config.pad_token_id, config.get_text_config().vocab_size
        if padding is not None and padding >= size:
            raise ValueError(
                f"model.config.pad_token_id: {padding} is outside the vocabulary of {size}; choose another"
            )
        try:
            _refuse_too_large(config, dtype)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except Exception as error:  # sizes that contradict each other fail anywhere in transformers
            raise ValueError(f"model.config: {_in_one_line(error)}") from error
    # from_pretrained leaves evaluation mode on, in which dropout and gradient checkpointing would be off in silence.
    return model.train()


def _make_config(fields: dict[str, Any]) -> PretrainedConfig:
    options = dict(fields)
    model_type = options.pop("model_type", None)
    if model_type is None:
        raise ValueError("model.config.model_type is missing: name an architecture of transformers, for example qwen3")
    try:
        default = AutoConfig.for_model(model_type)
    except (ValueError, TypeError) as error:
        raise ValueError(f"model.config.model_type: '{model_type}' is not an architecture of transformers") from error
    known = {*default.to_dict(), *default.attribute_map, "num_labels", "head_dim", "rope_theta", "rope_scaling"}
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"model.config.{key} is not an option of {model_type}{hint}")
    options = {key: _checked(key, value, getattr(default, key, None)) for key, value in options.items()}
    try:
        return AutoConfig.for_model(model_type, **({"eos_token_id": None} | options))
    except Exception as error:  # transformers' own checks raise classes of their own
        raise ValueError(f"model.config: {_in_one_line(error)}") from error


def _checked(key: str, value: Any, default: Any) -> Any:
    """`value`, of the kind that `default` is. What is below a size of 1 or not a number fails much later, or never."""
    if key == "rope_theta" and not (_is_number(value) and value > 1):
        raise ValueError(f"model.config.{key}: {value!r}, must be a number above 1")
    if value is None:
        return value
    if isinstance(default, bool) != isinstance(value, bool) and isinstance(default, bool | int | float):
        raise ValueError(f"model.config.{key}: {value!r}, must be of the kind of {default!r}")
    if isinstance(value, list | tuple) and value and all(map(_is_number, value)):
        return value  # several ends of sequence, or one a layer; transformers knows where it takes them
    if _is_number(default) and not _is_number(value):
        raise ValueError(f"model.config.{key}: {value!r}, must be a finite number, such as {default!r}")
    is_size = key.startswith("num_") or key.endswith(("_size", "_dim", "_embeddings"))
    is_size = is_size and not isinstance(value, bool)  # tie_word_embeddings
    least = 0 if key.endswith("_layers") and key != "num_hidden_layers" else 1  # none of a kind of layers
    if is_size and isinstance(value, int) and not least <= value <= _LARGEST:
        raise ValueError(f"model.config.{key}: {value}, must be between {least} and {_LARGEST:,}")
    if key == "num_hidden_layers" and isinstance(value, int) and value > _MOST_LAYERS:
        raise ValueError(f"model.config.{key}: {value}, must be at most {_MOST_LAYERS:,}")
    if isinstance(default, float):
        if default > 0 and value <= 0:
            raise ValueError(f"model.config.{key}: {value}, must be above 0")
        return float(value)  # transformers takes no whole number for one
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse_too_large(config: PretrainedConfig, dtype: torch.dtype) -> None:
    if torch.get_default_device().type != "cpu":
        return
    try:
        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception:  # sizes that contradict each other, which fail again, or a model that reads values as it is made
        return
    needed = sum(parameter.numel() * parameter.element_size() for parameter in shapes.parameters())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ValueError(
            f"its parameters need {needed / 1e9:,.0f} GB of this machine's {there / 1e9:,.0f} GB: lower vocab_size,"
            " hidden_size or num_hidden_layers"
        )


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
