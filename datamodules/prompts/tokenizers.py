"""Tokenizers by one line of configuration, and prompts turned into token ids.

    char:0123456789+-=      one token a character, for tiny models trained from nothing
    train:2048              byte-level BPE of at most 2,048 tokens, trained on the prompts of the run
    PATH                    a directory written by `save_pretrained` (its own chat template and special tokens)

Promises: the same specification and texts give the same ids; a character outside a "char:" alphabet is an error,
never an unknown token. The first two have `<pad>` = 0, `<eos>` = 1, no BOS, and a plain chat template that puts one
message on a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from app.text import has_surrogate, reason, why_not
from datamodules.conversations.chat_template import HIDES_TOOLS, Chat
from datamodules.conversations.messages import ROLES, tools_of, with_arguments
from datamodules.prompts.base import Prompt, PromptSource

_SPECIALS = ["<pad>", "<eos>"]
_MARK = "@@shown@@"
_SMALLEST = 256 + len(_SPECIALS)  # every byte must have a token
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def load_tokenizer(spec: str, texts: Iterable[str] | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer `spec` describes (see the head of this file).

    Args:
        spec: "char:<alphabet>", "train:<vocabulary size>" or a directory.
        texts: what "train:" learns from.

    Raises:
        ValueError: a specification that makes no tokenizer, a tokenizer without an end-of-sequence token.
        FileNotFoundError: no such directory.
    """
    if spec.startswith("char:"):
        return _characters(spec.removeprefix("char:"))
    if spec.startswith("train:"):
        return _trained(spec.removeprefix("train:"), texts)
    if not Path(spec).expanduser().is_dir():
        raise FileNotFoundError(
            f"tokenizer: no directory {spec}; give one written by save_pretrained, 'char:<alphabet>' or 'train:<size>'."
            " A model of the hub comes into one with: hf download OWNER/NAME --local-dir DIR"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(Path(spec).expanduser(), trust_remote_code=False)
    except Exception as error:  # a directory of anything else fails anywhere in transformers
        raise ValueError(f"tokenizer: {spec} holds no tokenizer: {why_not(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer: {spec} has no eos_token; set one in its tokenizer_config.json")
    return tokenizer


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    bare: bool = False,
    template_options: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Token ids of a prompt: its messages through the chat template, or its text.

    Args:
        tokenizer: the model's.
        prompt: text or messages.
        bare: leaves out the special tokens (BOS) that the tokenizer puts before a text.
        template_options: further arguments of the chat template. Those of a prompt made of messages go first: its
            metadata's `chat_template_kwargs`, as TRL names them, and `tools`, JSON schemas as a list or its JSON text.

    Raises:
        ValueError: an empty prompt, a text with options of a template, characters the tokenizer has no token for,
            messages without a chat template, or of a role that it does not show; tools that it does not show.
    """
    try:
        if prompt.messages:
            if not tokenizer.chat_template:
                raise ValueError("the tokenizer has no chat template for its messages; give text instead (chat: false)")
            rendered = tokenizer.apply_chat_template(
                _for_template(tokenizer, prompt),
                add_generation_prompt=True,
                return_dict=True,
                **_shown_with(tokenizer, prompt, template_options),
            )
            tokens = rendered["input_ids"]
        else:
            if template_options:
                raise ValueError(
                    "it is text, which no chat template renders; give messages (chat: true), or leave out"
                    " template_options"
                )
            tokens = tokenizer.encode(prompt.text, add_special_tokens=False)
            if not bare:
                tokens = _with_beginning(tokenizer, prompt.text, tokens)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(
            f"prompt '{prompt.id}' cannot be tokenized: {_lacking(tokenizer, prompt) or reason(error)}"
        ) from None
    if not tokens:
        raise ValueError(f"prompt '{prompt.id}' has no tokens; give it text or messages")
    return tuple(tokens)


def _for_template(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[dict[str, Any]]:
    """The messages, calls as the template takes them. Raises ValueError as `_check_roles`."""
    _check_roles(tokenizer, prompt)
    if not any(one.get("tool_calls") for one in prompt.messages):
        return list(prompt.messages)
    return [with_arguments(one, _chat(tokenizer).arguments) for one in prompt.messages]


def _check_roles(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> None:
    """Raises ValueError for a role of others' that the template leaves out."""
    for k, one in enumerate(prompt.messages):
        if one.get("role") not in ROLES:
            marked = [*prompt.messages[:k], {**one, "content": _MARK}, *prompt.messages[k + 1 :]]
            if _MARK not in str(tokenizer.apply_chat_template(marked, tokenize=False)):
                raise ValueError(
                    f"the chat template does not show its message {k + 1}, of role {one.get('role')!r:.40}; the roles"
                    f" that templates know are {', '.join(ROLES)}"
                )


_chat = lru_cache(maxsize=4)(Chat)
"""It tries templates, which would be done anew for each prompt."""


def chat_of(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    template_options: Mapping[str, Any] | None,
    tools: list[dict[str, Any]] | None = None,
) -> Chat:
    """The chat template as it shows a prompt of messages and what follows it, in the way of `encode_prompt`.

    Args:
        tools: of the workflow, in place of those of the prompt's record; None for these.

    Raises:
        ValueError: messages, tools or options as `encode_prompt` refuses them.
    """
    try:
        _check_roles(tokenizer, prompt)
        shown = _shown_with(tokenizer, prompt, template_options, tools is None)
    except ValueError as error:
        raise ValueError(f"prompt '{prompt.id}': {error}") from None
    return _chat_with(tokenizer, json.dumps([tools or shown.pop("tools", None), shown]))


@lru_cache(maxsize=64)
def _chat_with(tokenizer: PreTrainedTokenizerBase, written: str) -> Chat:
    tools, options = json.loads(written)
    return Chat(tokenizer, tools, options)


def _shown_with(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, options: Mapping[str, Any] | None, its_tools: bool = True
) -> dict[str, Any]:
    """Arguments of the chat template for the prompt's messages. Raises ValueError for tools that it leaves out
    and options that are none."""
    own = prompt.metadata.get("chat_template_kwargs")
    if own is not None and not isinstance(own, dict):
        raise ValueError("its record's 'chat_template_kwargs' must be an object; correct it, or remove the field")
    shown = {**(options or {}), **(own or {})}
    if its_tools and (tools := tools_of(prompt.metadata.get("tools"), "its record")):
        if not _chat(tokenizer).visible.tools(prompt.messages[0].get("role") == "system"):
            raise ValueError(
                f"the chat template {HIDES_TOOLS}, and its record has {len(tools)}; use another template, or describe"
                " them in the system message and remove the field 'tools'"
            )
        shown["tools"] = tools
    return shown


def _lacking(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """What a "char:" tokenizer, whose library says of no character which it was, lacks for a prompt; "" of others."""
    inner: Any = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None or not isinstance(inner.model, models.WordLevel) or inner.pre_tokenizer is None:
        return ""
    text = prompt.text
    if prompt.messages:
        if not tokenizer.chat_template:
            return ""
        text = str(tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, tokenize=False))
    known = tokenizer.get_vocab()
    strange = [one for one, _ in inner.pre_tokenizer.pre_tokenize_str(text) if one not in known]
    if not strange:
        return ""
    names = ", ".join(repr(one) for one in dict.fromkeys(strange[:10]))
    return f"data.tokenizer has no token for {names}; add it to the alphabet behind 'char:', or leave such prompts out"


def encode_reply(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    reply: str,
    end: int | None,
    template_options: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Token ids of a reply to a prompt, with what ends it.

    Args:
        tokenizer: the model's.
        prompt: text or messages.
        reply: may be empty.
        end: the token with which the chat template ends a reply, None where there is no such token; a text's reply is
            ended by the tokenizer's end of sequence.
        template_options: those that the prompt was encoded with.

    Raises:
        ValueError: as `encode_prompt`.
    """
    text = Prompt(id=f"{prompt.id} (reply)", text=reply)
    made = encode_prompt(tokenizer, text, bare=True) if reply else ()
    if made and prompt.messages:
        made = _behind(tokenizer, prompt, reply, template_options) or made
    last = end if prompt.messages and end is not None else tokenizer.eos_token_id
    return (*made, last)


def _behind(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, reply: str, options: Mapping[str, Any] | None
) -> tuple[int, ...]:
    """A reply's ids as they are generated behind white space, with which many templates begin a reply: tokenizers of
    Llama 2's kind put a space before a text that stands alone. Empty where it makes no difference that can be told."""
    probe, line, end = (tokenizer.encode(text, add_special_tokens=False) for text in ("\na", "a", "\n"))
    if probe == end + line:  # most do not: nothing to render once more for
        return ()
    shown = _shown_with(tokenizer, prompt, options)
    messages = _for_template(tokenizer, prompt)
    rendered = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **shown))
    before = rendered[-1:] if rendered[-1:].isspace() else ""
    alone = tokenizer.encode(before, add_special_tokens=False) if before else []
    joined = tokenizer.encode(before + reply, add_special_tokens=False) if before else []
    return tuple(joined[len(alone) :]) if joined[: len(alone)] == alone else ()


def _with_beginning(tokenizer: PreTrainedTokenizerBase, text: str, bare: list[int]) -> list[int]:
    """The ids of a text to go on from: with the special tokens that the tokenizer puts before it, and without an end of
    sequence behind it, with which some tokenizers say that nothing follows."""
    tokens: list[int] = tokenizer.encode(text)
    ended = tokens[-1:] == [tokenizer.eos_token_id] and tokens[-1 - len(bare) : -1] == bare
    return tokens[:-1] if ended else tokens


def texts_of(source: PromptSource) -> Iterator[str]:
    """What "train:" learns from: prompts and solutions of the source, the first 20,000 (2,000 where it has no end).

    Raises ValueError for a prompt with half a character in it, by name.
    """
    for prompt in source.first(2_000 if source.size is None else 20_000):
        messages = (str(message.get("content") or "") for message in prompt.messages)
        for text in (prompt.text, *messages, prompt.solution or prompt.answer):
            if has_surrogate(text):
                raise ValueError(f"prompt '{prompt.id}' holds half a character (a lone surrogate); write the whole one")
            yield text


def _characters(alphabet: str) -> PreTrainedTokenizerBase:
    if not alphabet:
        raise ValueError("tokenizer: 'char:' has no alphabet; write its characters after the colon")
    twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if twice:
        raise ValueError(f"tokenizer: {''.join(twice)!r} more than once in the alphabet of 'char:{alphabet}'")
    vocabulary = {token: index for index, token in enumerate([*_SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))  # no unknown token: other characters raise
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrap(tokenizer)


def _trained(size: str, texts: Iterable[str] | None) -> PreTrainedTokenizerBase:
    if not size.isdecimal() or int(size) < _SMALLEST:
        raise ValueError(f"tokenizer: 'train:{size}', the vocabulary size must be a number from {_SMALLEST} up")
    if texts is None:
        raise ValueError(f"tokenizer: 'train:{size}' needs texts to learn from")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=int(size),
        special_tokens=_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=_TEMPLATE
    )
