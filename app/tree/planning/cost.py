"""What plans cost by a model's shape: FLOPs and bytes. Time is in `app.tree.planning.timing`, budgets in
`app.tree.memory`.

Promises: pure arithmetic on a configuration; nothing is allocated or run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.tree.planning.plan import ExecutionPlan


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder-only configuration that costs depend on.

    `attending`: layers that have keys and values (None: all); `state_values`: values of all layers' states after a
    token, counted in float32, which a piece that others hang below keeps once.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    attending: int | None = None
    state_values: int = 0

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Reads a transformers configuration."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        active = getattr(text, "num_experts_per_tok", None)
        if active:
            intermediate = active * (getattr(text, "moe_intermediate_size", None) or intermediate)
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=intermediate,
            heads=heads,
            key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocabulary=text.vocab_size,
            attending=_attending(text),
            state_values=_state_values(text),
        )

    @property
    def attention_layers(self) -> int:
        """Layers that have keys and values."""
        return self.layers if self.attending is None else self.attending

    def forward_flops(self, tokens: int, pairs: int, scored: int) -> float:
        """Multiply-adds x 2 of one forward: linear layers, attention, output projection of `scored` rows."""
        return tokens * self.linear_flops() + 2.0 * (
            2 * pairs * self.attention_layers * self.heads * self.head_dim + scored * self.hidden * self.vocabulary
        )

    def linear_flops(self) -> float:
        """FLOPs of the linear layers of one token's forward, output projection aside."""
        attention_io = (2 * self.heads + 2 * self.key_value_heads) * self.head_dim
        return 2.0 * self.layers * self.hidden * (attention_io + 3 * self.intermediate)

    def activation_bytes(self, bytes_per_value: int) -> int:
        """Estimated bytes a token keeps alive for backward in a gated-MLP decoder without activation checkpointing.
        In low precision norms also save float32 copies. Against what autograd really saves (Qwen 2 and 3, Llama,
        Mistral, Phi-3, Granite): 0-15% too many in float32, 7% too many to 15% too few in bf16."""
        queries, keys = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        values = 8 * self.hidden + 3 * queries + 4 * keys + 4 * self.intermediate
        return int(self.layers * values * bytes_per_value * (1.15 if bytes_per_value < 4 else 1.0))

    def checkpoint_share(self) -> float:
        """Part of a token's activations that is alive when its layers are checkpointed: each layer's input, and one
        layer at a time in full."""
        layer = self.activation_bytes(4) / 4 / self.layers
        return min(1.0, ((self.layers + 2) * self.hidden + layer) / (self.layers * layer))


_STATEFUL = ("linear_attention", "conv", "mamba")
_TOKENWISE = ("mlp", "moe")


def _kinds(text: Any) -> list[str]:
    return list(getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None) or [])


def _attending(text: Any) -> int | None:
    """Layers that a configuration says attend; None where it does not say."""
    kinds = _kinds(text)
    return sum(kind not in _STATEFUL + _TOKENWISE for kind in kinds) if kinds else None


def _state_values(text: Any) -> int:
    """Scan states and convolution tails of all layers, from what families call their sizes."""

    def size(*names: str) -> int:
        return next((value for name in names if isinstance(value := getattr(text, name, None), int)), 0)

    layers = sum(kind in _STATEFUL or kind.startswith("hybrid") for kind in _kinds(text))
    keys = size("linear_num_key_heads", "linear_num_heads") * size("linear_key_head_dim", "linear_head_dim")
    heads, width = size("linear_num_value_heads", "linear_num_heads"), size("linear_value_head_dim", "linear_head_dim")
    if keys:
        scan = heads * width * size("linear_key_head_dim", "linear_head_dim")
        return layers * (scan + (size("linear_conv_kernel_dim") - 1) * (2 * keys + heads * width))
    inner = size("mamba_n_heads", "mamba_num_heads") * size("mamba_d_head", "mamba_head_dim")
    state, groups = size("mamba_d_state", "ssm_state_size"), size("mamba_n_groups", "n_groups")
    if inner:
        return layers * (inner * state + (size("mamba_d_conv", "conv_kernel") - 1) * (inner + 2 * groups * state))
    return layers * max(0, size("conv_L_cache") - 1) * text.hidden_size


def plan_flops(plan: ExecutionPlan, shape: ModelShape) -> float:
    """FLOPs of forward and backward over a plan: three forwards' worth, and what runs a second time."""
    tree = plan.tree
    tokens = sum(chunk.tokens for chunk in plan.chunks)
    once = shape.forward_flops(tokens, tree.num_attention_pairs, len(tree.scored_tokens))
    again = 0.0
    for chunk in plan.chunks:
        runs = [chunk.tokens] * chunk.checkpoint + [chunk.anchor_tokens] * (not chunk.keep)
        again += sum(shape.forward_flops(n, n * (chunk.path_tokens + n // 2), 0) for n in runs)
    return 3 * once + again
