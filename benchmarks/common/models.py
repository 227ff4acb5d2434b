"""The models the benchmarks run: a Qwen3 shape of their own, or that of any Hugging Face configuration.

Promises: weights are random; nothing is downloaded; every failure names the option.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from app.tree import read_config
from benchmarks.common.systems import attach_gradients, qwen3

SMALL_SHAPE: dict[str, Any] = {"hidden": 256, "layers": 3, "heads": 4, "key_value_heads": 2, "head_dim": 64}
TOY_SHAPE: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "key_value_heads": 2, "head_dim": 8}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class OptionError(ValueError):
    """A command-line option that cannot be followed; the message names it and the remedy."""


def build_model(
    config: str | None = None,
    toy: bool = False,
    vocabulary: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> PreTrainedModel:
    """A causal language model in training mode, with zeroed gradients in the accumulation dtype.

    Args:
        config: directory with a `config.json`, or a JSON file; default `SMALL_SHAPE` (`TOY_SHAPE` if `toy`).
        vocabulary: instead of the configuration's own; those of the built-in shapes are 8,192 and 512.

    Raises:
        ValueError: naming the option and what is wrong with its value.
    """
    if vocabulary is not None and vocabulary < 2:
        raise OptionError(f"--vocabulary must be at least 2, got {vocabulary}")
    if config is None:
        shape, size = (TOY_SHAPE, 512) if toy else (SMALL_SHAPE, 8192)
        return qwen3(**shape, vocabulary=vocabulary or size, dtype=dtype, device=device, seed=seed)
    read = read_config(Path(config).expanduser())
    text = read.get_text_config()
    if vocabulary is not None:
        text.vocab_size = vocabulary
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(text, name, None)
        if isinstance(token, int) and token >= text.vocab_size:  # transformers asserts that they are within
            setattr(text, name, None)
    torch.manual_seed(seed)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(read, attn_implementation="sdpa", dtype=dtype)
    except ValueError as error:
        raise OptionError(f"--model: {config}: no causal language model of {read.model_type}: {error}") from error
    model.train()
    attach_gradients(model)
    return model


def describe(model: PreTrainedModel, dtype: str) -> dict[str, Any]:
    """What a report says about a model."""
    text = model.config.get_text_config()
    names = {"hidden_size": "hidden", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
    names |= {"num_key_value_heads": "key_value_heads", "head_dim": "head_dim", "vocab_size": "vocabulary"}
    found = {label: getattr(text, name) for name, label in names.items() if getattr(text, name, None) is not None}
    return {"type": model.config.model_type, **found, "dtype": dtype}
