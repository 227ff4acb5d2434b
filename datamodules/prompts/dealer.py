"""Deals encoded prompts by stream index, and refuses those that do not fit the model.

Promises: what is dealt has token ids inside the vocabulary and room for a reply; prompts too long for the context
are an error before the first rollout, or left out with a logged count where the user chose that. Pictures are prepared
for the model, and the prompt has a placeholder for each row of theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from transformers import PreTrainedTokenizerBase

from datamodules.conversations.image_processor import ImageProcessor, distinct
from datamodules.files.picture_files import PictureError
from datamodules.prompts.base import Prompt, PromptSource
from datamodules.prompts.tokenizers import encode_prompt

_log = logging.getLogger(__name__)


class PromptTooLong(ValueError):
    """A prompt that leaves no room for its reply; the message names it."""


class PromptDealer:
    """Encodes the prompts of `source` for a model with `max_context` tokens, `reply_tokens` of them for the reply.

    Args:
        source: where prompts come from.
        tokenizer: the model's.
        vocab_size: of the model.
        max_context: tokens of prompt and reply together.
        reply_tokens: most new tokens the workflow asks for.
        encode: prompt -> the token ids its episodes begin with; None for the prompt's own text or messages.
        long_prompts: "error" refuses a source with prompts that do not fit, "skip" leaves those prompts out.
        image_processor: the model's; None for one that sees no pictures.
    """

    def __init__(
        self,
        source: PromptSource,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        max_context: int,
        reply_tokens: int,
        encode: Callable[[Prompt], Sequence[int]] | None = None,
        long_prompts: Literal["error", "skip"] = "error",
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self.source = source
        self._encode_tokens = encode or partial(encode_prompt, tokenizer)
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._reply_tokens = reply_tokens
        self._skips = long_prompts == "skip"
        self._image_processor = image_processor

    def deal(self, index: int) -> Prompt | None:
        """The encoded prompt at `index`; None where it is too long and long prompts are skipped.

        Raises:
            PromptTooLong: it is too long, and they are not skipped.
            ValueError: it cannot be encoded for this model.
        """
        try:
            return self._encode(self.source.deal(index))
        except PromptTooLong:
            if self._skips:
                return None
            raise

    def check(self) -> None:
        """Encodes the source's samples (every prompt, where it has an end): what is wrong shows before training.

        Raises:
            ValueError: prompts too long (how many, the first names, the remedy), or that cannot be encoded; or every
                prompt would be skipped.
        """
        too_long: list[str] = []
        looked_at = 0
        for prompt in self.source.samples():
            looked_at += 1
            try:
                self._encode(prompt)
            except PromptTooLong:
                too_long.append(prompt.id)
        if not too_long:
            return
        what = (
            f"{len(too_long)} of {looked_at} prompts of '{self.source.name}' leave no room for {self._reply_tokens} new"
            f" tokens in the model's context of {self._max_context} (such as {', '.join(map(repr, too_long[:3]))})"
        )
        if not self._skips or len(too_long) == looked_at:
            raise ValueError(
                f"prompts: {what}; lower max_new_tokens, use a model with a longer context (of EmbeddedEngine at most"
                " kv_cache_tokens, of servers in urls their --context-length, of `arborist serve`"
                " --context), or set limits.long_prompts: skip to leave such prompts out"
            )
        _log.warning("limits.long_prompts: skip leaves prompts out: %s", what)

    def _encode(self, prompt: Prompt) -> Prompt:
        prompt = encoded(prompt, self._encode_tokens, self._image_processor)
        tokens = prompt.tokens
        if not tokens:
            raise ValueError(f"prompt '{prompt.id}' has no tokens: the workflow's encode returned none")
        if max(tokens) >= self._vocab_size:
            raise ValueError(
                f"prompt '{prompt.id}' has token {max(tokens)}, outside the model's vocabulary of {self._vocab_size};"
                " use the tokenizer that belongs to the model"
            )
        if len(tokens) + self._reply_tokens > self._max_context:
            raise PromptTooLong(
                f"prompt '{prompt.id}' has {len(tokens)} tokens, which leaves no room for {self._reply_tokens} new ones"
                f" in the model's context of {self._max_context}; lower max_new_tokens or shorten the prompt"
            )
        return prompt


def encoded(
    prompt: Prompt, encode: Callable[[Prompt], Sequence[int]], image_processor: ImageProcessor | None
) -> Prompt:
    """The prompt with its tokens and, prepared, its pictures.

    Args:
        encode: prompt -> token ids, one placeholder for each picture.
        image_processor: the model's; None for one that sees no pictures.

    Raises:
        ValueError: it cannot be encoded; PictureError: pictures that cannot be used, or that no message shows.
    """
    where = f"prompt '{prompt.id}'"
    if image_processor is None:
        if prompt.pictures:
            raise PictureError(
                f"{where} has pictures, and the model has no image processor: the directory that data.tokenizer names"
                " needs the model's config.json and preprocessor_config.json"
            )
        return replace(prompt, tokens=tuple(encode(prompt)))
    prompt = replace(
        prompt,
        text=image_processor.quoted(prompt.text),
        messages=image_processor.quoted_messages(prompt.messages),
        pictures=tuple(image_processor.picture(one, f"{where}, picture {k}") for k, one in enumerate(prompt.pictures)),
    )
    tokens, images = image_processor.expanded(tuple(encode(prompt)), prompt.pictures, where)
    pictures = distinct(prompt.pictures)
    return replace(prompt, tokens=tokens, pictures=pictures, images=images if pictures else ())
