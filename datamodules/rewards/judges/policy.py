"""The policy as a judge of what it says itself: a generative reward model whose engine is the run's own.

Promises: as `client`: a question ends with a verdict or with `JudgeError`, within `PolicyModel.deadline_s` (what the
engine stands still is not counted), never more than `max_concurrent` at a time, the counts are exact. A verdict is by
the weights that serve when it is asked for, so nothing is cached; what it says is not trained on. Under the same
weights the same material is asked about in the same tokens under the same seed, so that engines that honour seeds (and,
at temperature 0, every exact one) judge it alike.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from app import checks
from datamodules.conversations.chat_template import Chat
from datamodules.inference.protocol import GenerationError, GenerationRequest, InferenceEngine
from datamodules.processes.deadline import deadline
from datamodules.rewards.judges.answers import Misread, verdict
from datamodules.rewards.judges.client import Question, Spent, spoken
from datamodules.rewards.judges.model import JudgeError

_T = TypeVar("_T")
_SHOWN = 200


@dataclass(frozen=True)
class PolicyModel:
    """The model that is trained, asked through the engine that plays the episodes.

    Attributes:
        engine: "policy", the run's own; another model is behind a URL (`JudgeModel`).
        temperature: of its answers; draws follow from what is asked alone. 0.0 takes the likeliest tokens.
        max_tokens: most tokens of an answer.
        deadline_s: seconds one verdict may take, all attempts included, without those the engine stands still.
        misreadings: how many answers in a row may be none before the verdict counts as refused.
        max_concurrent: questions in flight.

    Raises:
        ValueError: an option out of range.
    """

    engine: Literal["policy"]
    temperature: float = 0.0
    max_tokens: int = 256
    deadline_s: float = 120.0
    misreadings: int = 1
    max_concurrent: int = 64

    def __post_init__(self) -> None:
        checks.one_of("model.engine", self.engine, ("policy",))
        checks.at_least(0, {"model.temperature": self.temperature, "model.misreadings": self.misreadings})
        checks.at_least(1, {"model.max_tokens": self.max_tokens, "model.max_concurrent": self.max_concurrent})
        checks.deadline({"model.deadline_s": self.deadline_s})


class PolicyClient:
    """Asks the policy. `join` a run's engine, then `open`, before asking."""

    exhausted = ""

    def __init__(self, model: PolicyModel) -> None:
        self._model = model
        self._engine: InferenceEngine | None = None
        self.spent = Spent()

    def join(self, engine: InferenceEngine, tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...]) -> None:
        """Args: the started engine, its tokenizer, and what ends a reply. Raises ValueError: no chat template."""
        self._engine, self._tokenizer, self._ends = engine, tokenizer, ends
        self._chat = Chat(tokenizer)

    def open(self) -> None:
        """Joins the running event loop."""
        self._slots = asyncio.Semaphore(self._model.max_concurrent)

    def close(self) -> None:
        """The engine is the run's."""

    async def ask(self, question: Question[_T]) -> _T:
        """The verdict. Raises JudgeError: there is none."""
        engine = self._engine
        if engine is None:
            raise JudgeError("is the policy (model.engine), and none runs here; name a model behind a URL to try it")

        def still() -> float:
            return getattr(engine, "still_s", 0.0)

        async with self._slots:
            now = asyncio.get_running_loop().time
            began, before = now(), still()
            try:
                async with deadline(self._model.deadline_s, still):
                    return await self._asked(engine, question)
            except TimeoutError as error:
                self.spent.refused += 1
                raise JudgeError(f"gave no verdict within {self._model.deadline_s:g} s (model.deadline_s)") from error
            except JudgeError:
                self.spent.refused += 1
                raise
            finally:
                self.spent.seconds += max(0.0, now() - began - (still() - before))

    async def _asked(self, engine: InferenceEngine, question: Question[_T]) -> _T:
        model, again = self._model, ""
        for attempt in range(model.misreadings + 1):
            tokens = self._chat.prompt(spoken(question, again))
            if len(tokens) + model.max_tokens > engine.max_context:
                raise JudgeError(
                    f"cannot be shown {len(tokens)} tokens and answer with {model.max_tokens} (model.max_tokens):"
                    f" {engine.max_context} are all that the engine holds; lower max_characters of the judge"
                )
            request = GenerationRequest(
                tokens,
                model.max_tokens,
                temperature=model.temperature,
                stop_token_ids=self._ends,
                request_id=f"judge/{self.spent.calls}",
                seed=_seed(question, attempt),
            )
            self.spent.calls += 1
            self.spent.retries += attempt > 0
            self.spent.input_tokens += len(tokens)
            try:
                response = await engine.generate(request)
            except GenerationError as error:
                raise JudgeError(f"could not answer: {error}") from error
            self.spent.output_tokens += len(response.tokens)
            text = str(self._tokenizer.decode(response.tokens, skip_special_tokens=True))
            try:
                return verdict(text, question.read)
            except Misread as error:
                cut = response.finish_reason == "length"
                said = f"it was cut off after {model.max_tokens} tokens" if cut else str(error)
                self.spent.misread += 1
                again = f"Your last answer could not be read: {said}."
        raise JudgeError(
            f"answered {model.misreadings + 1} times what cannot be read: {said}; the last answer begins"
            f" {text[:_SHOWN]!r}. See model.max_tokens"
        )


def _seed(question: Question[Any], attempt: int) -> int:
    asked = json.dumps([question.system, list(question.blocks), question.repeat, attempt], default=str)
    return random.Random(hashlib.sha256(asked.encode("utf-8", "replace")).digest()).getrandbits(62)
