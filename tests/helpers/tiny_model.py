"""The tiny language model of the tests, as configurations write it (`model.config`): what a test needs otherwise, it
lays over.
"""

from __future__ import annotations

from typing import Any

TINY_MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
TINY_WITH_ENDS = {**TINY_MODEL, "bos_token_id": None, "pad_token_id": 0, "eos_token_id": 1}  # rolls out
HYBRID_LAYERS: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""A gated delta rule, and attention: laid over a model of the tests, it makes a hybrid of it."""
