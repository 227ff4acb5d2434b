"""What plans and pictures cost by a model's shape: FLOPs and bytes. Time is in `app.tree.planning.timing`, budgets in
`app.tree.memory`.

Promises: pure arithmetic on a configuration; nothing is allocated or run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.tree.planning.layer_shapes import HeadShape, attention_shapes, feed_forwards
from app.tree.planning.plan import ExecutionPlan
from app.tree.planning.state_shape import StateShape, state_shape

FUSED_NORMS_KEEP = 4
"""Hidden sizes of values that a layer keeps whose norms are one operation each: their inputs and results."""

NORM_KEEPS = 2
"""Hidden sizes of values that each norm of a layer keeps beside them where it is written out."""

EXPERT_KEEPS = 2
"""Those that each expert a token is sent to keeps beside its intermediate values: what goes in and what comes out of
it; one more where experts run one by one (`experts_implementation="eager"`)."""


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder-only configuration that costs depend on.

    `attention`: heads of each layer that has keys and values; `feed_forward`: intermediate sizes of those that have an
    MLP, of all experts that a token passes; `states`: the layers that carry a state; `gated`: whether an MLP has a
    third matrix, whose product the activation is multiplied by; `mlp_keeps`, `norms_keep`: what a layer's MLP and norms
    keep for backward, in intermediate and hidden sizes; `routed`: experts that a token is sent to in each of
    `feed_forward`, and `experts_keep`, what each of them keeps, in hidden sizes; `streams`: residuals of a token
    (hyper-connections), and `mixings`, in how many rounds the weights by which they are mixed are made, or
    `mixing_rank`, the rank of gates that mix them instead; `fed`: layers that add embeddings of `fed_width` values to
    the streams.
    """

    layers: int
    hidden: int
    vocabulary: int
    attention: tuple[HeadShape, ...]
    feed_forward: tuple[int, ...]
    states: StateShape | None = None
    gated: bool = True
    mlp_keeps: int = 4
    norms_keep: int = 8
    routed: tuple[int, ...] = (0,)
    experts_keep: int = EXPERT_KEEPS
    streams: int = 1
    mixings: int = 0
    mixing_rank: int = 0
    fed: int = 0
    fed_width: int = 0

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Reads a transformers configuration, which does not say whether MLPs are gated: they are, in most."""
        text = config.get_text_config()
        sizes, routed = feed_forwards(text)
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            vocabulary=text.vocab_size,
            attention=attention_shapes(text),
            feed_forward=sizes,
            states=state_shape(text),
            routed=routed,
            experts_keep=EXPERT_KEEPS + (getattr(text, "_experts_implementation", None) == "eager"),
            streams=getattr(text, "hc_mult", None) or getattr(text, "hc_count", None) or 1,
            mixings=getattr(text, "hc_sinkhorn_iters", None) or 0,
            mixing_rank=getattr(text, "hc_lowrank", None) or 0,
            fed=len(getattr(text, "ple_layer_ids", None) or ()),
            fed_width=getattr(text, "ple_embed_dim", None) or 0,
        )

    @property
    def query_values(self) -> float:
        """Values of a token's queries, over all layers, by how many tokens each key they meet is made of."""
        return sum(layer.heads * layer.head_dim / layer.rate for layer in self.attention)

    def key_values(self, ranks: int = 1) -> int:
        """Values of a token's keys, over all layers, on the one of `ranks` that has most heads of them."""
        return sum(self.keys_seen(ranks).values())

    def keys_seen(self, ranks: int = 1) -> dict[int | None, int]:
        """The same by the window of the layers that they are of; None: of those without, and of keys made of many
        tokens."""
        found: dict[int | None, int] = {None: 0}
        for layer in self.attention:
            own = -(-layer.key_value_heads // ranks) * layer.head_dim
            found[layer.window] = found.get(layer.window, 0) + own
            found[None] += layer.head_dim // layer.rate if layer.rate > 1 else 0
        return found

    @property
    def state_values(self) -> int:
        """Values of all layers' states after a token, counted in float32, which a piece that others hang below keeps
        once."""
        return self.undealt_values + (self.states.values if self.states is not None else 0)

    @property
    def undealt_values(self) -> int:
        """Those of them that every rank of a group keeps whole."""
        return sum(layer.state_values for layer in self.attention)

    def forward_flops(self, tokens: int, pairs: int, scored: int) -> float:
        """Multiply-adds x 2 of one forward: linear layers, attention, scans (of long pieces), output projection of
        `scored` rows."""
        scans = self.states.scan_flops(tokens) if self.states is not None else 0.0
        rest = 2 * pairs * self.query_values + scored * self.hidden * self.vocabulary
        return tokens * self.linear_flops() + scans + 2.0 * rest

    def linear_flops(self) -> float:
        """FLOPs of the linear layers of one token's forward, output projection aside."""
        weights = sum(layer.weights(self.hidden) for layer in self.attention)
        weights += self.hidden * (2 + self.gated) * sum(self.feed_forward)
        if self.states is not None:
            weights += self.states.linear_weights(self.hidden)
        wide = self.streams * self.hidden
        if self.mixing_rank:
            weights += 2 * self.layers * wide * (2 * self.mixing_rank + self.streams)
        return 2.0 * (weights + self.fed * self.fed_width * (wide + self.hidden))

    def activation_bytes(self, bytes_per_value: int) -> int:
        """Estimated bytes a token keeps alive for backward in a decoder without activation checkpointing.
        Against what autograd really saves (Qwen 2 and 3, Llama, Mistral, Phi-3, Granite): 0-15% too many in float32,
        7% too many to 15% too few in bf16."""
        values = sum(layer.kept_values() for layer in self.attention) + self.mlp_keeps * sum(self.feed_forward)
        values += (self.layers * self.norms_keep + self.experts_keep * sum(self.routed)) * self.hidden
        kept = values * bytes_per_value * self._copies(bytes_per_value)
        if self.states is not None:  # scans keep float32 whatever the layers' dtype is
            states = self.states
            kept += states.layers * (states.kept_values() * bytes_per_value + states.kept_scan_values() * 4)
        streams = self.layers * self._streams_keep(bytes_per_value) + self.fed * self._fed_keep(bytes_per_value)
        return int(kept) + streams

    def checkpoint_share(self) -> float:
        """Part of a token's activations that is alive when its layers are checkpointed: each layer's input, and one
        layer at a time in full."""
        whole = self.activation_bytes(4) / 4
        inputs = (self.layers * self.streams + 2) * self.hidden
        return min(1.0, (inputs + self.largest_layer(4) / 4) / whole)

    def largest_layer(self, bytes_per_value: int) -> int:
        """Estimated bytes a token keeps alive in the layer that keeps most."""
        mixers = [layer.kept_values() * bytes_per_value for layer in self.attention]
        if self.states is not None:
            mixers.append(self.states.kept_values() * bytes_per_value + self.states.kept_scan_values() * 4)
        kept = self.norms_keep + self.experts_keep * max(self.routed)
        rest = (kept * self.hidden + self.mlp_keeps * max(self.feed_forward)) * bytes_per_value
        streams = self._streams_keep(bytes_per_value) + (self._fed_keep(bytes_per_value) if self.fed else 0)
        return int((max(mixers) + rest) * self._copies(bytes_per_value)) + streams

    def _streams_keep(self, bytes_per_value: int) -> int:
        """Bytes that the two hyper-connections of a layer keep, which compute in float32: the streams, with copies
        where they are bf16; where they are mixed, also their norm's result and what each round divides, or the norm's
        steps and gates."""
        if self.streams == 1:
            return 0
        copies = bytes_per_value + 6 * (bytes_per_value < 4) + 4 * (self.mixings > 0)
        if self.mixing_rank:
            copies += 14 if bytes_per_value >= 4 else 6
        rounds = 2 * 4 * self.mixings * self.streams * (self.streams + 1)
        return 2 * (self.streams * self.hidden * copies + rounds)

    def _fed_keep(self, bytes_per_value: int) -> int:
        """Bytes that a layer keeps of embeddings that it adds to the streams: norms of three, a gate, a convolution."""
        return 8 * self.streams * self.hidden * bytes_per_value

    def _copies(self, bytes_per_value: int) -> float:
        """In low precision norms that are written out also save float32 copies."""
        norms = (self.norms_keep - FUSED_NORMS_KEEP) / NORM_KEEPS
        return 1 + 0.075 * norms if bytes_per_value < 4 else 1.0


_MERGED = ("spatial_merge_size", "merge_size", "merge_kernel_size", "downsample_factor")
"""Names by which configurations say how many patches a side a row of features is made of."""


@dataclass(frozen=True)
class TowerShape:
    """The numbers of a vision configuration that costs depend on; `per_row`: patches that make a row of features, and
    `deepstack`: tables of features beside the first."""

    layers: int
    hidden: int
    intermediate: int
    per_row: float
    deepstack: int

    @classmethod
    def of(cls, config: Any) -> TowerShape | None:
        """Reads a transformers configuration; None where there is no tower, or one that is described otherwise."""
        vision = getattr(config, "vision_config", None)
        if vision is None:
            return None
        hidden = getattr(vision, "embed_dim", None) or getattr(vision, "hidden_size", None)
        layers = getattr(vision, "depth", None) or getattr(vision, "num_hidden_layers", None)
        if not (hidden and layers and getattr(vision, "patch_size", None)):
            return None
        named = [getattr(part, name, None) for part in (vision, config) for name in _MERGED]
        side = next((one[0] if isinstance(one, list | tuple) else one for one in named if one), 1)
        side *= getattr(vision, "pooling_kernel_size", 1)
        if getattr(config, "mm_tokens_per_image", None):
            side = vision.image_size // vision.patch_size / config.mm_tokens_per_image**0.5
        side *= getattr(config, "scale_factor", 1) / getattr(config, "downsample_ratio", 1.0)
        return cls(
            layers=layers,
            hidden=hidden,
            intermediate=getattr(vision, "intermediate_size", None) or 4 * hidden,
            per_row=float(side) ** 2,
            deepstack=len(getattr(vision, "deepstack_visual_indexes", None) or ()),
        )

    def patches(self, rows: int) -> int:
        """Of a picture with so many rows of features. Its pixels say less: most processors resize them."""
        return max(1, round(rows * self.per_row))

    def forward_flops(self, rows: int) -> float:
        """Multiply-adds x 2 of one picture's forward, where every patch attends to all of them, as in tiles it need
        not."""
        patches, weights = self.patches(rows), 4 * self.hidden**2 + 2 * self.hidden * self.intermediate
        return 2.0 * self.layers * patches * (weights + 2 * patches * self.hidden)

    def graph_bytes(self, rows: int, bytes_per_value: int) -> int:
        """Estimated bytes that one picture's forward keeps for backward."""
        values = self.layers * (10 * self.hidden + 3 * self.intermediate)
        return self.patches(rows) * values * bytes_per_value


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
