"""Single grading: each reply alone, by a rubric.

Promises: every criterion is a part of the reward, logged by its name, from 0 to 1; the reward is their weighted mean,
or the mean of that over repeated judging; a reply is graded by the judge's own numbers or not at all.
"""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from app import checks
from datamodules.prompts.base import Prompt
from datamodules.rewards.judges import material
from datamodules.rewards.judges.answers import points
from datamodules.rewards.judges.base import Judge, Verdict
from datamodules.rewards.judges.client import JudgeClient, Question
from datamodules.rewards.judges.model import JudgeError, JudgeModel
from datamodules.rewards.judges.policy import PolicyModel
from datamodules.rewards.judges.wording import fill, instructions

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
_TAKEN = ("reasoning", "verifier", "drift", "failed", "unreadable")
_MOST_CRITERIA = 20


class RubricJudge(Judge):
    """Grades a reply by criteria.

    Args:
        model: the judge: a model behind a URL, or the policy itself (`PolicyModel`).
        criteria: name -> what earns the points, in words. Names are letters, digits and underscores.
        weights: name -> share in the reward, above 0; 1.0 for those not named.
        scale: points a criterion can get, 1 (yes or no) to 100.
        reference: show the prompt's `answer` as the reference; prompts without one are refused.
        reasoning: let the judge reason before its points. Its tokens are paid for.
        repeats: how often each reply is judged. The mean counts, and the part `disagreement` is the standard deviation
            of the repeats. Above 1 needs a temperature.
        max_characters: of a reply or transcript; longer ones are cut (see `material.cut`) and counted as the part
            `judge_cut`.
        prompt: file with the instructions; None for the packaged `prompts/rubric.md`. Its places are `{fence}`,
            `{criteria}`, `{scale}` and `{form}`.
        verifier: a plain reward beside the judge's; see `Judge`.

    Raises:
        ValueError: an option out of range or without effect.
    """

    repeats: int

    def __init__(
        self,
        model: JudgeModel | PolicyModel,
        criteria: dict[str, str],
        weights: dict[str, float] | None = None,
        scale: int = 10,
        reference: bool = False,
        reasoning: bool = True,
        repeats: int = 1,
        max_characters: int = 40_000,
        prompt: str | None = None,
        verifier: Callable[[Prompt, str], float] | None = None,
    ) -> None:
        name = "RubricJudge"
        checks.at_least(1, {f"{name}.scale": scale, f"{name}.repeats": repeats})
        checks.at_most(100, {f"{name}.scale": scale})
        checks.at_least(100, {f"{name}.max_characters": max_characters})
        if not 1 <= len(criteria) <= _MOST_CRITERIA:
            raise ValueError(f"{name}.criteria: {len(criteria)}, must be 1 to {_MOST_CRITERIA}")
        for one, text in criteria.items():
            if not _NAME.fullmatch(one) or one in _TAKEN or not text.strip():
                raise ValueError(
                    f"{name}.criteria: {one!r}: {text!r}; a name is letters, digits and underscores and none of"
                    f" {', '.join(_TAKEN)}, with words of what earns its points"
                )
        if stray := [one for one in weights or {} if one not in criteria]:
            raise ValueError(f"{name}.weights: '{stray[0]}' is none of the criteria {list(criteria)}")
        self.weights = {one: (weights or {}).get(one, 1.0) for one in criteria}
        checks.positive({f"{name}.weights.{one}": weight for one, weight in self.weights.items()})
        if repeats > 1 and model.temperature == 0:
            raise ValueError(
                f"{name}.repeats: {repeats} has no effect with model.temperature: 0; raise that or remove it"
            )
        self.model = model
        self.criteria = criteria
        self.verifier = verifier
        self._scale = scale
        self._reference = reference
        self.repeats = repeats
        self._most = max_characters
        self._schema = _schema(criteria, scale, reasoning)
        fields = ['"reasoning": "..."'] if reasoning else []
        fields += [f'"{one}": 0..{scale}' for one in criteria]
        values = {
            "criteria": "\n".join(f"- {one}: {text}" for one, text in criteria.items()),
            "scale": str(scale),
            "form": "{" + ", ".join(fields) + "}",
        }
        self._system = fill(instructions(prompt, "rubric.md", f"{name}.prompt", ("fence", *values)), values)

    async def verdicts(self, client: JudgeClient, prompt: Prompt, replies: Sequence[Any]) -> list[Verdict]:
        return [await self._grade(client, prompt, reply) for reply in replies]

    async def _grade(self, client: JudgeClient, prompt: Prompt, reply: Any) -> Verdict:
        text, was_cut = material.cut(material.readable(reply), self._most)
        blocks = [("TASK", material.cut(material.task(prompt), self._most)[0])]
        if self._reference:
            if not prompt.answer:
                raise JudgeError("is to compare with the prompt's answer, and it has none (reference: true)")
            blocks.append(("REFERENCE", prompt.answer))
        blocks.append(("REPLY", text))
        asked = [Question(self._system, blocks, self._schema, self._read, repeat) for repeat in range(self.repeats)]
        async with asyncio.TaskGroup() as tasks:
            graded = [tasks.create_task(client.ask(one)) for one in asked]
        grades = [one.result() for one in graded]
        parts = {one: statistics.fmean(grade[one] for grade in grades) / self._scale for one in self.criteria}
        totals = [self._total({one: grade[one] / self._scale for one in grade}) for grade in grades]
        parts["judge_cut"] = float(was_cut)
        if self.repeats > 1:
            parts["disagreement"] = statistics.stdev(totals)
        return Verdict(statistics.fmean(totals), parts)

    def _read(self, value: dict[str, Any]) -> dict[str, int]:
        return {one: points(value, one, self._scale) for one in self.criteria}

    def _total(self, parts: dict[str, float]) -> float:
        weights = self.weights
        return sum(weights[one] * part for one, part in parts.items()) / sum(weights.values())


def _schema(criteria: dict[str, str], scale: int, reasoning: bool) -> dict[str, Any]:
    # An enumeration, since not every server that keeps a schema keeps its minimum and maximum.
    properties: dict[str, Any] = {"reasoning": {"type": "string"}} if reasoning else {}
    properties |= {one: {"type": "integer", "enum": list(range(scale + 1))} for one in criteria}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
