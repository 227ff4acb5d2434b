"""What runs in a reward worker: one reward function, its answers checked.

Promises: what leaves is a finite number with at most 64 finite parts of short names, and bounded words; text is no
number.
"""

from __future__ import annotations

from collections.abc import Callable

from app.text import well_formed
from datamodules.processes.worker import NotAnAnswer
from datamodules.prompts.base import Prompt
from datamodules.rewards.functions import Reward, asked, in_words, number, prepare, was_unreadable
from datamodules.rewards.options import FEEDBACK

MOST_PARTS = 64
_MOST_NAME = 100


class RewardCalls:
    """Calls `reward` for a worker process.

    Args:
        reward: see `functions.Reward`. Where it has a method `prepare()`, that is called before the first call; what it
            does (imports, say) counts for the worker's start and not for a call's deadline.
    """

    is_for_people = True  # what it raises

    def __init__(self, reward: Callable[[Prompt, str], Reward]) -> None:
        self._reward = reward

    def prepare(self) -> None:
        prepare([self._reward])

    def __call__(self, prompt: Prompt, completion: str) -> tuple[float, dict[str, float], bool, str]:
        """Number, parts, whether nobody could read the completion, and what the reward says in words.

        Raises NotAnAnswer where the reward gives no finite number ("nan"), too many parts included ("exception")."""
        was_unreadable()
        result = asked(self._reward, prompt, completion)
        unreadable = was_unreadable()
        value, parts = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(parts, dict):
            raise NotAnAnswer(f"returned parts that are a {type(parts).__name__}, not a dictionary", "exception")
        if len(parts) > MOST_PARTS:
            raise NotAnAnswer(f"returned {len(parts)} parts, at most {MOST_PARTS} are taken", "exception")
        said = in_words(parts)
        named = {well_formed(str(name))[:_MOST_NAME]: part for name, part in parts.items()}
        if isinstance(named.get(FEEDBACK), str):
            del named[FEEDBACK]
        checked = {name: number(part, f" for its part '{name}'") for name, part in named.items()}
        return number(value, ""), checked, unreadable, said
