"""The tables of model families: supported ones with what is said of them, others that are right, and those refused.

Data alone; what is checked of them is in the package itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING

from tests.app.tree.cases import VOCABULARY
from tests.app.tree.states import hybrids

FORWARD, BACKWARD = 1e-5, 2e-6
"""Tolerances in float32: log-probabilities, and gradients relative to the largest."""
DELTA_RULE = (5e-5, 5e-5)
"""Both for layers with a delta rule, whose triangular systems the dense model solves no better in float32; more where
the dense model itself is further than that from the truth."""
UNSCALED = (2e-5, 2e-5)
"""Both where queries and keys have norms and scores no scale (Gemma 4): softmaxes of random weights are nearly one
key's, in which rounding grows."""

EXPERTS: dict[str, Any] = dict(
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
)
LATENT: dict[str, Any] = dict(
    num_key_value_heads=4,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
)

INDEXED: dict[str, Any] = dict(EXPERTS, **LATENT, head_dim=4, index_topk=5, index_n_heads=16, index_head_dim=8)
"""Scores of fewer heads are equal now and then, all zero, and of equals any is chosen."""


POOLED: dict[str, Any] = {
    **INDEXED,
    **dict(index_topk=4, index_kpool=2, qk_rope_head_dim=0, linear_num_heads=2, linear_head_dim=6, hc_mult=2),
    **dict(num_hidden_layers=4, mlp_layer_types=["dense", "sparse", "sparse", "dense"]),
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
    "indexer_types": ["full", "full", "shared", "full"],
    "vision_config": {
        **dict(depth=1, hidden_size=16, num_heads=2, out_hidden_size=32, intermediate_size=16, patch_size=4),
        "projection_intermediate_size": 16,  # else a million parameters through which no text goes
    },
}
"""Layers that scan around two that choose, the second by the first's choice."""


SECTIONS: dict[str, Any] = dict(
    num_local_experts=4,
    num_experts_per_tok=2,
    interleave_moe_layer_step=2,
    intermediate_size_mlp=32,
    head_dim=8,
    attention_chunk_size=4,
    no_rope_layers=[1, 0],
    floor_scale=3,
    attn_scale=0.7,
)
"""Positions within these sections and beyond, and queries scaled by several steps."""


BLOCKS: dict[str, Any] = dict(
    EXPERTS,
    num_hidden_layers=3,
    layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    mlp_layer_types=["dense", "sparse", "dense"],
    head_dim=8,
    rotary_dim=8,
    index_n_heads=2,
    index_head_dim=8,
    index_block_size=2,
    index_topk_blocks=2,
    dense_intermediate_size=24,
    shared_intermediate_size=8,
)


@dataclass(frozen=True)
class Family:
    """`type`: transformers' model type; `options`: of its configuration; `note`: for readers of the matrix;
    `tolerances`: in float32; `models`: seeds in low precision; `adapted`: modules that
    LoRA is put on (PEFT refuses the output projections of Mamba layers, and takes Llama 4's routers for plain ones);
    `refused`: columns that are."""

    type: str
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    tolerances: tuple[float, float] = (FORWARD, BACKWARD)
    models: int = 4
    adapted: str | tuple[str, ...] = "all-linear"
    refused: tuple[str, ...] = ()


GATED_DELTA = "gated delta rule between layers of attention; text models (`...ForCausalLM`)"
MAMBA_ADAPTED = ("in_proj", "q_proj", "v_proj", "up_proj", "input_linear")
SHORT = "short convolutions between layers of attention"
ALTERNATING: dict[str, Any] = dict(head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
WIDER: dict[str, Any] = dict(
    num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
    sliding_window=4,
    head_dim=4,
    global_head_dim=8,
    hidden_size_per_layer_input=0,
    final_logit_softcapping=3.0,
)
"""Of Gemma 4: layers without a window have wider heads."""
SUPPORTED: dict[str, Family] = {
    "Llama": Family("llama"),
    "Qwen2": Family("qwen2"),
    "Qwen2, sliding window": Family("qwen2", dict(use_sliding_window=True, max_window_layers=1, sliding_window=4)),
    "Qwen3": Family("qwen3"),
    "Qwen3-MoE": Family("qwen3_moe", EXPERTS),
    "Mistral": Family("mistral", dict(sliding_window=None)),
    "Mistral, sliding window": Family("mistral", dict(sliding_window=4)),
    "Mixtral": Family("mixtral", EXPERTS),
    "Phi-3": Family("phi3", dict(pad_token_id=0)),
    "Phi-3, sliding window": Family("phi3", dict(pad_token_id=0, sliding_window=4)),
    "OLMo-2": Family("olmo2"),
    "Granite": Family("granite", dict(logits_scaling=2.0, attention_multiplier=0.3, residual_multiplier=0.5)),
    "SmolLM3": Family("smollm3", dict(no_rope_layers=[1, 0])),
    "GLM-4": Family("glm4", dict(head_dim=8)),
    "Gemma 2": Family(
        "gemma2",
        {**ALTERNATING, "attn_implementation": "eager", "attn_logit_softcapping": 2.0},
        "soft-capped scores, every other layer windowed; not with `flash`",
    ),
    "Gemma 3": Family("gemma3_text", ALTERNATING, "text models; layers with and without a window"),
    "Gemma 3n": Family(
        "gemma3n_text",
        dict(
            num_hidden_layers=4,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=4,
            head_dim=8,
            intermediate_size=[24, 32, 24, 24],
            activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY,
        ),
        "text models (`...ForCausalLM`); the last layers attend to keys of others, windowed or not",
    ),
    "Gemma 4": Family(
        "gemma4_text",
        dict(WIDER, attention_k_eq_v=True, num_global_key_value_heads=1),
        "text models (`...ForCausalLM`), and whole ones on text; other heads in layers without a window, whose values"
        " are made of their keys",
        UNSCALED,
    ),
    "Gemma 4, shared keys": Family(
        "gemma4_text",
        dict(
            WIDER,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY,
        ),
        "as E2B and E4B: the last layers attend to keys of others; inputs of each layer's own",
        UNSCALED,
        12,
    ),
    "Gemma 4, experts": Family(
        "gemma4_text",
        dict(
            WIDER,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=8,
        ),
        "as 26B-A4B: experts beside the MLP of every layer",
        UNSCALED,
    ),
    "GPT-OSS": Family(
        "gpt_oss",
        {**EXPERTS, **ALTERNATING, "attn_implementation": "eager"},
        "attention sinks, every other layer windowed",
    ),
    "Llama 4": Family(
        "llama4_text",
        SECTIONS,
        "text models (`Llama4ForCausalLM`); tokens see those of their own section of positions, and"
        " in every fourth layer all, by queries scaled by position; transformers runs every expert on every token",
        adapted=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
    "Cohere": Family("cohere", dict(logit_scale=0.5)),
    "DeepSeek-V3": Family("deepseek_v3", {**EXPERTS, **LATENT}, "latent attention, values narrower than keys"),
    "DeepSeek-V3.2": Family("deepseek_v32", INDEXED, "attends to the tokens an indexer chose, which is not trained"),
    "GLM-5": Family(
        "glm_moe_dsa",
        dict(INDEXED, num_hidden_layers=3, indexer_types=["full", "shared", "full"]),
        "as DeepSeek-V3.2; layers that share the choice of others",
    ),
    "GLM-5.3": Family(
        "glm5_next",
        POOLED,
        "as GLM-5.3-Flash: chooses pools of tokens in a row; delta rule with a decay a channel; 4 bit would"
        " round what its indexer is given",
        DELTA_RULE,
        12,
        refused=("4 bit",),
    ),
    "MiniMax-M3": Family(
        "minimax_m3_vl_text",
        {
            **BLOCKS,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        "attends to blocks of positions an indexer chose, each head of keys to others",
        (FORWARD, FORWARD),  # in float64 it is exact; in float32 it is also off where every layer attends to all
    ),
    "DeepSeek-V4": Family(
        "deepseek_v4",
        hybrids.OPTIONS["deepseek_v4"],
        "attends to a window, and beyond it to keys made of many tokens each, all or those an indexer chose",
        adapted=("q_a_proj", "q_b_proj", "kv_proj", "gate_proj", "o_b_proj", "up_proj", "down_proj"),
    ),
    "GPT-NeoX": Family("gpt_neox"),
    "StarCoder2": Family("starcoder2", dict(sliding_window=4)),
    "Phi": Family("phi"),
    "Qwen3.5": Family("qwen3_5_text", hybrids.OPTIONS["qwen3_5_text"], GATED_DELTA, DELTA_RULE, 12),
    "Qwen3.5-MoE": Family("qwen3_5_moe_text", hybrids.OPTIONS["qwen3_5_moe_text"], GATED_DELTA, DELTA_RULE, 12),
    "Qwen3-Next": Family("qwen3_next", hybrids.OPTIONS["qwen3_next"], GATED_DELTA, DELTA_RULE, 12),
    "OLMo-Hybrid": Family("olmo_hybrid", hybrids.OPTIONS["olmo_hybrid"], GATED_DELTA, DELTA_RULE, 12),
    "Qwen 4 (experimental)": Family(
        "qwen4_exp_text",
        hybrids.OPTIONS["qwen4_exp_text"],
        "gated delta rule; attends to groups of tokens an indexer chose; embeddings of the last tokens together",
        DELTA_RULE,
        12,
    ),
    "LFM2": Family("lfm2", hybrids.OPTIONS["lfm2"], f"{SHORT}; transformers 5.22 or newer"),
    "LFM3": Family("lfm3", hybrids.OPTIONS["lfm3"], f"{SHORT}; transformers 5.23 or newer"),
    "Nemotron-H": Family(
        "nemotron_h",
        hybrids.OPTIONS["nemotron_h"],
        "Mamba-2; layers of experts or an MLP alone; never tied",
        adapted=MAMBA_ADAPTED,
    ),
    "Granite 4": Family(
        "granitemoehybrid",
        hybrids.OPTIONS["granitemoehybrid"],
        "Mamba-2 between layers of attention",
        models=12,
        adapted=MAMBA_ADAPTED,
    ),
    "Falcon-H1": Family(
        "falcon_h1", hybrids.OPTIONS["falcon_h1"], "Mamba-2 and attention in every layer", adapted=MAMBA_ADAPTED
    ),
    "Bamba": Family("bamba", hybrids.OPTIONS["bamba"], "Mamba-2 between layers of attention", adapted=MAMBA_ADAPTED),
    "Kimi Linear": Family(
        "kimi_linear",
        hybrids.OPTIONS["kimi_linear"],
        "delta rule with a decay a channel; latent attention; never tied",
        DELTA_RULE,
        12,
    ),
    "ZAYA": Family(
        "zaya",
        hybrids.OPTIONS["zaya"],
        "convolves queries and keys, half of each value is the last token's; recorded experts are refused",
    ),
    "Ling 3": Family(
        "bailing_hybrid",
        hybrids.OPTIONS["bailing_hybrid"],
        "as Ling-3.0-Flash: delta rule with a decay a channel; latent attention",
        DELTA_RULE,
        12,
    ),
}
_PLAIN = """apertus apertus1p5_text arcee aria_text beam bitnet cohere2 cohere2_moe ctrl ernie4_5 exaone4 flex_olmo
gemma glm gpt2 gpt_bigcode granitemoe granitemoeshared hyperclovax jais2 jetmoe ministral3 nanochat olmo olmo3 olmoe
opt persimmon phimoe seed_oss"""
_ROUTED = "afmoe ernie4_5_moe exaone_moe glm4_moe hy_v3 kolibri1 laguna mellum minimax_m2 qwen2_moe solar_open"
"""Whose configurations have so many experts, and so wide, that a model of two layers would have millions of
parameters."""
_SIZED = "hunyuan_v1_dense hunyuan_v1_moe ministral"
_LATENT = "axk1 deepseek_v2 glm4_moe_lite minicpm3 youtu"
_EAGER = "flint granite_swa granitemoe_swa vaultgemma"
OTHERS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in _PLAIN.split()},
    **{kind: {"head_dim": 8} for kind in _SIZED.split()},
    **{
        kind: {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "shared_expert_intermediate_size": 8}
        for kind in _ROUTED.split()
    },
    **{kind: {**EXPERTS, **LATENT} for kind in _LATENT.split()},
    **{kind: {"attn_implementation": "eager"} for kind in _EAGER.split()},
    "axk2": INDEXED,
    "codegen": {"rotary_dim": 4},
    "cwm": {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
    "dots1": EXPERTS,
    "dots3_note_text": {
        **INDEXED,
        **dict(layer_types=["indexed_attention", "sliding_attention"], sliding_window=4),
        **dict(swa_num_attention_heads=2, swa_num_key_value_heads=2, swa_q_lora_rank=6, swa_kv_lora_rank=6),
        **dict(swa_head_dim=10, swa_qk_nope_head_dim=6, swa_v_head_dim=6, shared_experts_intermediate_size=8),
    },
    "gemma4_unified_text": {"head_dim": 8, "global_head_dim": 8},
    "gptj": {"rotary_dim": 4},
    "helium": {"head_dim": 4},
    "hy_v4": {**INDEXED, "attn_implementation": "eager"},
    "lfm2_moe": {**EXPERTS, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {
        **EXPERTS,
        **LATENT,
        "head_dim": 4,
        "num_layers": 1,
        "zero_expert_num": 1,
        "ffn_hidden_size": 24,
        "expert_ffn_hidden_size": 8,
        "moe_topk": 2,
    },
    "mimo_v2_flash": {**EXPERTS, "attn_implementation": "eager"},
}
"""Types beside those of `SUPPORTED` that are right as they are, and options of their configurations."""
_DISTANCES: dict[str, Any] = dict(
    attn_implementation="eager",
    layer_types=["hybrid_sliding", "hybrid"],
    sliding_window_size=4,
    head_dim=8,
    swa_head_dim=8,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    unpadded_vocab_size=VOCABULARY,
)
REFUSED: dict[str, Family] = {
    "Mamba": Family("mamba", dict(attn_implementation="eager"), "state-space layers"),
    "Jamba": Family("jamba", dict(attn_layer_offset=1, attn_layer_period=2, num_experts=2), "state-space layers"),
    "Mamba 2": Family(
        "mamba2", dict(attn_implementation="eager", num_heads=4, head_dim=8, state_size=8, n_groups=1), "no attention"
    ),
    "Zamba 2": Family(
        "zamba2",
        dict(
            num_hidden_layers=3,
            layers_block_type=["mamba", "hybrid", "mamba"],
            mamba_d_state=6,
            n_mamba_heads=4,
            mamba_headdim=16,
            mamba_ngroups=1,
            num_mem_blocks=1,
            chunk_size=16,
            use_shared_attention_adapter=False,
            attention_head_dim=16,
            attention_hidden_size=64,
        ),
        "one attention block shared by layers",
    ),
    "MiniMax": Family(
        "minimax",
        dict(EXPERTS, layer_types=["linear_attention", "full_attention"], head_dim=8),
        "states in line",
    ),
    "ModernBERT": Family(
        "modernbert-decoder",
        dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
        "a head of several layers",
    ),
    "Inkling": Family("inkling_text", _DISTANCES, "a trained bias by distance"),
    "Inkling 2": Family("inkling2_text", _DISTANCES, "a trained bias by distance"),
    "DiffLlama": Family("diffllama", {}, "two attentions a layer"),
    "Doge": Family("doge", {}, "masks of its own"),
    "StableLM": Family("stablelm", {}, "attention outside transformers' interface"),
    "Falcon": Family("falcon", {}, "attention outside transformers' interface"),
    "BLOOM": Family("bloom", dict(attn_implementation="eager"), "attention outside transformers' interface"),
}


def other(kind: str) -> Family:
    """One of `OTHERS`, with layers of both kinds where it has some with a window. Gradients to 1e-5: of one model of a
    type a norm may be ill-conditioned, and there is one of each."""
    default, options = CONFIG_MAPPING[kind](), OTHERS[kind]
    if "sliding_attention" in (getattr(default, "layer_types", None) or ()):
        options = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], **options}
    return Family(kind, options, tolerances=(FORWARD, FORWARD))
