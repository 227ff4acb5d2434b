"""Tiny causal language models with weights far from their initialisation, so that mistakes show.

Default initialisation makes logits nearly uniform and attention nearly flat: an engine that ignored its keys would
pass. Here every parameter is drawn anew (seeded), norms and biases included.

StarCoder2 and Phi are float64-clean through `sdpa` (LayerNorm; only the rotary table is float32, the same for both
sides). The others normalise in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from app.tree import auto_class
from tests.app.tree.cases import VOCABULARY
from tests.helpers.selection import skip_without

HIDDEN = 16
FLOAT64_CLEAN = ("starcoder2", "phi")
FLOAT32 = ("qwen2", "qwen2_tied", "qwen3", "llama", "llama_tied_mha")

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
_VARIANTS: dict[str, dict[str, Any]] = {
    "starcoder2": dict(sliding_window=None, tie_word_embeddings=True),
    "phi": dict(tie_word_embeddings=False, partial_rotary_factor=0.5),
    "qwen2": dict(tie_word_embeddings=False),
    "qwen2_tied": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": dict(tie_word_embeddings=False, head_dim=8),
    "llama": dict(tie_word_embeddings=False, attention_bias=True),
    "llama_tied_mha": dict(model_type="llama", tie_word_embeddings=True, num_key_value_heads=4),
}


SINCE = {"lfm2": "5.22", "lfm3": "5.23", "qwen4_exp_text": "5.18", "glm5_next": "5.24", "bailing_hybrid": "5.24"}
SINCE |= {"deepseek_v4": "5.19", "zaya": "5.24", "inkling_text": "5.24", "inkling2_text": "5.24"}
SINCE |= dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2"), "5.18")
"""Types that transformers has, or has in a form over which a tree runs, from a release on that may not be installed."""


def make(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A fresh model in training mode. `name`: a row of `_VARIANTS` or any transformers model type; a test of one that
    the installed transformers is too old for is skipped."""
    skip_without(SINCE.get(name, "5"))
    options = {**_COMMON, **_VARIANTS.get(name, {}), **overrides}
    attention = options.pop("attn_implementation", "sdpa")
    config = CONFIG_MAPPING[options.pop("model_type", name)](**options)
    model = auto_class(config).from_config(config, attn_implementation=attention, dtype=torch.float64)
    randomise(model, seed)
    return model.to(dtype).train()


def checkpoint(model: PreTrainedModel, **options: Any) -> None:
    """Switches the model's own checkpointing on, by the name that the installed transformers has for it."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")(options or None)


def randomise(module: nn.Module, seed: int) -> None:
    """Every parameter ~ its role: matrices spread, norms around one, biases around zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                parameter.copy_(noise * (1.5 if "embed" in name else 0.6) / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise * 0.2 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))


@cache
def shared(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, nn.Linear]:
    """One model and value head per (name, dtype) for tests that leave it as they found it."""
    return make(name, dtype), value_head(dtype)


def value_head(dtype: torch.dtype, seed: int = 1) -> nn.Linear:
    head = nn.Linear(HIDDEN, 1).double()
    randomise(head, seed)
    return head.to(dtype)
