"""Judges where `RewardPool` stands for plain rewards: asked by the episodes, on the rollouts' event loop.

Promises: a judge that refuses, or one of a user's own that raises whatever it may, is a failed reward, handled as
`reward_options.on_failure` says and never 0 by itself; a budget that is spent is never scored over; replies that are
compared are those of one group, each once, and all of them get their rewards at once or none does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from datamodules.inference.protocol import InferenceEngine
from datamodules.processes.foreign import described
from datamodules.prompts.base import Prompt
from datamodules.rewards.judges.base import Judge, Verdict
from datamodules.rewards.judges.model import BudgetSpent, JudgeError
from datamodules.rewards.judges.policy import PolicyClient
from datamodules.rewards.options import Judgement, RewardOptions
from datamodules.rewards.pool import RewardError, RewardPool

_log = logging.getLogger(__name__)

Score = Callable[[Prompt, Any], Awaitable[Judgement]]


class JudgePool:
    """Asks a judge, and its verifier where it has one.

    Args:
        judge: gives the rewards.
        options: `on_failure` is the judge's as well; the others are the verifier's.

    Attributes:
        failures: questions, about one reply or a group, that found no answer.

    Raises:
        ValueError: options without effect, since there is no verifier; or as `Judge.client`.
    """

    def __init__(self, judge: Judge, options: RewardOptions | None = None) -> None:
        options = options or RewardOptions()
        if judge.verifier is None and replace(options, on_failure="drop") != RewardOptions():
            raise ValueError(
                "reward_options: only on_failure has an effect on a judge without verifier; set the judge's model"
                " (deadline_s, max_concurrent, cache, ...) instead, or give it a verifier"
            )
        self._judge = judge
        self._verifier = None if judge.verifier is None else RewardPool(judge.verifier, options)
        self._options = options
        self._client = judge.client()
        self.failures = 0

    def start(self, logs: Path | None = None) -> None:
        """As `RewardPool.start`, for the verifier."""
        if self._verifier is not None:
            self._verifier.start(logs)

    def join(self, engine: InferenceEngine, tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...]) -> None:
        """Tells a judge that is the policy which engine serves it; see `PolicyClient.join`."""
        if isinstance(self._client, PolicyClient):
            self._client.join(engine, tokenizer, ends)

    async def open(self) -> None:
        """As `RewardPool.open`, for the verifier; and joins the event loop."""
        if self._verifier is not None:
            await self._verifier.open()
        self._client.open()

    def close(self) -> None:
        """Ends the verifier's workers. Idempotent."""
        if self._verifier is not None:
            self._verifier.close()
        self._client.close()

    @property
    def exhausted(self) -> str:
        """Why no reply will be judged any more; "" while they are."""
        return self._client.exhausted

    def spent(self) -> dict[str, float]:
        """`judge_calls`, `judge_cached`, `judge_retries`, `judge_refused`, `judge_misread`, `judge_input_tokens`,
        `judge_output_tokens`, `judge_cost`, `judge_seconds`: since the run began, as far as checkpoints know."""
        return {f"judge_{name}": float(value) for name, value in vars(self._client.spent).items()}

    def state_dict(self) -> dict[str, Any]:
        """What was used, for a checkpoint's stream: a budget is of all launches of a run."""
        return {"judge": dict(vars(self._client.spent))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`; from nothing where it holds none. Before the first question."""
        saved = state.get("judge", {})
        for name in vars(self._client.spent).keys() & saved.keys():
            setattr(self._client.spent, name, saved[name])

    def of_group(self, samples: int) -> list[Score]:
        """What each of a group's episodes asks for its reward."""
        if not self._judge.is_relative:
            return [self.judge] * samples
        together = _Together(self, samples)
        return [together.of(sample) for sample in range(samples)]

    async def judge(self, prompt: Prompt, completion: Any) -> Judgement:
        """The reward of one reply alone.

        Raises:
            RewardError: there is none, and no score is configured for that.
        """
        (found,) = await self.judge_all(prompt, [completion])
        return found

    async def held_out(self, prompt: Prompt, completion: Any) -> Judgement:
        """The reward of a reply in validation: the verifier's, where there is one. Raises as `judge`."""
        if self._verifier is not None:
            return await self._verifier.judge(prompt, completion)
        return await self.judge(prompt, completion)

    async def judge_all(self, prompt: Prompt, replies: Sequence[Any]) -> list[Judgement]:
        """The rewards of replies that are judged together, in their order. Raises as `judge`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(self._verdicts(prompt, replies))
                checked = [tasks.create_task(self._verified(prompt, one)) for one in replies]
        except BaseExceptionGroup as group:
            errors = _leaves(group)
            error = next((one for one in errors if isinstance(one, BudgetSpent)), errors[0])
            return [self._failed(prompt, error)] * len(replies)
        verdicts, verified = asked.result(), [one.result() for one in checked]
        true = [one.value for one in verified if one is not None and not one.failed]
        beside: list[dict[str, float]] = [{}] * len(replies)
        if len(true) == len(replies):  # else one was scored and not judged: nothing to compare with
            beside = self._judge.beside(true, [one.value for one in verdicts])
        return [
            Judgement(
                found.value,
                {**found.parts, **more},
                failed="" if one is None else one.failed,
                unreadable=one is not None and one.unreadable,
                turns=found.turns,
                feedback="" if one is None else one.feedback,
            )
            for found, more, one in zip(verdicts, beside, verified, strict=True)
        ]

    async def _verdicts(self, prompt: Prompt, replies: Sequence[Any]) -> list[Verdict]:
        return await self._judge.verdicts(self._client, prompt, replies)

    async def _verified(self, prompt: Prompt, reply: Any) -> Judgement | None:
        return None if self._verifier is None else await self._verifier.judge(prompt, reply)

    def _failed(self, prompt: Prompt, error: BaseException) -> Judgement:
        if isinstance(error, RewardError):  # of the verifier, whose own options said drop
            raise error
        if not isinstance(error, Exception):
            raise error
        self.failures += 1
        why = str(error) if isinstance(error, JudgeError) else f"failed: {described(error)}"
        told = RewardError(f"reward of prompt '{prompt.id}': the judge {why}", "exception")
        score = self._options.on_failure
        if score == "drop" or isinstance(error, BudgetSpent):
            raise told from error
        _log.warning("%s; scored %g (reward_options.on_failure)", told, score)
        return Judgement(float(score), failed=str(told))


class _Together:
    """Waits until all episodes of a group have said what they ask about; then they are judged at once."""

    def __init__(self, pool: JudgePool, samples: int) -> None:
        self._pool = pool
        self._samples = samples
        self._said: dict[int, Any] = {}
        self._done: asyncio.Future[list[Judgement]] = asyncio.get_running_loop().create_future()

    def of(self, sample: int) -> Score:
        async def score(prompt: Prompt, completion: Any) -> Judgement:
            return await self._ask(sample, prompt, completion)

        return score

    async def _ask(self, sample: int, prompt: Prompt, completion: Any) -> Judgement:
        if sample in self._said:
            raise RewardError(
                f"reward of prompt '{prompt.id}': the judge compares the episodes of a group and is asked once for"
                " each; the workflow asked twice for one. Use RubricJudge"
            )
        self._said[sample] = completion
        if len(self._said) == self._samples:
            try:
                found = await self._pool.judge_all(prompt, [self._said[one] for one in range(self._samples)])
            except asyncio.CancelledError:
                self._done.cancel()
                raise
            except Exception as error:
                self._done.set_exception(error)
            else:
                self._done.set_result(found)
        return (await asyncio.shield(self._done))[sample]


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for one in error.exceptions for leaf in _leaves(one)]


def reward_pool(reward: Judge | Callable[[Prompt, str], Any], options: RewardOptions) -> RewardPool | JudgePool:
    """What asks `reward`. Raises ValueError as `RewardPool` and `JudgePool`."""
    return JudgePool(reward, options) if isinstance(reward, Judge) else RewardPool(reward, options)
