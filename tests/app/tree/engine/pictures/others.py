"""Types beside those of `vision.FAMILIES` that are right with pictures as they are: tiny models of each, made of its
default configuration with every size cut down.

Promises: `vision_of(kind)` is as `vision.make` gives one; a picture has the rows that the untouched tower makes.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from app.tree import refuse_pictures
from tests.app.tree import models
from tests.app.tree.engine import families as text
from tests.app.tree.engine.pictures.vision import END, IMAGE, START, VIDEO, VOCABULARY, Pixels, Vision
from tests.app.tree.states import hybrids

_TEXT: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_num_experts=4,
    moe_intermediate_size=8,
    n_shared_experts=1,
    shared_expert_intermediate_size=8,
    sliding_window=4,
    first_k_dense_replace=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
)
_TOWER: dict[str, Any] = dict(
    hidden_size=16,
    embed_dim=16,
    intermediate_size=24,
    num_hidden_layers=2,
    depth=2,
    num_attention_heads=2,
    num_heads=2,
    patch_size=4,
    image_size=16,
)
_IDS = dict(
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=START,
    vision_end_token_id=END,
    image_start_token_id=START,
    image_end_token_id=END,
)
_SIZES = {"A": (16, 24), "B": (16, 24), "D": (8, 32)}
_SQUARES = dict.fromkeys("ABD", (16, 16))
_GRID = dict(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096})
_GRIDS: tuple[str, dict[str, Any]] = ("Qwen2VLImageProcessorPil", _GRID)
_GLM: tuple[str, dict[str, Any]] = ("Glm46VImageProcessorPil", _GRID)
_SIDE = {"height": 16, "width": 16}
_ONE: tuple[str, dict[str, Any]] = ("GotOcr2ImageProcessorPil", dict(size=_SIDE, crop_to_patches=False))
_CLIP: tuple[str, dict[str, Any]] = ("CLIPImageProcessorPil", dict(size={"shortest_edge": 16}, crop_size=_SIDE))
_PINS = [[16, 32], [32, 16], [32, 32]]
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_WOVEN = dict(rope_parameters={**_MROPE, "mrope_interleaved": True})
_DEEP = dict(out_hidden_size=16, deepstack_visual_indexes=[0, 1], num_position_embeddings=16)
_SEEN = dict(out_hidden_size=16, window_size=16, fullatt_block_indexes=[1])
_HALF = dict(num_attention_heads=2, rope_parameters={**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1]})
_DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    rope_parameters={**_MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
)
_SOUND: dict[str, Any] = dict(
    d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, num_mel_bins=8, output_dim=16
)
_NEXT = ("LlavaNextImageProcessorPil", dict(size={"shortest_edge": 16}, crop_size=_SIDE, image_grid_pinpoints=_PINS))
_MUSE = dict(
    out_hidden_size=64,
    projector_hidden_size=24,
    vision_config=dict(merge_size=2, pos_emb_height=8, pos_emb_width=8),
)
_VQ = dict(
    embed_dim=8,
    num_embeddings=16,
    latent_channels=8,
    base_channels=32,
    channel_multiplier=[1, 1],
    num_res_blocks=1,
    num_patches=4,
    projection_dim=16,
    image_token_embed_dim=16,
    num_hidden_layers=1,
)
OTHERS: dict[str, tuple[dict[str, Any], tuple[str, dict[str, Any]]]] = {
    "aria": (
        dict(
            projector_patch_to_query_dict={1225: 4},
            max_value_projector_patch_to_query_dict=4,
            vision_config=dict(image_size=490, patch_size=14),
        ),
        ("AriaImageProcessorPil", dict(max_image_size=490, min_image_size=336, split_image=False)),
    ),
    "aya_vision": ({}, _ONE),
    "cohere2_vision": (dict(alignment_intermediate_size=32), _ONE),
    "cohere_compass": (
        dict(
            text_config=dict(rope_parameters=dict(full_attention=_MROPE, sliding_attention=_MROPE)),
            vision_config={**_DEEP, "deepstack_visual_indexes": [0]},
        ),
        ("CohereCompassImageProcessorPil", _GRID),
    ),
    "cosmos3_edge": (dict(text_config=dict(rope_parameters=_MROPE)), ("Cosmos3EdgeImageProcessorPil", _GRID)),
    "cosmos3_omni": (dict(text_config=_WOVEN, vision_config=_DEEP), _GRIDS),
    "deepseek_vl_hybrid": (
        dict(
            high_res_vision_config=dict(
                image_size=32,
                patch_size=8,
                num_hidden_layers=2,
                hidden_size=16,
                num_attention_heads=2,
                output_channels=8,
                global_attn_indexes=[1],
                window_size=2,
                mlp_dim=16,
                num_pos_feats=4,
            )
        ),
        (
            "DeepseekVLHybridImageProcessorPil",
            dict(size=_SIDE, min_size=4, high_res_size={"height": 32, "width": 32}),
        ),
    ),
    "deepseek_vl": ({}, ("DeepseekVLImageProcessorPil", dict(size=_SIDE, min_size=4))),
    "exaone4_5": (dict(vision_config={**_SEEN, "num_key_value_heads": 2}), _GRIDS),
    "glm46v": (dict(text_config=_HALF, vision_config=dict(out_hidden_size=16, image_size=32)), _GLM),
    "glm4v_moe": (dict(text_config=_HALF, vision_config=dict(out_hidden_size=16, image_size=32)), _GLM),
    "glm5_next": (
        dict(
            text_config={key: value for key, value in text.POOLED.items() if key != "vision_config"},
            vision_config=dict(out_hidden_size=16, image_size=32, projection_intermediate_size=24),
        ),
        ("Glm5NextImageProcessorPil", _GRID),
    ),
    "glm_ocr": (
        dict(
            text_config=dict(head_dim=8, rope_parameters=_MROPE),
            vision_config=dict(out_hidden_size=16, image_size=32),
        ),
        _GLM,
    ),
    "got_ocr2": (
        dict(vision_config=dict(output_channels=8, global_attn_indexes=[1], window_size=4, mlp_dim=16)),
        _ONE,
    ),
    "hyperclovax_vision_v2": (dict(vision_config=_SEEN), _GRIDS),
    "idefics2": (
        dict(
            perceiver_config=dict(
                hidden_size=16,
                resampler_n_latents=4,
                resampler_depth=1,
                resampler_n_heads=2,
                resampler_head_dim=8,
                num_key_value_heads=2,
            )
        ),
        ("Idefics2ImageProcessorPil", dict(size={"longest_edge": 16, "shortest_edge": 8}, do_image_splitting=False)),
    ),
    "janus": (
        dict(vision_config=dict(projection_dim=16, mlp_ratio=2.0, num_image_tokens=16), vq_config=_VQ),
        ("JanusImageProcessorPil", dict(size=_SIDE, min_size=4)),
    ),
    "kimi_k25": (
        dict(
            projection_hidden_size=16,
            text_config=dict(n_group=2, topk_group=1, qk_rope_head_dim=4),
            vision_config=dict(pos_emb_height=8, pos_emb_width=8),
        ),
        ("PaddleOCRVLImageProcessorPil", _GRID),
    ),
    "lfm2_vl": (
        dict(
            projector_hidden_size=16,
            vision_config=dict(num_patches=16),
            text_config=dict(layer_types=["conv", "full_attention", "conv"]),
        ),
        ("Siglip2ImageProcessorPil", dict(patch_size=4, max_num_patches=24)),
    ),
    "lfm3_vl": (
        dict(
            projector_hidden_size=16,
            vision_config=dict(num_key_value_heads=2),
            text_config=dict(layer_types=["conv", "full_attention", "sliding_attention"]),
        ),
        _GRIDS,
    ),
    "lighton_ocr": (
        dict(spatial_merge_size=2, vision_config=dict(image_size=32, head_dim=8)),
        ("PixtralImageProcessorPil", dict(size={"longest_edge": 32}, patch_size={"height": 8, "width": 8})),
    ),
    "llava_next": (dict(image_grid_pinpoints=_PINS), _NEXT),
    "llava_next_video": (dict(image_grid_pinpoints=_PINS), _NEXT),
    "llava_onevision": (
        dict(image_grid_pinpoints=_PINS),
        ("LlavaOnevisionImageProcessorPil", dict(size=_SIDE, image_grid_pinpoints=_PINS)),
    ),
    "minimax_m3_vl": (dict(text_config=text.BLOCKS, projector_hidden_size=24), _GRIDS),
    "minicpmv4_6": (
        dict(
            text_config=_DELTA,
            image_size=16,
            patch_size=4,
            insert_layer_id=0,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_config=dict(insert_layer_id=0),
        ),
        ("MiniCPMV4_6ImageProcessorPil", dict(patch_size=4, scale_resolution=32, max_slice_nums=1)),
    ),
    "mistral_large4": (
        dict(spatial_merge_size=2, vision_config=dict(image_size=32, head_dim=8)),
        ("PixtralImageProcessorPil", dict(size={"longest_edge": 32}, patch_size={"height": 8, "width": 8})),
    ),
    "muse_glimmer": (_MUSE, _GRIDS),
    "muse_spark": (
        dict(
            **_MUSE,
            text_config=dict(moe_hidden_size=16),
            audio_config=dict(
                patch_sizes=[2] * 4, hidden_sizes=[8] * 4, depths=[1] * 4, conv_kernel_size=3, out_hidden_size=16
            ),
        ),
        _GRIDS,
    ),
    "paddleocr_vl": (dict(text_config=dict(rope_parameters=_MROPE)), ("PaddleOCRVLImageProcessorPil", _GRID)),
    "qianfan_ocr": (
        dict(image_seq_length=4, downsample_ratio=0.5, vision_config=dict(image_size=[16, 16], patch_size=[4, 4])),
        _ONE,
    ),
    "qwen2_5_omni_thinker": (
        dict(
            audio_config=_SOUND,
            vision_start_token_id=START,
            text_config=dict(hidden_size=32, rope_parameters=_MROPE),
            vision_config={**_SEEN, "out_hidden_size": 32},
        ),
        _GRIDS,
    ),
    "qwen2_vl": (
        dict(text_config=dict(hidden_size=32, rope_parameters=_MROPE), vision_config=dict(hidden_size=32)),
        _GRIDS,
    ),
    "qwen3_5_moe": (
        dict(text_config=_DELTA, vision_config=dict(out_hidden_size=16, num_position_embeddings=16)),
        _GRIDS,
    ),
    "qwen4_exp": (
        dict(
            text_config={**hybrids.OPTIONS["qwen4_exp_text"], "rope_parameters": _MROPE, "eos_token_id": END},
            vision_config=dict(out_hidden_size=16, num_position_embeddings=16),
        ),
        _GRIDS,
    ),
    "qwen3_omni_moe_thinker": (
        dict(
            audio_config={**_SOUND, "downsample_hidden_size": 8},
            vision_start_token_id=START,
            text_config=_WOVEN,
            vision_config=_DEEP,
        ),
        _GRIDS,
    ),
    "step3p7": (
        dict(
            text_config=dict(
                share_expert_dim=8,
                sliding_window=4,
                num_sliding_attention_heads=4,
                layer_types=["full_attention", "sliding_attention", "full_attention"],
            )
        ),
        _ONE,
    ),
    "video_llama_3": ({}, ("VideoLlama3ImageProcessorPil", _GRID)),
    "vipllava": (dict(vision_feature_layers=[-1, 0]), _CLIP),
}
"""Options of the configuration beside sizes, and the image processor, by model type. Families whose own processor needs
torchvision have another one here that makes the same arguments."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ernie4_5_vl_moe": (
        dict(
            text_config=dict(
                hidden_size=32,
                moe_k=2,
                moe_intermediate_size=[8, 8],
                rope_parameters={**_MROPE, "mrope_section": [1, 1, 2]},
            )
        ),
        "moe_mm_token_type_ids",
    ),
    "gemma4_unified": (
        dict(
            vision_config=dict(
                model_type="gemma4_unified_vision",
                patch_size=4,
                pooling_kernel_size=2,
                mm_embed_dim=16,
                mm_posemb_size=32,
            ),
            text_config=dict(layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2),
        ),
        "its forward",
    ),
    "minicpmv4_7": (
        {**OTHERS["minicpmv4_6"][0]},
        "counts the positions of a picture",
    ),
    "ovis2": (
        dict(hidden_size=16, vocab_size=VOCABULARY, vision_config=dict(vocab_size=32)),
        "visual_indicator_token_ids",
    ),
}
"""Types that take pictures in a way that a tree does not give: options, and what the error names."""
TOLERANCES = {
    **dict.fromkeys(("glm5_next", "minicpmv4_6", "minicpmv4_7", "qwen3_5_moe", "qwen4_exp"), text.DELTA_RULE),
    **dict.fromkeys(("muse_glimmer", "muse_spark"), text.UNSCALED),  # scores are scaled up
}
"""Of log-probabilities and gradients in float32, where they are not those of most."""


def model_of(kind: str, options: dict[str, Any]) -> PreTrainedModel:
    """A tiny model of a type, in float32."""
    config = CONFIG_MAPPING[kind](**_merged(_small(kind), options))
    attention = "sdpa" if getattr(transformers, class_of(kind))._supports_sdpa else "eager"
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention, dtype=torch.float64)
    models.randomise(model, 0)
    return model.float().eval()


def refusal(kind: str) -> str:
    """The words about pictures for one of `REFUSED`. Raises AssertionError where they are taken."""
    try:
        refuse_pictures(model_of(kind, REFUSED[kind][0]), object())
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{kind} is not refused")


def vision_of(kind: str) -> Vision:
    """One of `OTHERS`, with its pictures."""
    name, options = OTHERS[kind][1]
    made = Vision(model_of(kind, OTHERS[kind][0]), getattr(transformers, name)(**options))
    random = np.random.default_rng(0)
    sizes = _SIZES if "grid" in name.lower() or options is _GRID or "Pixtral" in name else _SQUARES
    if kind.startswith("minicpm"):
        sizes = {"A": (32, 32), "B": (32, 32), "D": (16, 64)}
    for letter, size in sizes.items():
        pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
        key = hashlib.blake2b(pixels.tobytes(), digest_size=16).digest()
        made.pictures[letter] = Pixels(key, pixels, _rows(made, pixels))
    return made


def names() -> list[str]:
    """The classes of all, for readers."""
    return sorted(map(class_of, OTHERS), key=str.lower)


def class_of(kind: str) -> str:
    return str(transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind])


def _rows(vision: Vision, pixels: Any) -> int:
    """Rows of features that the untouched tower makes of a picture."""
    body: Any = vision.model.base_model
    accepted = inspect.signature(body.get_image_features).parameters
    found = vision.processor([pixels], return_tensors="pt")
    out = body.get_image_features(**{k: v for k, v in found.items() if k in accepted}, return_dict=True).pooler_output
    return sum(part.numel() // part.shape[-1] for part in (out if isinstance(out, list | tuple) else [out]))


def _small(kind: str) -> dict[str, Any]:
    """A type's configuration with the sizes above, where its default has such a size."""
    whole = CONFIG_MAPPING[kind]()
    out = {name: value for name, value in _IDS.items() if hasattr(whole, name)}
    for name, part in vars(whole).items():
        if isinstance(part, PreTrainedConfig):
            sizes = _TEXT if name == "text_config" else _TOWER if name == "vision_config" else {}
            known = part.to_dict()
            own = {key: value for key, value in sizes.items() if known.get(key) is not None}
            own |= {key: None for key in ("pad_token_id",) if key in own and part.model_type == "qwen2"}
            if known.get("qk_rope_head_dim"):
                own |= {"head_dim": 4, "num_key_value_heads": 4}
            kinds = list(dict.fromkeys(known.get("layer_types") or ()))
            if kinds and name == "text_config":
                own["layer_types"] = (kinds * 3)[:3]
            out[name] = {"model_type": part.model_type, **own}
    return out


def _merged(options: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`options` with `more`, parts of the configuration one by one."""
    parts = {k: {**options.get(k, {}), **v} for k, v in more.items() if k.endswith("_config")}
    return {**options, **more, **parts}
