"""A tokenizer's chat template, as conversations of several turns need it: a beginning, and what follows a reply.

Promises: what follows a reply is exactly what the template puts there, the end of the turn included where the reply
was cut off before it; the reply itself is not looked at again. A template that cannot do so is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from datamodules.prompts.base import Prompt

Message = dict[str, Any]

_REPLY = "@@reply@@"  # stands for a reply in a rendered conversation


class Chat:
    """Messages to token ids.

    Args:
        tokenizer: with a chat template.
        tools: JSON schemas the template shows to the model, None for none.
        options: further arguments of the template, such as `{"enable_thinking": False}`.

    Raises:
        ValueError: no chat template, or one that takes no notice of the tools.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: list[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError("tokenizer: it has no chat template, which this workflow needs; use a chat model's")
        self._tokenizer = tokenizer
        self._tools = tools
        self._options = options or {}
        self._end = tokenizer.eos_token
        self._special = [token for token in tokenizer.all_special_tokens if len(token) > 1]
        if tools:
            probe = [{"role": "user", "content": "."}]
            if self._render(probe, tools) == self._render(probe, None):
                raise ValueError(
                    "tokenizer: its chat template does not show tools to the model; use a model whose template does, or"
                    " describe them in the prompts' system message and set show_tools: false"
                )

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """A whole conversation, up to where the next reply begins. Raises ValueError as `after_reply`."""
        return self._encode(self._render(messages, self._tools))

    def after_reply(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """What comes between a reply and the next one when `messages` do.

        Args:
            messages: what the model is told.
            ended: the reply closed with the tokenizer's end-of-sequence token; it is added where it did not and the
                template ends turns with it.

        Raises:
            ValueError: the template cannot render them, does not show what the assistant said, or text the tokenizer
                has no tokens for.
        """
        text = self._render(
            [{"role": "user", "content": "."}, {"role": "assistant", "content": _REPLY}, *messages], None
        )
        _before, found, after = text.partition(_REPLY)
        if not found:
            raise ValueError(
                "tokenizer: its chat template does not show what the assistant said; set sequences: rendered"
            )
        closed, _, rest = after.partition(self._end)
        if closed.strip() == "" and len(closed) < len(after):  # templates of models trained from nothing have no end
            after = rest if ended else self._end + rest
        return self._encode(after)

    def quoted(self, text: str) -> str:
        """`text` with a space in each special token it spells: what a tool returns cannot end its own message."""
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
        render: Callable[..., Any] = self._tokenizer.apply_chat_template
        try:
            return str(render(list(messages), tools=tools, tokenize=False, add_generation_prompt=True, **self._options))
        except Exception as error:  # templates raise whatever they like
            roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))
            raise ValueError(
                f"tokenizer: its chat template cannot render messages of the roles {roles}: {error}"
            ) from error

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ValueError(f"tokenizer: it cannot encode {text[:80]!r}: {error}") from error


def messages_of(prompt: Prompt) -> list[Message]:
    """The prompt as messages; text is what a user says."""
    return [dict(one) for one in prompt.messages] or [{"role": "user", "content": prompt.text}]
