"""What a prompt is and where prompts come from.

Promises: a source is a function of the stream index alone (given its arguments), so a stream resumes from one
number and two machines deal the same prompts; importing this module is cheap, reward workers do it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """A task for one episode.

    Attributes:
        id: stable name, for logs and errors.
        text: what the model sees, when `messages` is empty.
        messages: conversation so far (`role`, `content`), rendered with the tokenizer's chat template.
        answer: reference answer, for rewards.
        solution: text that supervised training imitates; the answer when empty.
        metadata: whatever else rewards and workflows need; JSON-able.
        tokens: ids of the rendered prompt, filled in by the datamodule before a workflow sees it.
        pictures: what the parts `{"type": "image"}` of messages show, in their order: anything that
            `datamodules.files.picture_files.pixels_of` takes. Before a workflow sees them the datamodule makes them
            `app.pictures.Picture`s, each distinct one once. Reward workers get none.
        images: for each of `tokens` the index of its picture, or -1; filled in with them, empty without pictures.

    Raises:
        ValueError: an id, text, answer or solution that is no text.
    """

    id: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    answer: str = ""
    solution: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()
    pictures: tuple[Any, ...] = ()
    images: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("id", "text", "answer", "solution"):
            value: Any = getattr(self, name)
            if not isinstance(value, str):
                raise ValueError(f"Prompt.{name}: {str(value)[:40]!r} is a {type(value).__name__}, must be text")

    def conversation(self) -> list[dict[str, Any]]:
        """The prompt as messages; text is what a user says."""
        return [dict(one) for one in self.messages] or [{"role": "user", "content": self.text}]


_SAMPLE = 256  # prompts of a source without end that stand for the others


class PromptSource(ABC):
    """Prompts by stream index. Subclass it for your own data; nothing else is needed."""

    @property
    def name(self) -> str:
        """Name of the prompt set in metrics and logs."""
        return type(self).__name__

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Number of distinct prompts, None when there is no end to them."""

    @abstractmethod
    def deal(self, index: int) -> Prompt:
        """The prompt at stream position `index` >= 0; finite sources start over after `size`."""

    def first(self, count: int) -> Iterator[Prompt]:
        """The first `count` prompts, fewer when the source has fewer. Raises ValueError for one that is none."""
        size = self.size
        for index in range(count if size is None else min(count, size)):
            dealt: Any = self.deal(index)
            if not isinstance(dealt, Prompt):
                raise ValueError(f"{type(self).__name__}.deal({index}) returned {type(dealt).__name__}, not a Prompt")
            yield dealt

    def samples(self) -> Iterator[Prompt]:
        """What is looked at before training, for mistakes: every prompt once; 256 of a source without end."""
        return self.first(_SAMPLE if self.size is None else self.size)


def prompt_source(value: object, key: str) -> PromptSource:
    """`value`, if it is a source of prompts; else ValueError names the option `key`."""
    if not isinstance(value, PromptSource):
        raise ValueError(f"{key}: {type(value).__name__} is no PromptSource; subclass datamodules.prompts.PromptSource")
    return value
