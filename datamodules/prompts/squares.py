"""Coloured squares to be counted, rendered on the fly: the smallest task in which a picture has to be seen.

Promises: prompt i depends on (seed, i) and the options alone; three questions in a row show one picture, so that trees
share it; the validation split is disjoint from the training split whatever the seeds, because the squares themselves
decide which split a picture belongs to; both have to have one `holdout`, by which they decide.
"""

from __future__ import annotations

import zlib
from typing import Literal

import numpy as np
import numpy.typing as npt

from app import checks
from datamodules.prompts.base import Prompt, PromptSource

_COLOURS = {"r": (220, 40, 40), "g": (40, 190, 60), "b": (50, 80, 230)}
_CELLS, _CELL = 4, 7  # cells a side, pixels of a cell
_TRIES = 1_000


class SquaresPrompts(PromptSource):
    """Pictures of 28 x 28 pixels with 1 to 9 squares in red, green and blue; "r=" asks how many are red.

    Args:
        most: squares of a picture, drawn from 1 to so many, at most 16. Their number is drawn first and the split
            decided by where they are, so that both splits have as many of each.
        split: "train" or "validation".
        size: number of prompts after which the source starts over; None for no end.
        holdout: one in `holdout` of all arrangements belongs to the validation split. The same in both splits: the ones
            held out by another number are others.
        seed: of the draws.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        most: int = 9,
        split: Literal["train", "validation"] = "train",
        size: int | None = None,
        holdout: int = 10,
        seed: int = 0,
    ) -> None:
        checks.at_least(1, {"SquaresPrompts.most": most, "SquaresPrompts.size": size})
        checks.at_most(_CELLS**2, {"SquaresPrompts.most": most})
        checks.at_least(2, {"SquaresPrompts.holdout": holdout})
        checks.one_of("SquaresPrompts.split", split, ("train", "validation"))
        self.most, self.split, self.holdout, self.seed = most, split, holdout, seed
        self._size = size
        letters = [f"{cell}{letter}" for cell in range(_CELLS**2) for letter in "rgb"]  # the fewest: of one square
        if not any(map(self._is_held_out, letters)):
            raise ValueError(
                f"SquaresPrompts.holdout: {holdout} leaves no picture of one square to the validation split; lower it"
                " (10 is usual)"
            )

    @property
    def name(self) -> str:
        return "squares"

    @property
    def size(self) -> int | None:
        return self._size

    def deal(self, index: int) -> Prompt:
        index = index if self._size is None else index % self._size
        number, which = divmod(index, len(_COLOURS))
        pixels, counts = self._picture(number)
        letter = "rgb"[which]
        content = [{"type": "image"}, {"type": "text", "text": f"{letter}="}]
        return Prompt(
            id=f"{self.split} {number} {letter}",
            messages=({"role": "user", "content": content},),
            answer=str(counts[letter]),
            pictures=(pixels,),
        )

    def _is_held_out(self, arrangement: str) -> bool:
        return zlib.crc32(arrangement.encode()) % self.holdout == 0

    def _picture(self, number: int) -> tuple[npt.NDArray[np.uint8], dict[str, int]]:
        rng = np.random.default_rng([self.seed, number])
        count = int(rng.integers(1, self.most + 1))
        for _ in range(_TRIES):
            cells = rng.permutation(_CELLS**2)[:count]
            letters = rng.integers(len(_COLOURS), size=len(cells))
            arrangement = ",".join(f"{cell}{'rgb'[k]}" for cell, k in sorted(zip(cells.tolist(), letters.tolist())))
            if self._is_held_out(arrangement) == (self.split == "validation"):
                break
        else:
            raise ValueError(f"SquaresPrompts: no picture of the {self.split} split in {_TRIES} draws; lower holdout")
        pixels = rng.normal(30, 12, (_CELLS * _CELL, _CELLS * _CELL, 3))
        for cell, k in zip(cells.tolist(), letters.tolist()):
            side = int(rng.integers(3, 6))
            row, column = (at * _CELL + int(rng.integers(_CELL - side + 1)) for at in divmod(cell, _CELLS))
            pixels[row : row + side, column : column + side] += np.array(_COLOURS["rgb"[k]]) - 30
        counts = {letter: int((letters == k).sum()) for k, letter in enumerate("rgb")}
        return pixels.clip(0, 255).astype(np.uint8), counts
