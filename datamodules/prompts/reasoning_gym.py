"""Prompts from the tasks of the library reasoning-gym, made when they are dealt: nothing is downloaded.

Promises: prompt i depends on (task, options, seed, i) alone; two sources of one task with different seeds share no
draws, so that one of them can be held out. Score them with `datamodules.rewards.ReasoningGym`, the task's own verifier.

    class_path: datamodules.prompts.ReasoningGymPrompts
    init_args: {task: chain_sum, options: {max_terms: 4}, size: 10000}
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import islice
from typing import Any

from app import checks
from datamodules.prompts.base import Prompt, PromptSource
from datamodules.prompts.extras import needs
from datamodules.prompts.records import RecordFormat

METADATA = "reasoning_gym"
"""Key of a prompt's metadata with what its verifier needs: task, options and entry."""

_APART = 1_000_000  # the library seeds entry i with seed + i: neighbouring seeds would deal the same problems
_SAMPLE = 64  # some tasks take a third of a second a problem


class ReasoningGymPrompts(PromptSource):
    """`size` problems of one task, then the same again. Several tasks: `MixedPrompts`.

    Args:
        task: name of a task, such as "chain_sum" or "countdown".
        options: of the task (its difficulty); the library's defaults for others.
        size: problems, at most 1,000,000. For validation take another seed.
        template: text of the prompt, with the problem's {question} in braces.
        chat: makes the text a user message, rendered with the tokenizer's chat template.
        system: system message before it (needs chat), such as an order to answer inside <answer> </answer>.
        seed: of the problems, at least 0.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: a task or option that is not the library's, an argument out of range or without effect.
    """

    def __init__(
        self,
        task: str,
        options: dict[str, Any] | None = None,
        size: int = 10_000,
        template: str | None = None,
        chat: bool = False,
        system: str | None = None,
        seed: int = 0,
    ) -> None:
        if not 1 <= size <= _APART:
            raise ValueError(f"ReasoningGymPrompts.size: {size}, must be from 1 to {_APART:,}")
        checks.at_least(0, {"ReasoningGymPrompts.seed": seed})
        stray = [key for key in options or {} if key in ("size", "seed")]
        if stray:
            raise ValueError(f"ReasoningGymPrompts.options.{stray[0]}: set ReasoningGymPrompts.{stray[0]} instead")
        self.task = task
        self.options = dict(options or {})
        self.format = RecordFormat("ReasoningGymPrompts", template=template, chat=chat, system=system)
        self.format.check_chat(is_messages=False)
        self._size = size
        self._seed = seed
        self._problems = make_task(task, {**self.options, "seed": seed * _APART, "size": size})

    @property
    def name(self) -> str:
        return self.task

    @property
    def size(self) -> int:
        return self._size

    def deal(self, index: int) -> Prompt:
        at = index % self._size
        entry = self._problems[at]
        name = f"{self.task}:{self._seed}:{at}"
        found = self.format.prompt({"question": entry["question"], "answer": str(entry["answer"])}, name, name)
        found.metadata[METADATA] = {"task": self.task, "options": self.options, "entry": entry}
        return found

    def samples(self) -> Iterator[Prompt]:
        return islice(self.first(self._size), _SAMPLE)


def make_task(task: str, options: dict[str, Any]) -> Any:
    """The library's own data set of a task. Raises ValueError naming the task or the option that is none of its."""
    needs("reasoning_gym", "reasoning-gym", "ReasoningGymPrompts")
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(sorted(DATASETS))}"
        raise ValueError(f"ReasoningGymPrompts.task: '{task}' is none of reasoning-gym's tasks; {hint}")
    known = list(DATASETS[task][1].__dataclass_fields__)
    stray = [key for key in options if key not in known]
    if stray:
        raise ValueError(
            f"ReasoningGymPrompts.options.{stray[0]} is no option of '{task}'; it has {', '.join(sorted(known))}"
        )
    try:
        return create_dataset(task, **options)
    except Exception as error:  # its checks are assertions
        raise ValueError(f"ReasoningGymPrompts.options of '{task}': {type(error).__name__}: {error}") from error
