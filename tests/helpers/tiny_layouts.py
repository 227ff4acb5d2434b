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
from tests.helpers.selection import SEES, skip_without
from tests.helpers.tiny_vision import unencoded

_PLACEHOLDERS = {
    "LLaVA": "<image>",
    "InternVL": "<IMG_CONTEXT>",
    "Mistral3": "[IMG]",
    "SmolVLM": "<image>",
    "Idefics3": "<image>",
    "Gemma 4, shared keys": "<|image|>",
    "Gemma 4, large": "<|image|>",
    "Gemma 3": "<start_of_image>",
}
_ROWS = {"Gemma 3": "<image_soft_token>"}
"""Of a picture's features, where it is not the placeholder in text."""
# Of the image processor and of processor_config.json, as checkpoints of the family have them: what differs from
# `vision.FAMILIES`, where no processor of text and pictures has a say.
_IMAGES: dict[str, dict[str, Any]] = {
    "InternVL": {"max_patches": 4},  # tiles are the processor's own default
    "Mistral3": {"patch_size": {"height": 4, "width": 4}},
    "Gemma 4, shared keys": {"do_resize": True},  # pictures fill the tokens that there are for one
    "Gemma 4, large": {"do_resize": True},
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "LLaVA": {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    "InternVL": {"image_seq_length": 4},
    "Mistral3": {"patch_size": 4, "spatial_merge_size": 2},
    "SmolVLM": {"image_seq_len": 4},
    "Idefics3": {"image_seq_len": 4},
    "Gemma 4, shared keys": {"image_seq_length": 70},
    "Gemma 4, large": {"image_seq_length": 70},
    "Gemma 3": {"image_seq_length": 4},
}
_KINDS = {
    "LLaVA": "LlavaProcessor",
    "Mistral3": "PixtralProcessor",
    "Gemma 4, shared keys": "Gemma4Processor",
    "Gemma 4, large": "Gemma4Processor",
    "Gemma 3": "Gemma3Processor",
}
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
_GEMMA4 = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
_GEMMA3 = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
_LINES = ["\n" * count for count in range(2, 6)]
"""Its line breaks are one token, ordinary ones, which a picture's own are part of."""
_EXTRA = {"Gemma 4, shared keys": _GEMMA4, "Gemma 4, large": _GEMMA4, "Gemma 3": _GEMMA3}
_SHARP = {"Gemma 4, shared keys": 20.0, "Gemma 4, large": 20.0, "Gemma 3": 8.0}
"""How many times as large as they begin weights are, lest errors hide: 3, but where norms follow every layer."""
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_TEMPLATE = """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER{% else %}
{{- part.text }}{% endif %}{% endfor %}{% endif %}{% if message.role == 'assistant' %}<|im_end|>{% endif %}
{%- endfor %}"""


def kind_of(name: str) -> Any:
    """The family's own processor class."""
    return getattr(transformers, _KINDS.get(name, f"{name}Processor"))


def write(directory: Path, name: str, sharp: float | None = None) -> None:
    """A model's directory; weights at random, `sharp` times as large as they begin."""
    skip_without(SEES)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [*_ENDS, *_SPECIAL, *(_EXTRA[name].values() if name in _EXTRA else ())]
    lines = _LINES if name == "Gemma 3" else []
    made = Tokenizer(models.BPE({token: number for number, token in enumerate([*alphabet, *special, *lines])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    made.add_tokens(lines)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=_ENDS[0],
        eos_token=_ENDS[1],
        chat_template=_TEMPLATE.replace("PLACEHOLDER", _PLACEHOLDERS[name]),
        extra_special_tokens=_EXTRA.get(name, _NAMED),
    )
    tokenizer.save_pretrained(directory)
    family = vision.FAMILIES[name]
    options: dict[str, Any] = deepcopy(family.options)
    options["image_token_id"] = tokenizer.convert_tokens_to_ids(_ROWS.get(name, _PLACEHOLDERS[name]))
    options["text_config"] |= {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 1024,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if "Gemma 4" in name:
        options["text_config"]["vocab_size_per_layer_input"] = len(tokenizer)
        options |= {"audio_token_id": len(tokenizer), "video_token_id": len(tokenizer) + 1}  # which nobody samples
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[family.type](**options))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("mm_input_projection_weight"):  # which begins as zero
                parameter.normal_()
            elif "norm" not in parameter_name:
                parameter.mul_(sharp or _SHARP.get(name, 3.0))
    model.save_pretrained(directory)
    kind, of_images = family.processor
    getattr(transformers, kind)(**(of_images | _IMAGES.get(name, {}))).save_pretrained(directory)
    own = {"processor_class": _KINDS.get(name, f"{name}Processor"), **_PROCESSORS[name]}
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
                def check_argument_for_proper_class(self, name: str, given: Any) -> Any:
                    return None if given is None else super().check_argument_for_proper_class(name, given)

            images = transformers.AutoImageProcessor.from_pretrained(self.path, backend="pil")
            parts = {"image_processor": images, "tokenizer": AutoTokenizer.from_pretrained(self.path)}
            named = dict.fromkeys(Own.get_attributes()) | parts
            self._own = Own(**named, **_PROCESSORS[self.name])
        return self._own

    def inputs(self, parts: Sequence[str | np.ndarray]) -> dict[str, Tensor]:
        """What the family's processor makes of a message: ids [1, L], and pixels."""
        placeholder = _PLACEHOLDERS[self.name]
        text = "".join(part if isinstance(part, str) else placeholder for part in parts)
        pictures = [Image.fromarray(part) for part in parts if not isinstance(part, str)]
        if not pictures:
            return dict(self.own().tokenizer(text, return_tensors="pt"))
        return dict(self.own()(text=text, images=pictures, return_tensors="pt", add_special_tokens=False))

    def pixels(self, parts: Sequence[str | np.ndarray]) -> dict[str, Tensor]:
        """What it makes of a message beside ids."""
        return {name: value for name, value in self.inputs(parts).items() if name not in _TEXT}

    def logprobs(self, parts: Sequence[str | np.ndarray], reply: Sequence[int]) -> Tensor:
        """[R], with graph: of each token of a reply to the message, by the untouched model."""
        tokens = [*self.inputs(parts)["input_ids"][0].tolist(), *reply]
        return self.scored(tokens, self.pixels(parts))[-len(reply) :]

    def scored(self, tokens: Sequence[int], pixels: dict[str, Tensor]) -> Tensor:
        """[L - 1], with graph: of each token given those before it."""
        ids = torch.tensor([list(tokens)])
        named = {"Gemma 4": "mm_token_type_ids", "Gemma 3": "token_type_ids"}.get(self.name.partition(",")[0])
        kinds = {named: (ids == self.model.config.image_token_id).long()} if named else {}
        logits = self.model(input_ids=ids, use_cache=False, **pixels, **kinds).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
