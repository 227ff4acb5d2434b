"""What ends a reply of a model: the one place that knows.

Three say so, and models differ in who says what: the tokenizer (`eos_token`), the model (`eos_token_id` of its
generation configuration and configuration: Llama 3.1 names three, Gemma its end of turn), the chat template (ChatML on
a base model, whose `eos_token` ends documents). A reply ends with any of them, whatever a workflow's `stop` adds; the
one that is sampled is trained like every other token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from datamodules.conversations.chat_template import Chat
from datamodules.inference.export import base_model


@dataclass(frozen=True)
class TurnEnds:
    """The tokens that end a reply.

    Attributes:
        said_by: token id -> who says that it does, of "tokenizer", "model" and "template".
    """

    said_by: Mapping[int, tuple[str, ...]]

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None = None, vocab_size: int | None = None
    ) -> TurnEnds:
        """What ends a reply of `model` under `tokenizer`.

        Args:
            tokenizer: the model's.
            model: None leaves out what only the model says.
            vocab_size: ids from here on are left out: the model cannot say them. None leaves none out.
        """
        said_by: dict[int, tuple[str, ...]] = {}
        for who, tokens in (
            ("tokenizer", [tokenizer.eos_token_id]),
            ("model", [] if model is None else model_ends(model)),
            ("template", [template_end(tokenizer)]),
        ):
            for token in tokens:
                if token is not None and (vocab_size is None or token < vocab_size):
                    said_by[token] = (*said_by.get(token, ()), who)
        return cls(said_by)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.said_by)

    def line(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> str:
        """One line for a log: the tokens, who says so, and what a workflow adds."""
        said = [f"{tokenizer.convert_ids_to_tokens(t)!r} = {t} ({', '.join(by)})" for t, by in self.said_by.items()]
        return f"a reply ends with {', '.join([*said, *(f'{text!r} (stop)' for text in stop)])}"


def model_ends(model: PreTrainedModel) -> list[int]:
    """Ends of sequence that the model's generation configuration and configuration name, each once."""
    base: Any = base_model(model)
    found: list[int] = []
    for one in (getattr(base, "generation_config", None), base.config.get_text_config(), base.config):
        named = getattr(one, "eos_token_id", None)
        found += named if isinstance(named, list | tuple) else [] if named is None else [named]
    return list(dict.fromkeys(found))


def template_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token with which the chat template ends a reply; None without a template, or without such a token."""
    return Chat(tokenizer).end if tokenizer.chat_template else None
