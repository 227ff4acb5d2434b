"""Reward functions: `(prompt, completion) -> Reward`, run in worker processes by `RewardPool`.

Promises: an answer that cannot be judged raises (its group is dropped and counted) instead of scoring 0 in silence; a
completion without an answer is wrong, 0.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from datamodules.prompts.base import Prompt

Reward: TypeAlias = float | tuple[float, dict[str, float]]
"""A number; or a number and what it is made of, by name, which is logged as `reward/<name>`."""

MARKED = re.compile(r"^####[ \t]*(\S.*)\s*\Z", re.MULTILINE)
"""A last line with GSM8K's mark of the answer."""


def exact_match(prompt: Prompt, completion: str) -> float:
    """1.0 when the completion is the prompt's answer, white space around both aside; else 0.0."""
    return float(completion.strip() == prompt.answer.strip())


def math_verify(prompt: Prompt, completion: str) -> float:
    """1.0 when the completion's answer equals the prompt's, as mathematics (library math-verify).

    Its answer is a last line "#### ..." (GSM8K's mark); else what the library takes for one: boxed, announced ("the
    answer is ..."), or the last expression. "1,000", "1000.0" and "$\\boxed{1000}$" are equal. The library's own time
    limits use a signal, which works in the main thread of a process only: there the pool runs its rewards.

    Raises:
        ValueError: the prompt's answer is no mathematical expression.
        math_verify.errors.TimeoutException: parsing or comparing took longer than its 5 s.
    """
    import math_verify as library  # seconds of imports that other rewards need not pay

    reference = library.parse(_mathematical(prompt.answer), raise_on_error=True)
    if not reference:
        raise ValueError(f"the answer of prompt '{prompt.id}', {prompt.answer!r}, is no mathematical expression")
    # Without this, "She answered 5 calls a day.\n#### 40" is read as an announced 5.
    marked = MARKED.search(completion)
    found = library.parse(marked[1] if marked else completion, raise_on_error=True)
    return float(library.verify(reference, found, raise_on_error=True)) if found else 0.0


class RegexMatch:
    """1.0 when the completion has the asked-for form, else 0.0.

    Args:
        pattern: regular expression ("." matches line ends too). If it has a group named "answer", what that finds must
            be the prompt's answer too, white space around both aside.
        whole: the whole completion must match; False looks for the last place where it does.

    Raises:
        ValueError: no regular expression.
    """

    def __init__(self, pattern: str, whole: bool = True) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"RegexMatch.pattern: {pattern!r} is no regular expression: {error}") from None
        self.whole = whole

    def __call__(self, prompt: Prompt, completion: str) -> float:
        matches = [self.pattern.fullmatch(completion)] if self.whole else [None, *self.pattern.finditer(completion)]
        found = matches[-1]
        if found is None:
            return 0.0
        if "answer" not in self.pattern.groupindex:
            return 1.0
        return float((found["answer"] or "").strip() == prompt.answer.strip())


class WeightedSum:
    """A sum of rewards, each part of it logged under its name (before weighting).

    Args:
        rewards: name -> reward: an import path, or class_path and init_args. At least one. One that is itself made of
            parts contributes its total.
        weights: name -> factor; 1.0 for those not named.

    Raises:
        ValueError: no rewards, or a weight of none of them.
    """

    def __init__(
        self, rewards: dict[str, Callable[[Prompt, str], float]], weights: dict[str, float] | None = None
    ) -> None:
        if not rewards:
            raise ValueError("WeightedSum.rewards: empty; name at least one reward")
        stray = [name for name in weights or {} if name not in rewards]
        if stray:
            raise ValueError(f"WeightedSum.weights: '{stray[0]}' is none of the rewards {list(rewards)}")
        self.rewards = rewards
        self.weights = {name: (weights or {}).get(name, 1.0) for name in rewards}

    def __call__(self, prompt: Prompt, completion: str) -> tuple[float, dict[str, float]]:
        parts = {}
        for name, reward in self.rewards.items():
            value: Reward = reward(prompt, completion)
            parts[name] = float(value[0] if isinstance(value, tuple) else value)
        return sum(self.weights[name] * part for name, part in parts.items()), parts


class BySource:
    """Each prompt's reward by the source it is from, for `datamodules.prompts.MixedPrompts`.

    Args:
        rewards: name of the source -> its reward: an import path, or class_path and init_args.

    Raises:
        ValueError: no rewards; (when called) a prompt of none of these sources.
    """

    def __init__(self, rewards: dict[str, Callable[[Prompt, str], float]]) -> None:
        if not rewards:
            raise ValueError("BySource.rewards: empty; give each of the mixed sources its reward")
        self.rewards = rewards

    def __call__(self, prompt: Prompt, completion: str) -> Reward:
        source = prompt.metadata.get("source")
        if source not in self.rewards:
            raise ValueError(
                f"prompt '{prompt.id}' is of the source {source!r}, BySource.rewards has {', '.join(self.rewards)};"
                " name the sources as in MixedPrompts.sources"
            )
        return self.rewards[source](prompt, completion)


def _mathematical(answer: str) -> str:
    """LaTeX outside an environment is not looked at by the library's parser."""
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
