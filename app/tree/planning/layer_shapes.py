"""What a configuration says of each layer: whether it attends, with which heads, and how wide its MLP is.

Promises: pure arithmetic on names that transformers' families share; layers need not be alike, and a configuration that
says nothing of single ones speaks for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STATEFUL = ("linear_attention", "conv", "mamba")
_TOKENWISE = ("mlp", "moe")


@dataclass(frozen=True)
class HeadShape:
    """Heads of one layer's attention: of queries, of keys and values, and how wide they are."""

    heads: int
    key_value_heads: int
    head_dim: int

    @classmethod
    def of(cls, layer: Any) -> HeadShape:
        """Reads a layer's configuration."""
        heads = layer.num_attention_heads
        width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        return cls(heads, getattr(layer, "num_key_value_heads", None) or heads, width)

    def kept_values(self) -> int:
        """Values that a token keeps for backward."""
        return (3 * self.heads + 4 * self.key_value_heads) * self.head_dim


def layer_configs(text: Any) -> Sequence[Any]:
    """A configuration for each layer: its own where they differ (Gemma 4), which is an error to read of the whole."""
    if getattr(text, "is_heterogeneous", False):
        layers: Sequence[Any] = text.per_layer_config
        return layers
    return [text] * text.num_hidden_layers


def layer_kinds(text: Any) -> list[str]:
    """What a configuration calls each layer; nothing where all are alike."""
    return list(getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None) or [])


def attention_shapes(text: Any) -> tuple[HeadShape, ...]:
    """Heads of the layers that a configuration says attend; of all where it does not say."""
    kinds = layer_kinds(text) or ["attention"] * text.num_hidden_layers
    pairs = zip(layer_configs(text), kinds, strict=False)
    return tuple(HeadShape.of(layer) for layer, kind in pairs if kind not in STATEFUL + _TOKENWISE)


def feed_forward_sizes(text: Any) -> tuple[int, ...]:
    """Intermediate sizes, with those of all experts that a token passes, of the layers with an MLP: those of its own
    kind where there are any, else all."""
    kinds, layers = layer_kinds(text), layer_configs(text)
    own = [i for i, kind in enumerate(kinds) if kind in _TOKENWISE]
    return tuple(_feed_forward_size(layers[i], i) for i in own or range(text.num_hidden_layers))


def _feed_forward_size(layer: Any, index: int) -> int:
    size = getattr(layer, "intermediate_size", None) or 4 * layer.hidden_size
    if not isinstance(size, int):  # one a layer (Gemma 3n)
        size = size[index]
    if getattr(layer, "use_double_wide_mlp", False):  # of layers that attend to keys of others (Gemma 4)
        size *= 1 + (index >= layer.num_hidden_layers - layer.num_kv_shared_layers)
    expert = getattr(layer, "moe_intermediate_size", None)
    active = getattr(layer, "num_experts_per_tok", None)
    if active:
        size = active * (expert or size)
    if getattr(layer, "enable_moe_block", False):  # experts beside the MLP (Gemma 4)
        size += layer.top_k_experts * expert
    return int(size)
