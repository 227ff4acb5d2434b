"""Prompts of the types beside the families: the rows that their own processor lays out for a picture are those that the
tower makes of it, through what `picture_processor` reads from a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from app.tree.model.pictures import Tower
from datamodules.conversations.image_processor import ImageProcessor
from tests.app.tree.engine.pictures import others
from tests.helpers.tiny_vision import noise

_CLASS: dict[str, Any] = dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1)
_PLACE = "<image>"
_NAMED = {
    "image_token": _PLACE,
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "aya_vision": ("<|IMG_PATCH|>", dict(patch_size=4, img_size=16, downsample_factor=2)),
    "deepseek_vl": ("<image_placeholder>", dict(num_image_tokens=16)),
    "glm46v": (_PLACE, {}),
    "janus": ("<image_placeholder>", {}),
    "lighton_ocr": ("<|image_pad|>", dict(patch_size=4, spatial_merge_size=2)),
    "llava_next": (_PLACE, _CLASS),
    "llava_next_video": (_PLACE, _CLASS),
    "llava_onevision": (
        _PLACE,
        dict(num_image_tokens=16, vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_9"),
    ),
    "paddleocr_vl": (_PLACE, {}),
    "qwen2_vl": (_PLACE, {}),
    "video_llama_3": (_PLACE, {}),
    "vipllava": (_PLACE, _CLASS),
}
"""The placeholder, and options of processor_config.json."""


@pytest.mark.parametrize("kind", PROCESSORS)
def test_the_rows_that_are_laid_out_are_those_of_the_tower(tmp_path: Path, kind: str) -> None:
    token, options = PROCESSORS[kind]
    tokenizer = _tokenizer(token)
    changed = dict(others.OTHERS[kind][0], image_token_id=tokenizer.convert_tokens_to_ids(token))
    changed["text_config"] = {**changed.get("text_config", {}), "vocab_size": len(tokenizer)}
    model = others.model_of(kind, changed)
    model.config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    name, of_images = others.OTHERS[kind][1]
    getattr(transformers, name)(**of_images).save_pretrained(tmp_path)
    own = {"processor_class": PROCESSOR_MAPPING_NAMES[kind], **options}
    (tmp_path / "processor_config.json").write_text(json.dumps(own))
    images = ImageProcessor.beside(str(tmp_path), tokenizer)
    assert images is not None
    tower = Tower(model, images.processor)
    for size in ((24, 40), (40, 24), (17, 50)):
        picture = images.picture(noise(1, *size), "here")
        assert picture.tokens == images.layout(picture, "here").count(images.placeholder)
        if kind == "janus":  # whose processor knows the size of the released models alone
            assert picture.tokens == 24 * 24
            continue
        assert len(tower.features([picture])[0][0]) == picture.tokens  # itself an error where they differ


def _tokenizer(token: str) -> PreTrainedTokenizerFast:
    """Bytes, and tokens that the processors name."""
    special = ["<|endoftext|>", "<|im_end|>", "<video>", "<image>", "<|video_pad|>"]
    special += ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "<|IMG_PATCH|>", "TILE_GLOBAL"]
    special += [f"TILE_{number + 1}" for number in range(12)]
    special = list(dict.fromkeys([*special, token, *_NAMED.values()]))
    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    made = Tokenizer(models.BPE({one: number for number, one in enumerate(known)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    named = {**_NAMED, "image_token": token, "video_token": "<video>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=special[0], eos_token=special[1], extra_special_tokens=named
    )
