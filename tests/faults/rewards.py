"""A reward that turns bad at a moment of somebody else's choosing: when a file appears.

Cheap to import: reward workers do it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

from datamodules.prompts.base import Prompt

_LEAKED: list[bytes] = []
LEAK_BYTES = 30 * 10**6
_LEAKING = False
HALF = "half \ud83d"
_HALF = False
_FORKING = False


def right_digits(answer: str, completion: str) -> float:
    """The share of the answer's digits that the completion has in their places."""
    return sum(said == right for said, right in zip(completion, answer)) / len(answer)


class TurnsBad:
    """The share of right digits; but the call that finds the file takes it away and does as `how` says.

    Args:
        how: "hang", "segfault", "leak" (this call and every later one of that process keep 30 MB), "half" (this call
            raises half an emoji, every later one of that process has it in the name of a part) or "fork" (this call and
            every later one of that process fork children that return another number, raise and leave).
        flag: path of the file.
    """

    def __init__(self, how: str, flag: str) -> None:
        self.how = how
        self.flag = flag

    def __call__(self, prompt: Prompt, completion: str) -> float | tuple[float, dict[str, float]]:
        global _LEAKING, _HALF, _FORKING
        if self._taken():
            if self.how == "segfault":
                ctypes.string_at(0)
            while self.how == "hang":
                time.sleep(1.0)
            if self.how == "half":
                _HALF = True
                raise ValueError(HALF)
            _LEAKING = self.how == "leak"
            _FORKING = self.how == "fork"
        if _LEAKING:
            _LEAKED.append(b"x" * LEAK_BYTES)
        reward = right_digits(prompt.answer, completion)
        if _FORKING:
            if os.fork() == 0:
                return reward + 7.0
            if os.fork() == 0:
                raise RuntimeError("a child")
            if os.fork() == 0:
                sys.exit(0)
        return (reward, {HALF: reward}) if _HALF else reward

    def _taken(self) -> bool:
        try:
            os.rename(self.flag, f"{self.flag}.{os.getpid()}")  # one call only, whatever runs beside it
        except FileNotFoundError:
            return False
        return True
