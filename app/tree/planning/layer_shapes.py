"""What a configuration says of each layer: whether it attends, with which heads, and how wide its MLP is.

Promises: pure arithmetic on names that transformers' families share; layers need not be alike, and a configuration that
says nothing of single ones speaks for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

Read = TypeVar("Read")
STATEFUL = ("linear_attention", "conv", "mamba")
_TOKENWISE = ("mlp", "moe")
_WINDOWED = ("sliding_attention", "hybrid_sliding")
_CHOSEN = "compressed_sparse_attention"  # its keys are made of windows that overlap, and an indexer has such as well


@dataclass(frozen=True)
class HeadShape:
    """Heads of one layer's attention: of queries, of keys and values, and how wide they are; of latent attention also
    the elements of its matrices and the values that a token keeps for backward, which heads do not say; `rate`: how
    many tokens a key beyond the window is made of, and `state_values`: of those that it is made of in another piece;
    `window`: how many tokens each sees at most, itself included; None: all."""

    heads: int
    key_value_heads: int
    head_dim: int
    latent_weights: int | None = None
    latent_keeps: int | None = None
    rate: int = 1
    state_values: int = 0
    window: int | None = None

    @classmethod
    def of(cls, layer: Any) -> HeadShape:
        """Reads a layer's configuration."""
        heads = layer.num_attention_heads
        if getattr(layer, "kv_lora_rank", None) and getattr(layer, "qk_nope_head_dim", None):
            return cls._latent(layer, heads)
        width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        if getattr(layer, "cca_time0", None):
            return cls._convolved(layer, heads, width)
        return cls(heads, getattr(layer, "num_key_value_heads", None) or heads, width)

    @classmethod
    def _latent(cls, layer: Any, heads: int) -> HeadShape:
        """Of latent attention, whose `head_dim` is of the rotated part: every head has keys and values of its own, made
        of one latent; values, which are narrower, are attended to as wide as keys."""
        rotated, keys, rank = layer.qk_rope_head_dim, layer.kv_lora_rank, getattr(layer, "q_lora_rank", None)
        width, values = layer.qk_nope_head_dim + rotated, heads * layer.v_head_dim
        weights = heads * width * layer.hidden_size if rank is None else rank * (layer.hidden_size + heads * width)
        weights += layer.hidden_size * (keys + rotated + values) + keys * (heads * layer.qk_nope_head_dim + values)
        # Queries, keys, values and what they attend to, all padded; the input of the output projection; both norms'.
        return cls(heads, heads, width, weights, 4 * heads * width + values + 3 * (keys + (rank or 0)))

    @classmethod
    def _convolved(cls, layer: Any, heads: int, width: int) -> HeadShape:
        """Of queries and keys that are projected and convolved twice, a channel and then a head at a time."""
        keys, reach = layer.num_key_value_heads, layer.cca_time0 + layer.cca_time1 - 2
        channels = (heads + keys) * width
        weights = 2 * layer.hidden_size * channels + channels * (layer.cca_time0 + width * layer.cca_time1)
        return cls(
            heads, keys, width, weights, 3 * heads * width + 9 * channels // 2, state_values=reach * layer.hidden_size
        )

    @classmethod
    def compressed(cls, text: Any, kind: str) -> HeadShape:
        """Of a layer of this kind, whose one head of keys is that of values too, made of tokens in a window and of many
        tokens each beyond it; queries and outputs pass low ranks."""
        heads, width, hidden, rank = text.num_attention_heads, text.head_dim, text.hidden_size, text.q_lora_rank
        rate, out = text.compress_rates.get(kind, 1), text.o_groups * text.o_lora_rank
        weights = hidden * (rank + width + out) + heads * width * (rank + text.o_lora_rank)
        keeps = heads * 6 * width + 3 * rank + 6 * width + out
        if rate == 1:
            return cls(heads, 1, width, weights, keeps)
        if kind != _CHOSEN:
            return cls(heads, 1, width, weights + 2 * hidden * width, keeps + 8 * width, rate, (rate - 1) * 2 * width)
        scored = text.index_n_heads * text.index_head_dim
        weights += 4 * hidden * (width + text.index_head_dim) + rank * scored + hidden * text.index_n_heads
        tail = (2 * rate - 1) * 4 * (width + text.index_head_dim)
        return cls(heads, 1, width, weights, keeps + 16 * width, rate, tail)

    def weights(self, hidden: int) -> int:
        """Elements of the layer's matrices."""
        if self.latent_weights is not None:
            return self.latent_weights
        return 2 * hidden * (self.heads + self.key_value_heads) * self.head_dim

    def kept_values(self) -> int:
        """Values that a token keeps for backward."""
        if self.latent_keeps is not None:
            return self.latent_keeps
        return (3 * self.heads + 4 * self.key_value_heads) * self.head_dim


def layer_kinds(text: Any) -> list[str]:
    """What a configuration calls each layer; nothing where all are alike."""
    return list(getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None) or [])


def attention_shapes(text: Any) -> tuple[HeadShape, ...]:
    """Heads of the layers that a configuration says attend; of all where it does not say."""
    kinds = layer_kinds(text) or ["attention"] * text.num_hidden_layers
    if getattr(text, "compress_rates", None):
        return tuple(replace(HeadShape.compressed(text, kind), window=text.sliding_window) for kind in kinds)
    pairs = zip(_of_layers(text, HeadShape.of), kinds, strict=False)
    window = getattr(text, "sliding_window", None)
    windows = dict.fromkeys(_WINDOWED if layer_kinds(text) else kinds, window)
    windows["chunked_attention"] = getattr(text, "attention_chunk_size", None)
    return tuple(replace(shape, window=windows.get(kind)) for shape, kind in pairs if kind not in STATEFUL + _TOKENWISE)


def feed_forwards(text: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the layers with an MLP (those of its own kind where there are any, else all): intermediate sizes, with those
    of all experts that a token passes, and how many of these it is sent to by a router."""
    own = [i for i, kind in enumerate(layer_kinds(text)) if kind in _TOKENWISE]
    parts = _of_layers(text, _feed_forward)
    sizes, routed = zip(*(parts[i](i) for i in own or range(text.num_hidden_layers)), strict=True)
    return tuple(sizes), tuple(routed)


def _of_layers(text: Any, read: Callable[[Any], Read]) -> list[Read]:
    """What `read` finds in each layer's configuration: its own where layers differ (Gemma 4), since it is an error to
    ask the whole then; else the whole, read once."""
    if getattr(text, "is_heterogeneous", False):
        return [read(layer) for layer in text.per_layer_config]
    return [read(text)] * text.num_hidden_layers


def _feed_forward(layer: Any) -> Callable[[int], tuple[int, int]]:
    """The intermediate size, and the experts that are chosen for a token, by the layer's index."""
    sizes = getattr(layer, "intermediate_size", None) or 4 * layer.hidden_size
    expert, active = getattr(layer, "moe_intermediate_size", None), getattr(layer, "num_experts_per_tok", None)
    if isinstance(expert, list | tuple):  # experts of text and of pictures (Ernie 4.5)
        expert = max(expert)
    chosen = layer.top_k_experts if getattr(layer, "enable_moe_block", False) else 0  # beside the MLP (Gemma 4)
    double = layer.num_hidden_layers  # from which on layers attend to keys of others, with MLPs twice as wide (Gemma 4)
    if getattr(layer, "use_double_wide_mlp", False):
        double -= layer.num_kv_shared_layers

    kinds, dense = getattr(layer, "mlp_layer_types", None), getattr(layer, "first_k_dense_replace", None) or 0
    shared = (getattr(layer, "n_shared_experts", None) or 0) * (expert or 0)
    shared += getattr(layer, "shared_expert_intermediate_size", None) or 0
    among = getattr(layer, "moe_layers", None)  # whose experts run all of the tokens each, beside one more (Llama 4)

    def part(index: int) -> tuple[int, int]:
        if among is not None:
            every = layer.num_local_experts
            return ((1 + every) * sizes, every) if index in among else (layer.intermediate_size_mlp, 0)
        own = sizes if isinstance(sizes, int) else sizes[index]  # one a layer (Gemma 3n)
        own *= 1 + (index >= double)
        if not active or index < dense or (kinds and kinds[index] == "dense"):
            return int(own + chosen * (expert or 0)), chosen
        return int(active * (expert or own) + shared), int(active)

    return part
