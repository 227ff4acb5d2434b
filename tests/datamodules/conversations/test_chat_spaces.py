"""Tokenizers of Llama 2's kind, which put a space before a text: replies are trained as they are generated."""

from __future__ import annotations

import string

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from datamodules.conversations.chat import ChatEncoder, Transcript
from datamodules.prompts import Prompt
from datamodules.prompts.tokenizers import encode_prompt, encode_reply

PLAIN_ROLES = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Spaces are underlines, bytes where there is no character; "Hello" is one token with a space and one without."""
    characters = ["\u2581", *string.ascii_letters, *string.punctuation, *string.digits]
    known = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    merges = [("\u2581", "H"), ("e", "l"), ("\u2581H", "el"), ("l", "o"), ("\u2581Hel", "lo")]
    merges += [("H", "el"), ("Hel", "lo")]
    vocabulary = {token: number for number, token in enumerate(known)}
    for one, other in merges:
        vocabulary.setdefault(one + other, len(vocabulary))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


@pytest.mark.parametrize(
    ("template", "first"), [(PLAIN_ROLES, "Hello"), (BRACKETS, "\u2581Hello")], ids=["plain roles", "brackets"]
)
def test_a_reply_is_trained_in_the_tokens_that_are_generated(template: str, first: str) -> None:
    made = tokenizer(template)
    asked, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}
    messages = [asked, said, asked, said]
    found = ChatEncoder(made).encode(Transcript("t", 0, "m", 1.0, messages, "here"))
    whole = made.apply_chat_template(messages, return_dict=True)["input_ids"]
    turns = [found.tokens[a:b].tolist() for a, b in zip(found.starts, found.ends, strict=True)]
    assert [made.convert_ids_to_tokens(turn)[-2:] for turn in turns] == [[first, "</s>"]] * 2
    assert made.decode(found.tokens.tolist()).strip() == made.decode(whole).strip()
    prompt = Prompt("p", messages=(asked,))
    trained = [*encode_prompt(made, prompt), *encode_reply(made, prompt, "Hello", None)]
    assert made.convert_ids_to_tokens(trained)[-2:] == [first, "</s>"]


def test_a_reply_is_encoded_behind_what_the_templates_options_end_a_prompt_with() -> None:
    made = tokenizer(f"{{% if tight %}}{BRACKETS}{{% else %}}{PLAIN_ROLES}{{% endif %}}")
    prompt = Prompt("p", messages=({"role": "user", "content": "hi"},))
    for options, first in (({"tight": True}, "\u2581Hello"), (None, "Hello")):
        assert made.convert_ids_to_tokens(encode_reply(made, prompt, "Hello", None, options)) == [first, "</s>"]
