"""Questions about drawn shapes from the package easy-vqa: 48,000 with 13 answers, on 5,000 real PNG files of 64 x 64.

Promises: the package's own split; nothing is downloaded when the run starts; a picture is read when its prompt is dealt
to a model. Three of four questions are answered by yes or no, so look at the kinds apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from app import checks
from datamodules.prompts.base import Prompt, PromptSource
from datamodules.prompts.extras import needs
from datamodules.prompts.order import DealingOrder

_KINDS = ("all", "yes_no", "open")


class EasyVqaPrompts(PromptSource):
    """A picture, a question such as "what color is the triangle?", and a word as the answer.

    Args:
        split: "train" (38,575 questions) or "test".
        kind: "yes_no", "open" (shapes and colours), or "all".
        shuffle: deals a new order every time through the questions; False keeps the package's.
        seed: of the order.
        size: questions to use; None for all.
        system: system message before each: answers are words in lower case, which no question says.

    Raises:
        ImportError: the package is not installed.
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        split: Literal["train", "test"] = "train",
        kind: Literal["all", "yes_no", "open"] = "all",
        shuffle: bool = True,
        seed: int = 0,
        size: int | None = None,
        system: str | None = None,
    ) -> None:
        checks.one_of("EasyVqaPrompts.split", split, ("train", "test"))
        checks.one_of("EasyVqaPrompts.kind", kind, _KINDS)
        checks.at_least(1, {"EasyVqaPrompts.size": size})
        needs("easy_vqa", "easy-vqa", "EasyVqaPrompts")
        import easy_vqa

        texts, answers, numbers = getattr(easy_vqa, f"get_{split}_questions")()
        self.split = split
        self._before = () if system is None else ({"role": "system", "content": system},)
        self._paths: dict[int, str] = getattr(easy_vqa, f"get_{split}_image_paths")()
        rows = zip(texts, answers, numbers)
        self._rows = [row for row in rows if kind == "all" or (row[1] in ("yes", "no")) == (kind == "yes_no")]
        if size is not None and size > len(self._rows):
            raise ValueError(f"EasyVqaPrompts.size: {size}, but {split} has {len(self._rows)} questions of kind {kind}")
        self._order = DealingOrder(size or len(self._rows), shuffle, seed)

    @property
    def name(self) -> str:
        return f"easy_vqa/{self.split}"

    @property
    def size(self) -> int:
        return self._order.count

    def deal(self, index: int) -> Prompt:
        return self._prompt(self._order.at(index))

    def samples(self) -> Iterator[Prompt]:
        """One of every wording: pictures are of one size, and opening one for every question delays a run."""
        return map(self._prompt, {self._rows[row][0]: row for row in range(self.size)}.values())

    def _prompt(self, row: int) -> Prompt:
        text, answer, number = self._rows[row]
        content = [{"type": "image"}, {"type": "text", "text": text}]
        return Prompt(
            id=f"{self.name}:{row}",
            messages=(*self._before, {"role": "user", "content": content}),
            answer=answer,
            metadata={"kind": "yes_no" if answer in ("yes", "no") else "open"},
            pictures=(self._paths[number],),
        )
