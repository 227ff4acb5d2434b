"""A small vision-language model from nothing: a Qwen3-VL of 268k parameters, with tokenizer, template and processor.

Promises: `python examples/vision/make_model.py DIR` leaves in DIR what `model.path` and `data.tokenizer` take, weights
at random under a seed; nothing is downloaded. Its tokens are bytes and a few special ones; pictures of 28 x 28 pixels
are 16 of them, one for each 7 x 7.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil, Qwen3VLConfig
from transformers import Qwen3VLForConditionalGeneration as Model

SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# A question is its pictures and texts; a reply ends with <|im_end|>.
TEMPLATE = """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}
{{- part.text }}{% endif %}{% endfor %}{% endif %}{% if message.role == 'assistant' %}<|im_end|>{% endif %}
{%- endfor %}"""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, *SPECIAL])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )


SPREAD = 0.06
"""Of the weights at the start; transformers' 0.02 is meant for models that are wider."""


def write(
    directory: Path,
    hidden: int = 96,
    tower: int = 48,
    patch: int = 7,
    merge: int = 1,
    seed: int = 1,
    spread: float = 0.02,
    **text: Any,
) -> None:
    """Writes the directory.

    Args:
        hidden, tower: width of the language model and of the tower, both of two layers.
        patch, merge: pixels a side of a patch, and patches a side of a token's square.
        spread: standard deviation of the weights at the start.
        text: other fields of the language model's configuration.
    """
    tokens = tokenizer()
    number = tokens.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokens),
            "initializer_range": spread,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": hidden // 4,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [hidden // 8 - 2 * (hidden // 24), hidden // 24, hidden // 24],
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
            "eos_token_id": number("<|im_end|>"),
            "pad_token_id": number("<|endoftext|>"),
            **text,
        },
        vision_config={
            "depth": 2,
            "initializer_range": spread,
            "hidden_size": tower,
            "intermediate_size": 2 * tower,
            "num_heads": 4,
            "patch_size": patch,
            "spatial_merge_size": merge,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    Model(config).save_pretrained(directory)
    tokens.save_pretrained(directory)
    side = patch * merge
    size = {"shortest_edge": side * side, "longest_edge": 64 * side * side}
    Qwen2VLImageProcessorPil(patch_size=patch, merge_size=merge, size=size).save_pretrained(directory)


if __name__ == "__main__":
    write(Path(sys.argv[1]), spread=SPREAD)
