"""Layers whose heads differ in width and number (Gemma 4), or from what their configuration calls them (latent
attention), and experts: exact, and counted by what each of them is."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from app.tree import PrefixTree, TreeEngine
from app.tree.memory import pass_memory, token_bytes
from app.tree.model.shape import shape_of
from tests.app.tree import models
from tests.app.tree.cases import Case, cases
from tests.app.tree.engine import families
from tests.app.tree.engine.test_memory import Meter
from tests.app.tree.engine.test_parity import EXAMPLES
from tests.app.tree.losses import KINDS
from tests.app.tree.parity import assert_backward, assert_forward, masked_block
from tests.app.tree.states import hybrids

ROWS = [row for row in families.SUPPORTED if row.startswith("Gemma 4")]
WIDE: dict[str, Any] = dict(hidden_size=64, intermediate_size=192, head_dim=16, global_head_dim=32)


@cache
def exact(row: str) -> PreTrainedModel:
    return hybrids.exact(families.build(families.SUPPORTED[row], torch.float64))


@pytest.mark.parametrize("row", ROWS)
@settings(max_examples=EXAMPLES // 6)
@given(case=cases(), kind=st.sampled_from(sorted(KINDS)), block=st.sampled_from([1, 3, 256]), batched=st.booleans())
def test_parity_in_float64(row: str, case: Case, kind: str, block: int, batched: bool) -> None:
    model, head = exact(row), models.value_head(torch.float64)
    with masked_block(block):
        assert_forward(model, head, case, ("logprobs", "entropy", "values"), 1e-9)
        assert_backward(model, head, case, kind, ("logprobs", "values"), 1e-9, batched)


@pytest.mark.parametrize("row", ROWS)
def test_each_layer_is_counted_by_its_own_sizes(row: str) -> None:
    model = families.build(families.SUPPORTED[row])
    shape, layers = shape_of(model), [layer.self_attn for layer in model.model.layers]
    assert shape.query_values == sum(layer.q_proj.out_features for layer in layers)
    keys = [getattr(layer, "k_proj", None) for layer in layers]
    shared = sum(layer.head_dim * model.config.per_layer_config[0].num_key_value_heads for layer in layers[2:])
    assert shape.key_values() == sum(k.out_features for k in keys if k) + shared * (None in keys)
    assert shape.key_values(2) == shape.key_values() / 2 + (2 * 8 / 2 if layers[1].num_key_value_groups == 4 else 0)
    experts = 2 * 8 if "experts" in row else 0
    assert shape.feed_forward == tuple(layer.mlp.gate_proj.out_features + experts for layer in model.model.layers)
    sequences = [np.arange(40) % 31, np.arange(30) % 31]
    path = [pass_memory(model, 1, 1, PrefixTree.build([one])).path_cache for one in sequences]
    assert path[0] - path[1] == 2 * shape.key_values() * (10 * (4 + 4) + 10 * 4)


@pytest.mark.parametrize("row", [*ROWS, "Gemma 2", "Gemma 3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bytes_are_what_autograd_saves(row: str, dtype: torch.dtype) -> None:
    """Within a fifth: these have four norms a layer and more, each written out."""
    sizes = WIDE if row in ROWS else {name: size for name, size in WIDE.items() if name != "global_head_dim"}
    model = families.build(families.SUPPORTED[row], dtype, **sizes)
    tokens, meter = np.random.default_rng(0).integers(0, 31, 60), Meter(model)
    with meter.measuring():
        TreeEngine(model, 60, 60).backward(PrefixTree.build([tokens]), lambda out, i: out.logprobs.sum())
    assert token_bytes(model) * 59 == pytest.approx(meter.peak, rel=0.2)


LATENT = {
    **dict(hidden_size=64, intermediate_size=192, moe_intermediate_size=48, num_attention_heads=4),
    **dict(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, head_dim=8),
}
LATENT_TYPES = {
    "deepseek_v3": {**families.EXPERTS, **families.LATENT},
    "deepseek_v32": {**families.INDEXED, "index_topk": 64},
    "glm4_moe_lite": {**families.EXPERTS, **families.LATENT},
    "youtu": families.LATENT,
}


@pytest.mark.parametrize("kind", LATENT_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_attention_is_counted_by_the_heads_it_computes_with(kind: str, dtype: torch.dtype) -> None:
    """As above; elements of matrices exactly, and keys of the path, which are those of every head."""
    model = models.make(kind, dtype, **{**LATENT_TYPES[kind], **LATENT}).eval()
    tokens, meter = np.random.default_rng(0).integers(0, 31, 60), Meter(model)
    with meter.measuring():
        TreeEngine(model, 60, 60, self_check=False).backward(
            PrefixTree.build([tokens]), lambda out, i: out.logprobs.sum()
        )
    assert token_bytes(model) * 59 == pytest.approx(meter.peak, rel=0.1)
    shape = shape_of(model)
    for counted, layer in zip(shape.attention, model.model.layers, strict=True):
        linear = {name: m for name, m in layer.self_attn.named_modules() if isinstance(m, torch.nn.Linear)}
        assert counted.weights(64) == sum(m.weight.numel() for n, m in linear.items() if "indexer" not in n)
        assert (counted.heads, counted.key_value_heads, counted.head_dim) == (4, 4, 24)
    experts = kind != "youtu"
    assert shape.feed_forward == (192, (2 + 1) * 48 if experts else 192)  # the first layer has none


STREAMS = {
    "glm5_next": {**families.POOLED, "linear_head_dim": 16, "linear_num_heads": 4, "qk_rope_head_dim": 0},
    "hy_v4": {**families.INDEXED, "qk_rope_head_dim": 8, "attn_implementation": "eager"},
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "streams"), [(64, 4), (160, 2)])
def test_streams_of_hyper_connections_are_counted(kind: str, dtype: torch.dtype, hidden: int, streams: int) -> None:
    """Within a fifth, the rest being gates and indexers; without them it is a quarter of the truth to two thirds."""
    options = {**LATENT, **STREAMS[kind], "hidden_size": hidden, "hc_mult": streams, "index_topk": 64}
    model = models.make(kind, dtype, **options).eval()
    tokens, meter = np.random.default_rng(0).integers(0, 31, 60), Meter(model)
    with meter.measuring():
        TreeEngine(model, 60, 60, self_check=False).backward(
            PrefixTree.build([tokens]), lambda out, i: out.logprobs.sum()
        )
    assert token_bytes(model) * 59 == pytest.approx(meter.peak, rel=0.2)


MIXTURES: dict[str, dict[str, int]] = {
    "qwen3_moe": dict(num_experts=8, moe_intermediate_size=48),
    "glm4_moe": dict(n_routed_experts=8, moe_intermediate_size=48, n_shared_experts=1, first_k_dense_replace=1),
    "mixtral": dict(num_local_experts=8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_keep_what_goes_in_and_what_comes_out(kind: str, experts: str, dtype: torch.dtype) -> None:
    """Each that a token is sent to: with many of them, and narrow, more than what is between."""
    options = dict(num_experts_per_tok=4, hidden_size=64, intermediate_size=48, head_dim=16)
    model = models.make(kind, dtype, **options, **MIXTURES[kind], experts_implementation=experts).eval()
    tokens, meter = np.random.default_rng(0).integers(0, 31, 60), Meter(model)
    with meter.measuring():
        TreeEngine(model, 60, 60, self_check=False).backward(
            PrefixTree.build([tokens]), lambda out, i: out.logprobs.sum()
        )
    assert token_bytes(model) * 59 == pytest.approx(meter.peak, rel=0.15)
