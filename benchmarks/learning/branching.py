"""A task whose episodes branch: at every turn one digit has to be said, and only the end of the episode is rewarded.

The prompt "3174" is played as "3+1=" 4, "-1+7=" 8, "-7+4=" 1, "-4+3=" 7: four sums modulo 10, one after the other.
The reward is the share of right turns, given once. Samples of a prompt share their first turns as long as they say the
same, so a prefix tree of a group has forks in it, with several episodes below each.
"""

from __future__ import annotations

import random
import zlib
from typing import Literal

from app.batch import Trajectory
from datamodules.inference.protocol import GenerationRequest
from datamodules.prompts.base import Prompt, PromptSource
from datamodules.workflows.base import EpisodeEngine, to_trajectory


class StepPrompts(PromptSource):
    """Digits, each to be added to the next one (the last to the first) in a turn of its own.

    Args:
        turns: digits of a prompt.
        split: "train" or "validation", which are disjoint.
        size: prompts after which the source starts over; None for no end.
        seed: of the draws.
    """

    def __init__(
        self, turns: int = 4, split: Literal["train", "validation"] = "train", size: int | None = None, seed: int = 0
    ) -> None:
        if turns < 2:
            raise ValueError(f"StepPrompts.turns: {turns}, must be at least 2")
        self.turns, self.split, self._size, self.seed = turns, split, size, seed

    @property
    def size(self) -> int | None:
        return self._size

    def deal(self, index: int) -> Prompt:
        rng = random.Random(f"{self.seed}/{index % self._size if self._size else index}")
        while True:
            digits = "".join(rng.choice("0123456789") for _ in range(self.turns))
            if (zlib.crc32(digits.encode()) % 10 == 0) == (self.split == "validation"):
                break
        first, *others = questions(digits)
        answer = "".join(str((int(a) + int(b)) % 10) for a, b in pairs(digits))
        solution = answer[0] + "".join(asked + said for asked, said in zip(others, answer[1:]))
        return Prompt(id=digits, text=first, answer=answer, solution=solution)


def pairs(digits: str) -> list[tuple[str, str]]:
    return list(zip(digits, digits[1:] + digits[0]))


def questions(digits: str) -> list[str]:
    """What the environment says in each turn."""
    return [("-" if turn else "") + f"{a}+{b}=" for turn, (a, b) in enumerate(pairs(digits))]


class StepsWorkflow:
    """Plays the task: a token a turn, then the next question."""

    max_new_tokens = 1

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        tokens = list(prompt.tokens)
        following = [*questions(prompt.id)[1:], ""]
        played: list[Trajectory] = []
        right = 0
        for turn, (wanted, question) in enumerate(zip(prompt.answer, following)):
            request = GenerationRequest(list(tokens), max_new_tokens=1)
            response = await engine.generate(request)
            played.append(to_trajectory(prompt, request, response, turn))
            right += engine.tokenizer.decode(response.tokens) == wanted
            tokens += [*response.tokens, *engine.tokenizer.encode(question, add_special_tokens=False)]
        for one in played:
            one.reward = right / len(prompt.answer)
        return played
