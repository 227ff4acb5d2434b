"""Tiny vision-language models, pictures for them, and the untouched model as the oracle: one sequence at a time, from
pixels, with the positions the model gives itself. Nothing of `app.tree` is used but what a test passes in."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, Gemma3ForConditionalGeneration, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from tests.app.tree import models, oracle
from tests.app.tree.losses import SequenceLoss
from tests.helpers.selection import SEES, skip_without

BETWEEN, VIDEO, IMAGE, START, END, VOCABULARY = 35, 36, 37, 38, 39, 40
Part = int | str
"""A token, or the name of a picture, with the tokens around it that its family puts there."""


@dataclass(frozen=True, eq=False)
class Pixels:
    """A picture as the tree knows it."""

    key: bytes
    pixels: npt.NDArray[np.uint8]
    tokens: int


@dataclass(frozen=True)
class Family:
    """`options`: of the configuration; `processor`: its type and options; `sizes`: height and width of pictures by
    name, none of which it resizes, with their rows; `note`: for readers of the support matrix;
    `tile`: rows between two tokens of text inside a picture."""

    type: str
    options: dict[str, Any]
    processor: tuple[str, dict[str, Any]]
    sizes: dict[str, tuple[int, int, int]]
    tolerances: tuple[float, float] = (2e-6, 2e-6)
    note: str = ""
    tile: int | None = None


_TEXT: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
_EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
_TOWER: dict[str, Any] = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
_GRID: dict[str, Any] = dict(
    depth=3,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=16,
)
_IDS: dict[str, Any] = dict(
    image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END
)
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_GRID_PROCESSOR = dict(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096})
_QWEN = ("Qwen2VLImageProcessorPil", _GRID_PROCESSOR)
# A and B: equal grids, so equal ids; C and D: others, each different in its own way.
_GRIDS = {"A": (16, 24, 6), "B": (16, 24, 6), "C": (24, 16, 6), "D": (8, 32, 4)}
_SQUARE: dict[str, Any] = dict(do_resize=True, do_rescale=True, do_normalize=True)
_DEEPSTACK = {**_GRID, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
_IDEFICS: dict[str, Any] = dict(
    text_config=dict(model_type="llama", **_TEXT),
    vision_config=dict(**_TOWER, image_size=16, patch_size=4),
    image_token_id=IMAGE,
    scale_factor=2,
    pad_token_id=0,
)
_TILES = dict(do_image_splitting=True, size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, do_pad=True)
_TILED = {"A": (32, 16, 12), "B": (32, 16, 12), "C": (16, 32, 12), "D": (32, 32, 20)}


def _squares(side: int, rows: int) -> dict[str, tuple[int, int, int]]:
    return dict.fromkeys("ABCD", (side, side, rows))


def _gemma4(**text: Any) -> dict[str, Any]:
    """Windows narrower than a picture; layers without one have wider heads."""
    return dict(
        text_config={
            **_TEXT,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_hidden_layers": 6,
            "sliding_window": 4,
            "global_head_dim": 12,
            "pad_token_id": 0,
            "hidden_size_per_layer_input": 0,
            **text,
        },
        vision_config=dict(
            **_TOWER,
            num_key_value_heads=2,
            head_dim=8,
            patch_size=4,
            pooling_kernel_size=2,
            position_embedding_size=32,
        ),
        **dict(image_token_id=IMAGE, video_token_id=VIDEO, audio_token_id=VOCABULARY + 1),
    )


_GEMMA4 = (
    "Gemma4ImageProcessorPil",
    dict(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2, do_resize=False),  # it would fill all 70 tokens
)
FAMILIES: dict[str, Family] = {
    "Qwen3-VL": Family(
        "qwen3_vl",
        dict(
            text_config={**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
            vision_config=_DEEPSTACK,
            **_IDS,
        ),
        _QWEN,
        _GRIDS,
        note="3-D positions, deepstack features",
    ),
    "Qwen3-VL-MoE": Family(
        "qwen3_vl_moe",
        dict(
            text_config={**_TEXT, **_EXPERTS, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
            vision_config=_DEEPSTACK,
            **_IDS,
        ),
        _QWEN,
        _GRIDS,
        note="the same; experts",
    ),
    "Qwen2.5-VL": Family(
        "qwen2_5_vl",
        dict(
            text_config={
                **{k: v for k, v in _TEXT.items() if k != "head_dim"},
                "hidden_size": 32,
                "rope_parameters": _MROPE,
            },
            vision_config={**_GRID, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
            **_IDS,
        ),
        _QWEN,
        _GRIDS,
        note="3-D positions",
    ),
    "GLM-4V": Family(
        "glm4v",
        dict(
            text_config={**_TEXT, "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1]}},
            vision_config={**_GRID, "image_size": 32},
            image_start_token_id=START,
            image_end_token_id=END,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
        ),
        ("Glm4vImageProcessorPil", _GRID_PROCESSOR),
        _GRIDS,
        note="3-D positions",
    ),
    "LLaVA": Family(
        "llava",
        dict(
            text_config=dict(model_type="llama", **_TEXT),
            vision_config=dict(model_type="clip_vision_model", **_TOWER, image_size=12, patch_size=4),
            image_token_id=IMAGE,
        ),
        ("CLIPImageProcessorPil", dict(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12})),
        _squares(12, 9),
    ),
    "SmolVLM": Family(
        "smolvlm",
        _IDEFICS,
        ("SmolVLMImageProcessorPil", _TILES),
        _TILED,
        tile=4,
        note="pictures in tiles",
    ),
    "Idefics3": Family(
        "idefics3",
        _IDEFICS,
        ("Idefics3ImageProcessorPil", _TILES),
        _TILED,
        tile=4,
        note="pictures in tiles",
    ),
    "InternVL": Family(
        "internvl",
        dict(
            text_config=dict(model_type="qwen2", **{k: v for k, v in _TEXT.items() if k != "head_dim"}),
            vision_config=dict(**_TOWER, image_size=[16, 16], patch_size=[4, 4]),
            image_token_id=IMAGE,
            image_seq_length=4,
            downsample_ratio=0.5,
        ),
        ("GotOcr2ImageProcessorPil", dict(size={"height": 16, "width": 16}, crop_to_patches=False)),
        _squares(16, 4),
    ),
    "Mistral3": Family(
        "mistral3",
        dict(
            text_config=dict(model_type="mistral", sliding_window=None, **_TEXT),
            vision_config=dict(model_type="pixtral", **_TOWER, image_size=32, patch_size=4, head_dim=8),
            image_token_id=IMAGE,
            spatial_merge_size=2,
            multimodal_projector_bias=False,
        ),
        ("PixtralImageProcessorPil", dict(size={"longest_edge": 32}, patch_size={"height": 8, "width": 8})),
        _GRIDS,
    ),
    "Qwen3.5": Family(
        "qwen3_5",
        dict(
            text_config={
                **_TEXT,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 6,
                "rope_parameters": {**_MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
            },
            vision_config={**_GRID, "num_position_embeddings": 16},
            **_IDS,
        ),
        _QWEN,
        _GRIDS,
        (5e-5, 5e-5),
        note="3-D positions; gated delta rule between layers of attention",
    ),
}
FAMILIES["Gemma 4, shared keys"] = Family(
    "gemma4",
    _gemma4(
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    _GEMMA4,
    _GRIDS,
    (2e-5, 2e-5),
    note="as E2B and E4B: the last layers attend to keys of others; inputs of each layer's own",
)
FAMILIES["Gemma 4, large"] = Family(
    "gemma4",
    _gemma4(use_bidirectional_attention="vision"),
    _GEMMA4,
    _GRIDS,
    (2e-5, 2e-5),
    note="as 31B: in layers with a window, placeholders of a picture see each other; with `sdpa` alone",
)
FAMILIES["Gemma 3"] = Family(
    "gemma3",
    dict(
        text_config={
            **_TEXT,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 3,
            "num_hidden_layers": 4,
        },
        vision_config=dict(**_TOWER, image_size=16, patch_size=4),
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_id=START,
        eoi_token_id=END,
    ),
    ("Gemma3ImageProcessorPil", dict(size={"height": 16, "width": 16})),
    _squares(16, 4),
    note="placeholders of a picture see each other; with `sdpa` alone",
)
_SIGLIP = ("SiglipImageProcessorPil", dict(size={"height": 16, "width": 16}))
REFUSED: dict[str, Family] = {
    "PaliGemma": Family(
        "paligemma",
        dict(
            text_config=dict(model_type="gemma", **_TEXT),
            vision_config=dict(
                model_type="siglip_vision_model", **_TOWER, image_size=16, patch_size=4, projection_dim=16
            ),
            image_token_id=IMAGE,
            projection_dim=16,
        ),
        _SIGLIP,
        _squares(16, 16),
    ),
    "Llama 3.2 Vision": Family(
        "mllama",
        dict(
            text_config={
                **{
                    name: value for name, value in _TEXT.items() if not name.endswith("token_id") and name != "head_dim"
                },
                "cross_attention_layers": [1],
                **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
            },
            vision_config=dict(
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_global_layers=1,
                attention_heads=2,
                image_size=16,
                patch_size=4,
                vision_output_dim=32,
                intermediate_layers_indices=[0],
            ),
            image_token_index=IMAGE,
        ),
        _SIGLIP,
        _squares(16, 4),
    ),
}


def all_pictures_see_each_other(patch: pytest.MonkeyPatch) -> None:
    """From now on Gemma 3 says what Molmo 2 does."""

    def masks(config: Any, embeds: Tensor, mask: Any, cache: Any, positions: Any, token_type_ids: Tensor) -> Any:
        together = torch.where(token_type_ids == 1, 0, -1)
        return create_masks_for_generate(config, embeds, mask, cache, positions, block_sequence_ids=together)

    patch.setattr(Gemma3ForConditionalGeneration, "create_masks_for_generate", staticmethod(masks))


@dataclass(frozen=True, eq=False)
class Vision:
    """A model with its image processor and pictures."""

    model: PreTrainedModel
    processor: Any
    pictures: dict[str, Pixels] = field(default_factory=dict)
    tile: int | None = None

    def sequences(self, texts: Sequence[Sequence[Part]]) -> Sequences:
        return Sequences(self, texts)


def make(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Vision:
    """A fresh model in evaluation mode, all of it trainable."""
    skip_without(SEES)
    family = FAMILIES.get(name) or REFUSED[name]
    config = CONFIG_MAPPING[family.type](**family.options)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa", dtype=torch.float64)
    models.randomise(model, seed)
    kind, options = family.processor
    processor = getattr(transformers, kind)(**options)
    random = np.random.default_rng(seed)
    pictures = {}
    for letter, (height, width, rows) in family.sizes.items():
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        pictures[letter] = Pixels(hashlib.blake2b(pixels.tobytes(), digest_size=16).digest(), pixels, rows)
    return Vision(model.to(dtype).eval(), processor, pictures, family.tile)


class Sequences:
    """Sequences of text and pictures: what `PrefixTree.build` takes, and what the untouched model does."""

    def __init__(self, vision: Vision, texts: Sequence[Sequence[Part]]) -> None:
        self.vision, self.texts = vision, [list(text) for text in texts]
        names = list(dict.fromkeys(part for text in texts for part in text if isinstance(part, str)))
        self.pictures = [vision.pictures[name] for name in names]
        self.tokens, self.images = [], []
        for text in texts:
            tokens, images = list[int](), list[int]()
            for part in text:
                if isinstance(part, str):
                    size = vision.pictures[part].tokens
                    tile = [IMAGE] * (vision.tile or size)
                    inside = [*tile, *[token for _ in range(size // len(tile) - 1) for token in (BETWEEN, *tile)]]
                    tokens += [START, *inside, END]
                    images += [names.index(part) if token == IMAGE else -1 for token in (START, *inside, END)]
                else:
                    tokens.append(part)
                    images.append(-1)
            self.tokens.append(np.array(tokens))
            self.images.append(np.array(images, np.int32))

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def scored(self) -> list[npt.NDArray[np.bool_]]:
        return [images < 0 for images in self.images]

    def arguments(self, i: int) -> dict[str, Any]:
        """What the untouched model takes for sequence i beside its ids."""
        names = [part for part in self.texts[i] if isinstance(part, str)]
        if not names:
            return {}
        vision = self.vision
        dtype = next(vision.model.parameters()).dtype
        found = vision.processor([vision.pictures[name].pixels for name in names], return_tensors="pt")
        accepted = inspect.signature(vision.model.forward).parameters
        out = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in found.items()
            if name in accepted
        }
        kinds = torch.from_numpy((self.images[i] >= 0).astype(np.int64))[None]
        if "mm_token_type_ids" not in accepted and hasattr(vision.model.base_model, "get_rope_index"):
            out["attention_mask"] = torch.ones_like(kinds)  # without it they count no pictures
        return out | {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}

    def dense_logprobs(self) -> list[Tensor]:
        with torch.no_grad():
            return [
                oracle.dense_sequence(self.vision.model, tokens, scored, inputs=self.arguments(i)).logprobs
                for i, (tokens, scored) in enumerate(zip(self.tokens, self.scored()))
            ]

    def dense_backward(self, loss: SequenceLoss) -> tuple[float, dict[str, Tensor]]:
        inputs = [self.arguments(i) for i in range(len(self.tokens))]
        return oracle.dense_backward(self.vision.model, self.tokens, loss, self.scored(), inputs=inputs)
