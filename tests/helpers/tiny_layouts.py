"""Tiny models whose pictures are laid out by their family's own processor, in directories as checkpoints have them, and
that processor with the untouched model as the oracle: text with one placeholder a picture, and the pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast

from datamodules.conversations.image_processor import ImageProcessor
from datamodules.prompts import Prompt
from datamodules.prompts.dealer import encoded
from datamodules.prompts.tokenizers import encode_prompt
from tests.app.tree.engine.pictures import vision
from tests.helpers.tiny_vision import unencoded
from tests.helpers.versions import SEES, skip_without

_PLACEHOLDERS = {
    "LLaVA": "<image>",
    "InternVL": "<IMG_CONTEXT>",
    "Mistral3": "[IMG]",
    "SmolVLM": "<image>",
    "Idefics3": "<image>",
}
# Of the image processor and of processor_config.json, as checkpoints of the family have them: what differs from
# `vision.FAMILIES`, where no processor of text and pictures has a say.
_IMAGES: dict[str, dict[str, Any]] = {
    "InternVL": {"max_patches": 4},  # tiles are the processor's own default
    "Mistral3": {"patch_size": {"height": 4, "width": 4}},
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "LLaVA": {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    "InternVL": {"image_seq_length": 4},
    "Mistral3": {"patch_size": 4, "spatial_merge_size": 2},
    "SmolVLM": {"image_seq_len": 4},
    "Idefics3": {"image_seq_len": 4},
}
_KINDS = {"Mistral3": "PixtralProcessor"}
NAMES = list(_PLACEHOLDERS)
_ENDS = ("<|endoftext|>", "<|im_end|>")
_SPECIAL = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>"),
    *(f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "<IMG_CONTEXT>"),
)
_NAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_TEMPLATE = """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER{% else %}
{{- part.text }}{% endif %}{% endfor %}{% endif %}{% if message.role == 'assistant' %}<|im_end|>{% endif %}
{%- endfor %}"""


def kind_of(name: str) -> Any:
    """The family's own processor class."""
    return getattr(transformers, _KINDS.get(name, f"{name.replace('LLaVA', 'Llava')}Processor"))


def write(directory: Path, name: str, sharp: float = 3.0) -> None:
    """A model's directory; weights at random, `sharp` times as large as they begin, lest errors hide."""
    skip_without(SEES)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: number for number, token in enumerate([*alphabet, *_ENDS, *_SPECIAL])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*_ENDS, *_SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=_ENDS[0],
        eos_token=_ENDS[1],
        chat_template=_TEMPLATE.replace("PLACEHOLDER", _PLACEHOLDERS[name]),
        extra_special_tokens=_NAMED,
    )
    tokenizer.save_pretrained(directory)
    family = vision.FAMILIES[name]
    options: dict[str, Any] = deepcopy(family.options)
    options["image_token_id"] = tokenizer.convert_tokens_to_ids(_PLACEHOLDERS[name])
    options["text_config"] |= {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 1024,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[family.type](**options))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                parameter.mul_(sharp)
    model.save_pretrained(directory)
    kind, of_images = family.processor
    getattr(transformers, kind)(**(of_images | _IMAGES.get(name, {}))).save_pretrained(directory)
    own = {"processor_class": _KINDS.get(name, f"{name.replace('LLaVA', 'Llava')}Processor"), **_PROCESSORS[name]}
    (directory / "processor_config.json").write_text(json.dumps(own))


class TinyLayouts:
    """A family's tiny model in a directory, its prompts, and the oracle."""

    def __init__(self, directory: Path, name: str) -> None:
        write(directory, name)
        self.name, self.path = name, str(directory)
        self.model = AutoModelForImageTextToText.from_pretrained(directory).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        found = ImageProcessor.beside(self.path, self.tokenizer)
        assert found is not None and found.laid_out
        self.images = found
        self._own: Any = None

    def prompt(self, parts: Sequence[str | np.ndarray], name: str = "p") -> Prompt:
        """A user's message of texts and pictures, encoded."""
        return encoded(unencoded(parts, name), lambda one: encode_prompt(self.tokenizer, one), self.images)

    def own(self) -> Any:
        """The family's processor, built of its files by hand; for videos it needs what is not there."""
        if self._own is None:

            class Own(kind_of(self.name)):  # type: ignore[misc]
                @classmethod
                def get_attributes(cls) -> list[str]:
                    return ["image_processor", "tokenizer"]

            images = transformers.AutoImageProcessor.from_pretrained(self.path, backend="pil")
            more = {"video_processor": None} if self.name in ("InternVL", "SmolVLM") else {}
            tokenizer = AutoTokenizer.from_pretrained(self.path)
            self._own = Own(image_processor=images, tokenizer=tokenizer, **more, **_PROCESSORS[self.name])
        return self._own

    def inputs(self, parts: Sequence[str | np.ndarray]) -> dict[str, Tensor]:
        """What the family's processor makes of a message: ids [1, L], and pixels."""
        placeholder = _PLACEHOLDERS[self.name]
        text = "".join(part if isinstance(part, str) else placeholder for part in parts)
        pictures = [Image.fromarray(part) for part in parts if not isinstance(part, str)]
        if not pictures:
            return dict(self.own().tokenizer(text, return_tensors="pt"))
        return dict(self.own()(text=text, images=pictures, return_tensors="pt", add_special_tokens=False))

    def logprobs(self, parts: Sequence[str | np.ndarray], reply: Sequence[int]) -> Tensor:
        """[R], with graph: of each token of a reply to the message, by the untouched model."""
        given = self.inputs(parts)
        tokens = [*given["input_ids"][0].tolist(), *reply]
        return self.scored(tokens, {name: x for name, x in given.items() if "pixel" in name or "sizes" in name})[
            -len(reply) :
        ]

    def scored(self, tokens: Sequence[int], pixels: dict[str, Tensor]) -> Tensor:
        """[L - 1], with graph: of each token given those before it."""
        ids = torch.tensor([list(tokens)])
        logits = self.model(input_ids=ids, use_cache=False, **pixels).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
