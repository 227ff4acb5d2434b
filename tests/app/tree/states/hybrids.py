"""Tiny hybrid models: layers that carry a state beside layers that attend, and both with float64 all the way.

transformers computes scans, norms and routers in float32 whatever the model's dtype is. `make_exact` builds the same
model from the same file with float64 read for float32, so that rounding cannot hide a mistake; everything else of the
file, names included, is as it was.
"""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tests.app.tree import models
from tests.helpers.selection import some

DELTA: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    num_hidden_layers=3,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    head_dim=8,
)
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8
)
MAMBA: dict[str, Any] = dict(mamba_n_heads=4, mamba_d_head=8, mamba_d_state=6, mamba_n_groups=1, mamba_chunk_size=16)
_LATENT: dict[str, Any] = dict(
    num_hidden_layers=3,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    num_key_value_heads=4,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
)
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": dict(DELTA, tie_word_embeddings=False),
    "qwen3_5_moe_text": dict(DELTA, **EXPERTS),
    "qwen3_next": dict(DELTA, **EXPERTS),
    "olmo_hybrid": dict(DELTA, linear_num_value_heads=2),
    "lfm2": dict(num_hidden_layers=3, full_attn_idxs=[1]),
    "lfm3": dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], head_dim=8, conv_L_cache=5),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "full_attention", "linear_attention", "moe", "mlp"],
        num_hidden_layers=5,
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=6,
        n_groups=2,
        chunk_size=16,
        head_dim=8,
        n_routed_experts=4,
        moe_intermediate_size=8,
        moe_shared_expert_intermediate_size=8,
    ),
    "granitemoehybrid": dict(
        MAMBA,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=8,
    ),
    "falcon_h1": dict(MAMBA, mamba_d_ssm=32, head_dim=8, lm_head_multiplier=0.5),
    "bamba": dict(MAMBA, num_hidden_layers=3, attn_layer_indices=[1]),
    "qwen4_exp_text": dict(
        EXPERTS,
        num_hidden_layers=3,
        layer_types=["linear_attention", "indexed_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        head_dim=8,
        hc_count=2,
        hc_lowrank=4,
        ple_layer_ids=[1, 3],
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=2,
        split_ngram_parts=2,
        eos_token_id=1,
        indexer_n_heads=8,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=4,
        indexer_compress_ratio=2,
    ),
    "kimi_linear": dict(
        _LATENT, linear_num_heads=2, linear_head_dim=6, num_experts=4, num_experts_per_token=2, moe_intermediate_size=8
    ),
    "bailing_hybrid": dict(
        _LATENT,
        head_dim=6,
        q_lora_rank=8,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    ),
    "zaya": dict(
        num_hidden_layers=3,
        layer_types=["hybrid", "hybrid_sliding", "hybrid"],
        sliding_window=4,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        router_hidden_size=8,
    ),
    "deepseek_v4": dict(
        num_hidden_layers=3,
        layer_types=["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates={"heavily_compressed_attention": 3, "compressed_sparse_attention": 2},
        sliding_window=3,
        num_key_value_heads=1,
        head_dim=8,
        partial_rotary_factor=0.5,
        q_lora_rank=8,
        o_groups=2,
        o_lora_rank=4,
        index_n_heads=16,
        index_head_dim=8,
        index_topk=2,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        attn_implementation="eager",
    ),
}
_FILE = re.compile(r"transformers\.models\.\w+\.modeling_\w+(?<!_float64)")  # of a family, and no copy
QUICK = some(OPTIONS, ("qwen3_5_text", "nemotron_h"))
"""A delta rule and a state space; what is tested of the other families is slow."""


def make(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A fresh model of transformers' own class."""
    return models.make(name, dtype, seed, **{**OPTIONS[name], **overrides})


def make_exact(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The same weights, in float64 throughout."""
    return exact(make(name, torch.float64, seed, **overrides))


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """A model of transformers' own class with its weights, by its own code in float64 throughout."""
    model.config._experts_implementation = "eager"  # grouped products take no float64
    made: PreTrainedModel = getattr(_in_float64(type(model).__module__), type(model).__name__)(model.config)
    made.to(torch.float64).load_state_dict(model.state_dict())
    return made.train()


@cache
def shared_exact(name: str) -> tuple[PreTrainedModel, nn.Linear]:
    """One exact model and value head a family, for tests that leave them as they found them."""
    return make_exact(name), models.value_head(torch.float64)


@cache
def _in_float64(name: str) -> ModuleType:
    original = importlib.import_module(name)
    assert original.__file__ is not None
    with open(original.__file__) as file:
        source = file.read()
    for before, after in (
        ("torch.float32", "torch.float64"),
        ("torch.float)", "torch.float64)"),
        ("torch.float,", "torch.float64,"),
        (".float()", ".double()"),
    ):
        source = source.replace(before, after)
    copy = ModuleType(name + "_float64")
    copy.__dict__.update(__package__=original.__package__, __file__=original.__file__)
    sys.modules[copy.__name__] = copy
    exec(compile(source, original.__file__, "exec"), copy.__dict__)
    for found, kind in list(vars(copy).items()):  # layers that some releases take from another family's file
        if isinstance(kind, type) and issubclass(kind, nn.Module) and _FILE.fullmatch(kind.__module__):
            setattr(copy, found, getattr(_in_float64(kind.__module__), kind.__name__))
    return copy
