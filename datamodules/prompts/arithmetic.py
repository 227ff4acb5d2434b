"""Arithmetic made on the fly: "17+25=" with the answer "42". Endless, needs no data, difficulty is an option.

Promises: prompt i depends on (seed, i) and the difficulty alone; the validation split is disjoint from the training
split whatever the seeds, because the problem itself decides which split it belongs to (commuted problems included);
both have to have one `holdout`, by which it decides.
"""

from __future__ import annotations

import random
import zlib
from functools import reduce
from typing import Literal

from app import checks
from datamodules.prompts.base import Prompt, PromptSource

_APPLY = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
_TRIES = 10_000


class ArithmeticPrompts(PromptSource):
    """Sums, differences and products of non-negative integers.

    Args:
        digits: most digits of an operand; each operand first draws its number of digits, then its value.
        operators: characters out of "+-*"; one problem uses one of them throughout.
        operands: numbers in a problem, at least 2 (evaluated from left to right).
        split: "train" or "validation".
        size: number of prompts after which the source starts over; None for no end. The prompts of a sized
            source are distinct.
        holdout: one in `holdout` of all problems belongs to the validation split. The same in both splits: the ones
            held out by another number are others.
        seed: of the draws.

    Raises:
        ValueError: an argument out of range, or a split with fewer than `size` distinct problems.
    """

    def __init__(
        self,
        digits: int = 2,
        operators: str = "+",
        operands: int = 2,
        split: Literal["train", "validation"] = "train",
        size: int | None = None,
        holdout: int = 10,
        seed: int = 0,
    ) -> None:
        checks.at_least(1, {"ArithmeticPrompts.digits": digits, "ArithmeticPrompts.size": size})
        checks.at_least(2, {"ArithmeticPrompts.operands": operands, "ArithmeticPrompts.holdout": holdout})
        checks.one_of("ArithmeticPrompts.split", split, ("train", "validation"))
        if not operators or set(operators) - set(_APPLY):
            raise ValueError(f"ArithmeticPrompts.operators: {operators!r}, choose from '+-*'")
        self.digits = digits
        self.operators = operators
        self.operands = operands
        self.split = split
        self.holdout = holdout
        self.seed = seed
        self._prompts = None if size is None else self._distinct(size)

    @property
    def name(self) -> str:
        return "arithmetic"

    @property
    def size(self) -> int | None:
        return None if self._prompts is None else len(self._prompts)

    def deal(self, index: int) -> Prompt:
        if self._prompts is not None:
            return self._prompts[index % len(self._prompts)]
        return self._draw(index)

    def _distinct(self, size: int) -> list[Prompt]:
        found: dict[str, Prompt] = {}
        for index in range(20 * size + _TRIES):
            prompt = self._draw(index)
            found.setdefault(prompt.text, prompt)
            if len(found) == size:
                return list(found.values())
        raise ValueError(
            f"ArithmeticPrompts.size: {size}, but only {len(found)} distinct problems were found in the {self.split}"
            " split; lower size, or raise digits, operands or operators"
        )

    def _draw(self, index: int) -> Prompt:
        rng = random.Random(f"{self.seed}/{index}")
        for _ in range(_TRIES):
            operator = rng.choice(self.operators)
            numbers = [rng.randrange(10 ** rng.randint(1, self.digits)) for _ in range(self.operands)]
            if self._held_out(operator, numbers) == (self.split == "validation"):
                text = operator.join(map(str, numbers))
                return Prompt(id=text, text=f"{text}=", answer=str(reduce(_APPLY[operator], numbers)))
        raise ValueError(
            f"ArithmeticPrompts: no problem of the {self.split} split in {_TRIES} draws; raise digits, operands or"
            f" operators, or lower holdout ({self.holdout})"
        )

    def _held_out(self, operator: str, numbers: list[int]) -> bool:
        # 17+25 and 25+17 are one problem; "-" stays ordered.
        key = numbers if operator == "-" else sorted(numbers)
        return zlib.crc32(f"{operator}{key}".encode()) % self.holdout == 0
