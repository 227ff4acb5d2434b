"""A model's configuration as it stands on the hub, which is how inference servers know it.

Promises: what transformers renamed or left out on reading is put back, so that servers, whose transformers is another,
see the layers that are there; transformers reads the result as what it wrote. An order of layers that a server's class
cannot express, and a model that it reads otherwise, are refused where files are for servers, for they would build
another model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datamodules.inference.export import ExportError

_LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}
_RENAMED = {"nemotron_h": ("layers_block_type", "mtp_layers_block_type"), "granitemoehybrid": ("layer_types",)}
"""Where configurations list layers, and should by the second of each pair in `_LAYERS`; transformers reads both."""
_EVERY_NTH = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def as_on_the_hub(fields: dict[str, Any]) -> dict[str, Any]:
    """Of a configuration that transformers wrote (`config.json`), what else a server needs, and in its words.

    Raises:
        ExportError: layers in an order that servers cannot be told, and what they would read as another model.
    """
    kind = fields.get("model_type", "")
    if kind == "llama4_text":
        raise ExportError(
            "weight export: SGLang (0.5.21) rotates keys of a Llama4ForCausalLM otherwise than it was trained to, and"
            " leaves out its experts; generate with the embedded engine"
        )
    found: dict[str, Any] = {}
    for name in _RENAMED.get(kind, ()):
        if fields.get(name):
            found[name] = [_LAYERS.get(layer, layer) for layer in fields[name]]
    layers = fields.get("layer_types") or []
    attending = [number for number, layer in enumerate(layers, 1) if layer == "full_attention"]
    if kind in _EVERY_NTH:
        every = attending[0] if attending else len(layers) + 1
        if attending != list(range(every, len(layers) + 1, every)):
            raise ExportError(
                f"weight export: layers {attending} of {len(layers)} attend (layer_types), and servers know a {kind}"
                " model by every how many layers one does; choose such an order, or the embedded engine"
            )
        found["full_attention_interval"] = every
    if kind == "kimi_linear":
        mixtures = [layer == "sparse" for layer in fields["mlp_layer_types"]]
        if mixtures != sorted(mixtures):
            raise ExportError(
                f"weight export: a layer without experts follows one with them (mlp_layer_types), and servers know a"
                f" {kind} model by how many come first; choose such an order, or the embedded engine"
            )
        found["first_k_dense_replace"] = mixtures.count(False)
        found["linear_attn_config"] = {
            "full_attn_layers": attending,
            "kda_layers": [number for number in range(1, len(layers) + 1) if number not in attending],
            "num_heads": fields["linear_num_heads"],
            "head_dim": fields["linear_head_dim"],
            "short_conv_kernel_size": fields["linear_conv_kernel_dim"],
        }
    if kind == "deepseek_v4":
        hashed = [layer == "hash_moe" for layer in fields["mlp_layer_types"]]
        if hashed != sorted(hashed, reverse=True):
            raise ExportError(
                "weight export: a layer whose tokens choose experts by their ids follows one with a router"
                f" (mlp_layer_types), and servers know a {kind} model by how many come first; choose such an order, or"
                " the embedded engine"
            )
        found["num_hash_layers"] = sum(hashed)
        found["compress_ratios"] = [fields["compress_rates"].get(layer, 0) for layer in layers]
        beyond = fields["rope_parameters"]["compress"]
        if beyond["rope_type"] != "default":
            found["rope_scaling"] = {"type": beyond["rope_type"], **beyond}
    if kind.startswith("gemma4") and "per_layer_config" in fields:  # layers of a kind are alike
        own = {int(layer): values for layer, values in fields["per_layer_config"].items()}.get(attending[0] - 1, {})
        found["global_head_dim"] = own.get("head_dim", fields["head_dim"])
        found["num_global_key_value_heads"] = own.get("num_key_value_heads", fields["num_key_value_heads"])
    if isinstance(text := fields.get("text_config"), dict):  # of a model that also sees
        found["text_config"] = text | as_on_the_hub(text)
    return found


def put_back(directory: Path) -> None:
    """Rewrites the `config.json` of a directory that transformers wrote, as servers read it.

    Raises:
        ExportError: as `as_on_the_hub`.
    """
    file = directory / "config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | as_on_the_hub(written), indent=2, sort_keys=True) + "\n")
