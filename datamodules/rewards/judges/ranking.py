"""Group ranking: the episodes of one prompt judged together, at once or pair by pair.

Promises: a reply's reward is its place, 1.0 the best of the group and 0.0 the worst, those that tie sharing the mean of
theirs, so that the mean over a group is always 0.5; where a reply stands in the question is drawn from the content, and
asked in both directions; equal replies are shown once and tie; how often the two directions contradict each other is a
part, `inconsistent`.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, ClassVar, Literal

from app import checks
from datamodules.prompts.base import Prompt
from datamodules.rewards.judges import material
from datamodules.rewards.judges.answers import Misread
from datamodules.rewards.judges.base import Judge, Verdict
from datamodules.rewards.judges.client import JudgeClient, Question
from datamodules.rewards.judges.material import Block
from datamodules.rewards.judges.model import JudgeError, JudgeModel
from datamodules.rewards.judges.policy import PolicyModel
from datamodules.rewards.judges.wording import fill, instructions

Order = dict[int, int]
"""The place of each reply, 0 the best; ties share one."""

_MOST = 32


class RankingJudge(Judge):
    """Ranks the replies of a group.

    Args:
        model: the judge: a model behind a URL, or the policy itself (`PolicyModel`).
        criteria: what makes one answer better than another, in words.
        compare: "group" shows all replies in one question; "pairs" two at a time, n (n - 1) / 2 questions for n
            different replies, and a reply's place is how many it beats.
        orders: 1 asks each question once; 2 once more with the replies the other way round, which halves what a
            judge's liking for the first or the last does, and measures it.
        reference: show the prompt's `answer` as the reference; prompts without one are refused.
        max_characters: of a reply or transcript; longer ones are cut (see `material.cut`), counted as `judge_cut`.
        prompt: file with the instructions; None for the packaged `prompts/ranking.md`. Its places are `{fence}`,
            `{criteria}`, `{count}` and `{form}`.
        verifier: a plain reward beside the judge's; see `Judge`. `drift` is the judge's place less the place by the
            verifier's number, `against` the share of the pairs that the verifier tells apart and the judge puts in the
            other order. Held-out episodes need one, since one reply alone has no place.
        reasoning: the judge reasons before it ranks.

    Raises:
        ValueError: an option out of range.
    """

    is_relative: ClassVar[bool] = True

    def __init__(
        self,
        model: JudgeModel | PolicyModel,
        criteria: str,
        compare: Literal["group", "pairs"] = "group",
        orders: int = 2,
        reference: bool = False,
        max_characters: int = 20_000,
        prompt: str | None = None,
        verifier: Callable[[Prompt, str], float] | None = None,
        reasoning: bool = True,
    ) -> None:
        name = "RankingJudge"
        checks.one_of(f"{name}.compare", compare, ("group", "pairs"))
        checks.at_least(1, {f"{name}.orders": orders})
        checks.at_most(2, {f"{name}.orders": orders})
        checks.at_least(100, {f"{name}.max_characters": max_characters})
        if not criteria.strip():
            raise ValueError(f"{name}.criteria: empty; say what makes one answer better than another")
        self.model = model
        self.verifier = verifier
        self._criteria = criteria.strip()
        self._compare = compare
        self._orders = orders
        self._reference = reference
        self._fields = ['"reasoning": "..."'] if reasoning else []
        self._schema = _schema(reasoning)
        self._most = max_characters
        self._text = instructions(prompt, "ranking.md", f"{name}.prompt", ("fence", "criteria", "count", "form"))

    async def verdicts(self, client: JudgeClient, prompt: Prompt, replies: Sequence[Any]) -> list[Verdict]:
        shown = [material.cut(material.readable(one), self._most) for one in replies]
        texts = sorted({text for text, _ in shown})  # equal ones once, in an order that says nothing of the sampling
        if len(texts) > _MOST:
            raise JudgeError(f"compares at most {_MOST} different replies, and got {len(texts)}; lower group_size")
        before = [("TASK", material.cut(material.task(prompt), self._most)[0])]
        if self._reference:
            if not prompt.answer:
                raise JudgeError("is to compare with the prompt's answer, and it has none (reference: true)")
            before.append(("REFERENCE", prompt.answer))
        everyone = tuple(range(len(texts)))
        parties = [everyone] if self._compare == "group" else list(combinations(everyone, 2))
        asked = [] if len(texts) == 1 else [self._orders_of(one, texts, before) for one in parties]
        async with asyncio.TaskGroup() as tasks:
            answers = [[tasks.create_task(client.ask(one)) for one in party] for party in asked]
        orders = [[one.result() for one in party] for party in answers]
        better = [[0.0] * len(texts) for _ in texts]  # how much i is better than j, of 1
        for first, second in combinations(everyone, 2):
            said = [
                _better(order, first, second) for party in orders for order in party if {first, second} <= order.keys()
            ]
            better[first][second] = statistics.fmean(said)
            better[second][first] = 1.0 - better[first][second]
        inconsistent = _contradictions(orders)
        at = [texts.index(text) for text, _ in shown]
        found = []
        for i, (_, was_cut) in enumerate(shown):
            # Against every other episode of the group: those with the same reply tie.
            wins = [0.5 if at[i] == at[j] else better[at[i]][at[j]] for j in range(len(shown)) if j != i]
            found.append(Verdict(statistics.fmean(wins), {"judge_cut": float(was_cut), **inconsistent}))
        return found

    def beside(self, verified: Sequence[float], judged: Sequence[float]) -> list[dict[str, float]]:
        apart = against = 0
        places = [0.0] * len(verified)
        for i, mine in enumerate(verified):
            for j, theirs in enumerate(verified):
                if i == j:
                    continue
                places[i] += (0.5 if mine == theirs else float(mine > theirs)) / (len(verified) - 1)
                apart += mine > theirs
                against += mine > theirs and judged[i] < judged[j]
        share = {"against": against / apart} if apart else {}
        return [
            {"verifier": number, "drift": judge - place, **share}
            for number, place, judge in zip(verified, places, judged, strict=True)
        ]

    def _orders_of(self, party: Sequence[int], texts: Sequence[str], before: Sequence[Block]) -> list[Question[Order]]:
        """The questions about these replies. Where each stands is a function of what is asked, so that the cache finds
        it again, and is another one for each party."""
        standing = list(party)
        content = "\0".join([*(text for _, text in before), *(texts[one] for one in party)])
        random.Random(hashlib.sha256(content.encode("utf-8", "replace")).digest()).shuffle(standing)
        places = ", ".join(f"[{number + 1}]" for number in range(min(3, len(party))))
        ranking = f'"ranking": [{places}{", ..." if len(party) > 3 else ""}]'
        values = {
            "criteria": self._criteria,
            "count": str(len(party)),
            "form": "{" + ", ".join([*self._fields, ranking]) + "}",
        }
        system = fill(self._text, values)
        questions: list[Question[Order]] = []
        for turned in range(self._orders):
            order = standing[::-1] if turned else standing
            blocks = [*before, *((f"ANSWER {place + 1}", texts[one]) for place, one in enumerate(order))]
            questions.append(Question(system, blocks, self._schema, _reader(order)))
        return questions


def _reader(order: Sequence[int]) -> Callable[[dict[str, Any]], Order]:
    """Reads a ranking of what stood in this order: a list of places, each a number or a list of those that tie."""

    def read(value: dict[str, Any]) -> Order:
        ranking = value.get("ranking")
        if not isinstance(ranking, list):
            raise Misread("'ranking' is missing or no list")
        places = [one if isinstance(one, list) else [one] for one in ranking]
        numbers = [number for place in places for number in place]
        if any(isinstance(one, bool) or not isinstance(one, int) for one in numbers):
            raise Misread("'ranking' holds something else than numbers of answers")
        if sorted(numbers) != list(range(1, len(order) + 1)):
            raise Misread(f"'ranking' does not hold each of 1 to {len(order)} once")
        return {order[number - 1]: rank for rank, place in enumerate(places) for number in place}

    return read


def _schema(reasoning: bool) -> dict[str, Any]:
    properties: dict[str, Any] = {"reasoning": {"type": "string"}} if reasoning else {}
    properties["ranking"] = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _better(order: Order, first: int, second: int) -> float:
    return 0.5 if order[first] == order[second] else float(order[first] < order[second])


def _contradictions(orders: Sequence[Sequence[Order]]) -> dict[str, float]:
    """`inconsistent`: the share of pairs that the two directions put in opposite orders; a tie contradicts nothing."""
    both = [one for one in orders if len(one) == 2]
    pairs = [
        _better(one, first, second) + _better(other, first, second) == 1.0 and one[first] != one[second]
        for one, other in both
        for first, second in combinations(sorted(one), 2)
    ]
    return {"inconsistent": statistics.fmean(pairs)} if pairs else {}
