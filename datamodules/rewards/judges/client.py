"""Asks a judge's model: through the official client, with deadlines, retries, a budget and a cache.

Promises: a question ends with a verdict or with `JudgeError`, which says what the server did, within
`JudgeModel.deadline_s` of being sent; never more than `max_concurrent` requests at a time; all of them hold while a
server that answered 429 has asked for it (Retry-After); the budget's calls are never exceeded; the counts are exact.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from datamodules.processes.awake import awake
from datamodules.processes.deadline import deadline
from datamodules.rewards.judges.answers import Misread, verdict
from datamodules.rewards.judges.cache import VerdictCache
from datamodules.rewards.judges.material import Block, fenced
from datamodules.rewards.judges.model import BudgetSpent, JudgeError, JudgeModel
from datamodules.rewards.judges.wording import fill

_T = TypeVar("_T")
_FORMAT = "arborist-judge-1"
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 20.0
_SHOWN = 200


@dataclass(frozen=True)
class Question(Generic[_T]):
    """Attributes:
    system: instructions, with the place `{fence}`.
    blocks: the material.
    schema: JSON schema of the answer.
    read: makes a verdict of the answer's object; raises Misread.
    repeat: number among several askings of the same, which the cache keeps apart.
    """

    system: str
    blocks: Sequence[Block]
    schema: dict[str, Any]
    read: Callable[[dict[str, Any]], _T]
    repeat: int = 0


@dataclass
class Spent:
    """Counts of a run: requests sent, verdicts from the cache, requests made again, verdicts refused, answers that
    could not be read; tokens as the server counts them."""

    calls: int = 0
    cached: int = 0
    retries: int = 0
    refused: int = 0
    misread: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    seconds: float = field(default=0.0)


class _NoCompletion(Exception):
    """What a server answered is none, as where a proxy answers for it; the message is how it begins."""


class JudgeClient:
    """One model, for one event loop. `open` before asking.

    Args:
        model: which one and how.

    Attributes:
        spent: what was used so far.

    Raises:
        ImportError: the package openai is missing.
    """

    def __init__(self, model: JudgeModel) -> None:
        try:
            import openai
        except ImportError as error:
            raise ImportError("judges need the package openai; install it with: pip install -e '.[judges]'") from error
        self._api = openai
        self._model = model
        self._completions: Any = None
        self._cache: VerdictCache | None = None
        self._structured = model.structured != "off"
        self._settings = [model.url, model.name, model.temperature, model.max_tokens, dict(model.request)]
        self._hold_until = 0.0
        self._down: BudgetSpent | None = None
        self.spent = Spent()

    def open(self) -> None:
        """Joins the running event loop. Raises ValueError: the cache cannot be used."""
        self._cache = None if self._model.cache is None else VerdictCache(self._model.cache)
        key = os.environ.get(self._model.key_variable) or "none"
        client = self._api.AsyncOpenAI(base_url=self._model.url, api_key=key, max_retries=0)
        self._completions = client.chat.completions  # imports much, which no question's deadline should pay for
        self._slots = asyncio.Semaphore(self._model.max_concurrent)

    def close(self) -> None:
        """Closes the cache. Connections end with the event loop."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    @property
    def exhausted(self) -> str:
        """Why no question will be answered any more; "" while they are."""
        return "" if self._down is None else str(self._down)

    async def ask(self, question: Question[_T]) -> _T:
        """The verdict.

        Raises:
            JudgeError: there is none; BudgetSpent where no later question will have one either.
        """
        key = self._key(question)
        if self._cache is not None and (known := self._cache.get(key)) is not None:
            self.spent.cached += 1
            return verdict(known, question.read)
        async with self._slots:
            try:
                text, found = await self._asked(question)
            except JudgeError:
                self.spent.refused += 1
                raise
        if self._cache is not None:
            self._cache.put(key, text)
        return found

    async def _asked(self, question: Question[_T]) -> tuple[str, _T]:
        now = awake
        ends = now() + self._model.deadline_s
        misread, wait, again = 0, _FIRST_WAIT_S, ""
        attempts = 0
        while True:
            await self._held(ends)
            self._reserve()
            attempts += 1
            self.spent.retries += attempts > 1
            began, text, was_cut = now(), "", False
            seconds, option = min((self._model.attempt_s, "attempt_s"), (max(0.01, ends - began), "deadline_s"))
            try:
                text, was_cut = await self._post(question, again, seconds)
                return text, verdict(text, question.read)
            except Misread as error:
                said = f"it was cut off after {self._model.max_tokens} tokens" if was_cut else str(error)
                self.spent.misread += 1
                misread += 1
                if misread > self._model.misreadings:
                    raise JudgeError(
                        f"answered {misread} times what cannot be read: {said}; the last answer begins"
                        f" {text[:_SHOWN]!r}. See model.max_tokens and model.structured"
                    ) from error
                again, why, pause = f"Your last answer could not be read: {said}.", "", 0.0
            except (TimeoutError, self._api.APITimeoutError):
                why, pause = f"did not answer within {round(seconds, 2):g} s (model.{option})", wait
            except self._api.APIConnectionError as error:
                why, pause = f"cannot be reached: {_cause(error)}", wait
            except _NoCompletion as error:
                why, pause = f"answered what is no Chat Completion ({_cause(error)}); see model.url", wait
            except self._api.APIStatusError as error:
                if error.status_code == 400 and self._structured and self._model.structured == "auto":
                    self._structured = False  # the instructions say the form as well
                    why, pause = "refuses a request with response_format", 0.0
                elif error.status_code == 429 and _no_money(error):
                    raise JudgeError(f"has no credit left at {self._model.url}: {_cause(error)}") from error
                elif error.status_code in (408, 409, 429) or error.status_code >= 500:
                    why = f"answered with status {error.status_code}: {_cause(error)}"
                    asked = _retry_after(error)
                    pause = wait if asked is None else asked
                    if error.status_code == 429:
                        self._hold_until = max(self._hold_until, now() + pause)
                else:
                    raise JudgeError(
                        f"refuses the request with status {error.status_code}: {_cause(error)}; see model.url,"
                        f" model.name, model.request and ${self._model.key_variable}"
                    ) from error
            if pause and now() + pause < ends:
                await asyncio.sleep(pause)
                wait = min(_LONGEST_WAIT_S, 2 * wait) * random.uniform(0.8, 1.2)
                pause = 0.0
            if now() + pause >= ends:  # or slept for longer: another attempt would hide why there is no verdict
                times = f"{attempts} attempts" if attempts > 1 else "1 attempt"
                raise JudgeError(
                    f"gave no verdict within {self._model.deadline_s:g} s (model.deadline_s), {times}; at last it"
                    f" {why or 'answered what cannot be read'}"
                )

    async def _post(self, question: Question[Any], again: str, seconds: float) -> tuple[str, bool]:
        """The answer's text, and whether its length was over."""
        body: dict[str, Any] = {"model": self._model.name, "messages": spoken(question, again)}
        if self._model.temperature is not None:
            body["temperature"] = self._model.temperature
        if "max_completion_tokens" not in self._model.request:
            body["max_tokens"] = self._model.max_tokens
        if self._structured:
            form = {"name": "verdict", "schema": question.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        began = awake()
        async with deadline(seconds):  # the client's own is one between two bytes, of a process that was stopped too
            try:
                reply = await self._completions.create(**body, extra_body=dict(self._model.request), timeout=None)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                raise _NoCompletion from error
            finally:  # calls count those without an answer, too
                self.spent.seconds += awake() - began
        choices = getattr(reply, "choices", None)  # the package checks nothing of what a server answers
        if not isinstance(choices, list):
            raise _NoCompletion(repr(getattr(reply, "model_extra", None) or reply))  # an error, where it is one
        self._pay(getattr(reply, "usage", None))
        if not choices:
            return "", False
        said = getattr(getattr(choices[0], "message", None), "content", None)
        return _text(said), getattr(choices[0], "finish_reason", None) == "length"

    async def _held(self, ends: float) -> None:
        now = awake
        while (left := self._hold_until - now()) > 0:
            if now() + left >= ends:
                raise JudgeError(
                    f"asked for a pause of {left:.0f} s more (status 429), which is beyond model.deadline_s"
                    f" ({self._model.deadline_s:g} s)"
                )
            await asyncio.sleep(left)

    def _reserve(self) -> None:
        """Counts one request, if the budget has room for it."""
        budget, spent = self._model.budget, self.spent
        tokens = spent.input_tokens + spent.output_tokens
        for name, used, most in (
            ("max_calls", spent.calls, budget.max_calls),
            ("max_tokens", tokens, budget.max_tokens),
            ("max_cost", spent.cost, budget.max_cost),
        ):
            if most is not None and used >= most:
                self._down = BudgetSpent(
                    f"has spent its budget: {used:,.6g} of {most:,.6g} (model.budget.{name}); raise it and go on from"
                    " the last checkpoint"
                )
                raise self._down
        spent.calls += 1

    def _pay(self, usage: Any) -> None:
        budget, spent = self._model.budget, self.spent
        counts = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
        read, written = (count if type(count) is int else 0 for count in counts)
        if not any(type(count) is int for count in counts):
            if budget.max_tokens is not None or budget.max_cost is not None:
                raise JudgeError(
                    "does not say how many tokens it used, so model.budget.max_tokens and max_cost cannot be kept;"
                    " bound model.budget.max_calls instead"
                )
            return
        spent.input_tokens += read
        spent.output_tokens += written
        if budget.input_price is not None and budget.output_price is not None:
            spent.cost = (spent.input_tokens * budget.input_price + spent.output_tokens * budget.output_price) / 1e6

    def _key(self, question: Question[Any]) -> bytes:
        # Not the word of the fence, which follows from the blocks, nor whether the server keeps the form.
        asked = [_FORMAT, self._settings, question.system, list(question.blocks), question.schema, question.repeat]
        return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).digest()


def spoken(question: Question[Any], again: str) -> list[dict[str, Any]]:
    """The messages that ask. `again`: what was wrong with the last answer, "" in the first place."""
    word, material = fenced(question.blocks)
    return [
        {"role": "system", "content": fill(question.system, {"fence": word})},
        {"role": "user", "content": f"{material}\n\n{again} Answer now, with the JSON object alone.".lstrip()},
    ]


def _text(content: Any) -> str:
    """Of a message: the text itself, or that of its parts."""
    if isinstance(content, list):
        parts = [one.get("text") for one in content if isinstance(one, dict) and one.get("type") == "text"]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _retry_after(error: Any) -> float | None:
    """Seconds that the answer asks to wait; None where it says nothing of use."""
    try:
        return min(3600.0, max(0.0, float(error.response.headers["retry-after"])))
    except (KeyError, ValueError):
        return None


def _no_money(error: Any) -> bool:
    return getattr(error, "code", None) == "insufficient_quota"


def _cause(error: BaseException) -> str:
    """The first words of the innermost error, which is the one that says something."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:_SHOWN] or type(error).__name__
