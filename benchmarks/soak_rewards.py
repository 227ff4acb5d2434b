"""A reward that turns bad at a moment of somebody else's choosing: when a file appears.

Cheap to import: reward workers do it.
"""

from __future__ import annotations

import ctypes
import os
import time

from datamodules.prompts.base import Prompt

_LEAKED: list[bytes] = []
LEAK_BYTES = 30 * 10**6
_LEAKING = False


class TurnsBad:
    """The share of right digits; but the call that finds the file takes it away and does as `how` says.

    Args:
        how: "hang", "segfault" or "leak" (this call and every later one of that process keep 30 MB).
        flag: path of the file.
    """

    def __init__(self, how: str, flag: str) -> None:
        self.how = how
        self.flag = flag

    def __call__(self, prompt: Prompt, completion: str) -> float:
        global _LEAKING
        if self._taken():
            if self.how == "segfault":
                ctypes.string_at(0)
            while self.how == "hang":
                time.sleep(1.0)
            _LEAKING = True
        if _LEAKING:
            _LEAKED.append(b"x" * LEAK_BYTES)
        return sum(said == right for said, right in zip(completion, prompt.answer)) / len(prompt.answer)

    def _taken(self) -> bool:
        try:
            os.rename(self.flag, f"{self.flag}.{os.getpid()}")  # one call only, whatever runs beside it
        except FileNotFoundError:
            return False
        return True
