"""What layers that carry a state cost, by a model's configuration: values, FLOPs, and what they keep for backward.

Promises: pure arithmetic on names that transformers' families share; a configuration without such layers gives None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.tree.planning.layer_shapes import STATEFUL, layer_kinds

_BLOCK = 64
"""Rows of a scan's block, where sequences are long."""


@dataclass(frozen=True)
class StateShape:
    """The layers of one model that carry a state, which are all alike.

    Attributes:
        layers: how many.
        channels, reach: of the convolution over time, and how many tokens it looks back.
        gates: values a token that the layer projects beside the convolution's channels, or multiplies its output with.
        heads, key_dim, value_dim: of the scan; 0 heads: a convolution alone.
        erases: whether a token takes back what the state held (a delta rule).
        lookback: values of the last tokens that other parts of the model keep.
    """

    layers: int
    channels: int
    reach: int
    gates: int
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    erases: bool = False
    lookback: int = 0

    @property
    def values(self) -> int:
        """Values of all layers' states after a token: scans' states and convolutions' tails."""
        scans = self.layers * self.heads * self.key_dim * self.value_dim
        return scans + self.layers * self.reach * self.channels + self.lookback

    @property
    def inner(self) -> int:
        """Values a token that a layer's output projection takes."""
        return self.heads * self.value_dim or self.channels

    def linear_weights(self, hidden: int) -> int:
        """Weights of all layers' projections."""
        return self.layers * hidden * (self.channels + self.gates + self.inner)

    def scan_flops(self, rows: int, block: int = _BLOCK) -> float:
        """FLOPs of all layers' scans and convolutions forward over so many rows of blocks."""
        k, v, met = self.key_dim, self.value_dim, 2 if self.erases else 1
        scan = met * block * k + block * v + 2 * k * v
        if self.erases:
            scan += block * (k + v) // 2 + k * v
        return 2.0 * rows * self.layers * (self.heads * scan + (self.reach + 1) * self.channels)

    def kept_values(self) -> int:
        """Values in the model's dtype that a token keeps for backward in one layer, beside what every layer keeps."""
        return 3 * self.channels + (4 * self.gates if self.heads else 0) + self.inner

    def kept_scan_values(self, block: int = _BLOCK) -> int:
        """Values in float32 that a row of a scan keeps: inputs, what it writes and erases, its block's start."""
        if not self.heads:
            return 0
        k, v = self.key_dim, self.value_dim
        return self.heads * (2 * k + 2 * v + self.erases * k + (k * v // block if k <= block else 0))

    def scan_buffer_values(self, block: int = _BLOCK) -> int:
        """Values in float32 that a row takes while one layer's scan runs backward."""
        k, v, readers = self.key_dim, self.value_dim, 2 if self.erases else 1
        of_rows = (3 + 2 * readers) * k + (4 + readers) * v + (1 + 2 * readers) * block
        return self.heads * (of_rows + 3 * k * v // block)


def state_shape(text: Any) -> StateShape | None:
    """Reads a transformers configuration, from what families call their sizes."""

    def size(*names: str) -> int:
        return next((value for name in names if isinstance(value := getattr(text, name, None), int)), 0)

    layers = sum(kind in STATEFUL or kind.startswith("hybrid") for kind in layer_kinds(text))
    if not layers or getattr(text, "cca_time0", None):  # which project and convolve at once, and attend
        return None
    key_dim = size("linear_key_head_dim", "linear_head_dim")
    keys = size("linear_num_key_heads", "linear_num_heads") * key_dim
    if keys:
        heads, width = (
            size("linear_num_value_heads", "linear_num_heads"),
            size("linear_value_head_dim", "linear_head_dim"),
        )
        reach, grams = size("linear_conv_kernel_dim") - 1, size("ngram_size")
        tails = (size("ple_conv_kernel_size") - 1) * grams * size("hc_count") * text.hidden_size + grams - 1
        lookback = len(getattr(text, "ple_layer_ids", None) or ()) * tails
        return StateShape(layers, 2 * keys + heads * width, reach, heads * width, heads, key_dim, width, True, lookback)
    heads, width = size("mamba_n_heads", "mamba_num_heads"), size("mamba_d_head", "mamba_head_dim")
    if heads:
        state, groups = size("mamba_d_state", "ssm_state_size"), size("mamba_n_groups", "n_groups")
        channels, reach = heads * width + 2 * groups * state, size("mamba_d_conv", "conv_kernel") - 1
        return StateShape(layers, channels, reach, heads * width, heads, state, width)
    return StateShape(layers, text.hidden_size, max(0, size("conv_L_cache") - 1), 2 * text.hidden_size)
