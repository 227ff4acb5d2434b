"""Chat templates as models come with them, read from an installed package (TRL ships them as data; it is not imported),
each with a small tokenizer that has the family's special tokens. Nothing is copied here."""

# ruff: noqa: RUF001 - DeepSeek writes its tokens so

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        template: its name in the package.
        eos: the tokenizer's end of sequence.
        end: what the template puts behind the last reply.
        model: ends of sequence in its models' generation configuration.
        marks: further special tokens of the template.
        closing: what it puts behind earlier replies, where that is another token; "" for nothing.
        swallows: `end` takes the white space behind it along.
    """

    template: str
    eos: str
    end: str
    model: tuple[str, ...]
    marks: tuple[str, ...] = ()
    closing: str | None = None
    swallows: bool = False

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token a byte, and the special tokens. Skips the test where the package is not installed."""
        names = list(dict.fromkeys([self.eos, self.end, *self.model, *self.marks]))
        special = [AddedToken(one, special=True, rstrip=self.swallows and one == self.end) for one in names]
        core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(_BYTES))}, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens(special)
        made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=self.eos, bos_token=names[-1])
        made.chat_template = real_template(self.template)
        return made


_BYTES = pre_tokenizers.ByteLevel.alphabet()
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>")
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>")
_GLM = ("<|endoftext|>", "<|user|>", "<|observation|>")
_COHERE = ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<BOS_TOKEN>")
_TURN = "<|END_OF_TURN_TOKEN|>"

FAMILIES = {
    "Qwen2.5": Family("qwen2_5", CLOSE, CLOSE, (CLOSE, "<|endoftext|>"), (OPEN,)),
    "Qwen2.5 base": Family("qwen2_5", "<|endoftext|>", CLOSE, ("<|endoftext|>",), (OPEN,)),
    "Qwen3": Family("qwen3", CLOSE, CLOSE, (CLOSE, "<|endoftext|>"), (OPEN,)),
    "Qwen3 2507": Family("qwen3_instruct_2507", CLOSE, CLOSE, (CLOSE, "<|endoftext|>"), (OPEN,)),
    "Llama 3": Family("llama3", "<|eot_id|>", "<|eot_id|>", ("<|end_of_text|>", "<|eot_id|>"), _HEADERS),
    "Llama 3 base": Family("llama3", "<|end_of_text|>", "<|eot_id|>", ("<|end_of_text|>",), _HEADERS),
    "Llama 3.1": Family(
        "llama3_1", "<|eot_id|>", "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), _HEADERS
    ),
    "Gemma 2": Family("gemma", "<eos>", "<end_of_turn>", ("<eos>", "<end_of_turn>"), ("<start_of_turn>", "<bos>")),
    "Gemma 3": Family("gemma3", "<eos>", "<end_of_turn>", ("<eos>", "<end_of_turn>"), ("<start_of_turn>", "<bos>")),
    "Gemma 4": Family("gemma4", "<eos>", "<turn|>", ("<eos>", "<turn|>"), ("<|turn>", "<bos>")),
    "Phi 3": Family(
        "phi3", "<|endoftext|>", "<|end|>", ("<|endoftext|>", "<|end|>"), ("<|user|>", "<|assistant|>"), swallows=True
    ),
    "Phi 3.5": Family(
        "phi3_5", "<|endoftext|>", "<|end|>", ("<|endoftext|>", "<|end|>"), ("<|user|>", "<|assistant|>"), swallows=True
    ),
    "Aya": Family("cohere", _TURN, _TURN, (_TURN,), _COHERE),
    "Tiny Aya": Family("cohere2", _TURN, _TURN, (_TURN,), ("<|START_RESPONSE|>", "<|END_RESPONSE|>", *_COHERE)),
    "DeepSeek V3": Family(
        "deepseekv3", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",), _DEEPSEEK
    ),
    "DeepSeek R1": Family(
        "deepseek_r1_distill", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",), _DEEPSEEK
    ),
    "GLM 4.5": Family("glm4moe", "<|endoftext|>", "<|user|>", _GLM, ("<|assistant|>", "[gMASK]", "<sop>"), closing=""),
    "GPT-OSS": Family(
        "gptoss",
        "<|return|>",
        "<|return|>",
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        ("<|end|>", "<|start|>", "<|message|>", "<|channel|>"),
        closing="<|end|>",
    ),
    "LFM2": Family("lfm2", CLOSE, CLOSE, (CLOSE,), (OPEN, "<|startoftext|>")),
    "Nemotron 3": Family("nemotron_3_nano", CLOSE, CLOSE, (CLOSE, "</s>"), (OPEN, "<s>")),
}


def real_template(name: str) -> str:
    """The text of one of the package's templates; skips the test where it is not installed, or has no such one."""
    spec = importlib.util.find_spec("trl")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        file = Path(place) / "chat_templates" / f"{name}.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
    pytest.skip(f"needs the chat template {name}, which the package trl brings")
