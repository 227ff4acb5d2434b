"""Plays episodes: a workflow against the engine, with a deadline, and its result checked; `evaluate` plays those of
held-out prompts, with no gate, no groups to keep whole, everything sent at once.

Promises: what comes back can be trained on and written down; everything else is an exception that says why,
`EpisodeError` for what this file finds itself. Whatever a workflow raises leaves here as an `Exception`; a cancellation
that was asked for stays one. A held-out episode that fails costs itself only, and is counted in a warning; none is
scored 0 in silence.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from app.batch import Trajectory
from datamodules.conversations.image_processor import ImageProcessor
from datamodules.groups import Group, check_credit, label, to_batch
from datamodules.inference.clock import PausedClock
from datamodules.inference.protocol import InferenceEngine
from datamodules.pending import LastArrival, Pending
from datamodules.pipeline.limits import RolloutsFailed
from datamodules.processes import foreign
from datamodules.processes.deadline import deadline
from datamodules.prompts.base import Prompt
from datamodules.rewards.judges.pool import JudgePool, Score
from datamodules.rewards.pool import RewardPool
from datamodules.workflows.base import EpisodeEngine, Misfit, Workflow
from datamodules.workflows.turn_ends import TurnEnds

_log = logging.getLogger(__name__)


class EpisodeError(RuntimeError):
    """An episode that took too long or that no one can train on."""


class Pause:
    """Holds the requests of a group's episodes while `unpaused` is not set. No deadline counts that time: of the others
    neither, which may be waiting for the one that is held.

    Args:
        unpaused: of the event loop.
    """

    def __init__(self, unpaused: asyncio.Event) -> None:
        self._unpaused, self._clock, self._held = unpaused, PausedClock(), 0

    async def over(self, pending: Pending) -> None:
        """Waits for it. `pending`: told what is waited for."""
        if self._unpaused.is_set():
            return
        self._held += 1
        self._clock.pause()
        try:
            with pending.waiting("resume"):
                await self._unpaused.wait()
        finally:
            self._held -= 1
            if self._held == 0:  # several requests may have been held
                self._clock.resume()

    def held_s(self) -> float:
        """Seconds so far in which any request was held."""
        return self._clock.still_s


class EpisodePlayer:
    """Plays episodes of one workflow.

    Args:
        workflow: what an episode is.
        engine: where its tokens come from.
        tokenizer: the model's.
        pool: opened reward workers or judge, None when the workflow brings its own rewards.
        deadline_s: seconds an episode may take; time in a `Pause` is not counted, nor is what the engine stands
            still.
        ends: what ends a turn of the model; None for what the tokenizer says of it.
        image_processor: the model's; None for one that sees no pictures.
    """

    def __init__(
        self,
        workflow: Workflow,
        engine: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        pool: RewardPool | JudgePool | None,
        deadline_s: float,
        ends: TurnEnds | None = None,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self.engine = engine
        self._image_processor = image_processor
        self.pool = pool
        self._workflow = workflow
        self._tokenizer = tokenizer
        self._deadline_s = deadline_s
        self._ends = TurnEnds.of(tokenizer) if ends is None else ends

    async def play(
        self,
        prompt: Prompt,
        *,
        name: str,
        seed: str,
        sample: int = 0,
        temperature: float | None = None,
        pause: Pause | None = None,
        pending: Pending | None = None,
        score: Score | None = None,
    ) -> list[Trajectory]:
        """One episode.

        Args:
            prompt: encoded.
            name: of the episode, for request ids.
            seed: of its sampling.
            sample: its number among the prompt's episodes.
            temperature: replaces the workflow's.
            pause: what holds requests; shared by the episodes of a group.
            pending: kept up to date with what the episode waits for.
            score: its reward; None for the pool's of one reply alone.

        Raises:
            EpisodeError: the deadline passed, the workflow returned something else than trajectories, or it raised what
                is no Exception (SystemExit, a CancelledError that nobody asked for).
            Exception: whatever the workflow, the engine or the reward raised.
        """
        # Its own: what an episode writes into it is nothing that others of the group, or later ones, may read.
        prompt = replace(prompt, messages=deepcopy(prompt.messages), metadata=deepcopy(prompt.metadata))
        table = pending or Pending(prompt.id)
        episode = EpisodeEngine(
            self.engine,
            self._tokenizer,
            self.pool.judge if score is None and self.pool is not None else score,
            name=name,
            seed=seed,
            sample=sample,
            temperature=temperature,
            before=None if pause is None else functools.partial(pause.over, table),
            held=None if pause is None else pause.held_s,
            pending=table,
            ends=self._ends,
            image_processor=self._image_processor,
        )
        limit: asyncio.Timeout | None = None
        try:
            async with deadline(self._deadline_s, lambda: episode.held_s) as limit:
                result = await self._workflow.run(episode, prompt)
        except TimeoutError as error:
            if limit is not None and limit.expired():
                raise EpisodeError(
                    f"the episode was not over after {self._deadline_s:g} s (limits.episode_deadline_s)"
                ) from error
            raise
        except Exception:
            raise
        except BaseException as error:
            if foreign.must_pass(error):
                raise
            raise EpisodeError(f"{type(self._workflow).__name__}.run raised {foreign.described(error)}") from error
        return self._checked(result, episode)

    def complete(self, prompt: Prompt, episodes: Sequence[list[Trajectory]]) -> None:
        """Shows the workflow all episodes of a group, where it asks for them.

        Raises:
            EpisodeError: metadata that cannot be written down.
            BatchError: rewards that cannot be credited.
            Exception: whatever the workflow raises.
        """
        after: Callable[..., None] | None = getattr(self._workflow, "after_group", None)
        if after is None:
            return
        after(prompt, episodes, self.engine.max_context)
        for episode in episodes:
            for one in episode:
                try:
                    one.metadata = foreign.metadata(one.metadata)
                except ValueError as error:
                    workflow = type(self._workflow).__name__
                    raise EpisodeError(f"{workflow}.after_group left a trajectory whose {error}") from None
            check_credit(episode)

    def _checked(self, result: Any, episode: EpisodeEngine) -> list[Trajectory]:
        workflow = type(self._workflow).__name__
        if not isinstance(result, list) or not result or not all(isinstance(one, Trajectory) for one in result):
            raise EpisodeError(f"{workflow}.run returned {_describe(result)}, not a list of trajectories")
        if self.pool is not None and episode.judgement is None:
            raise EpisodeError(
                f"a reward is configured and {workflow}.run never asked for it;"
                " await engine.score(prompt, text) there, or remove reward from the data's arguments"
            )
        judged = {} if episode.judgement is None else episode.judgement.metadata()
        for one in result:
            try:
                one.metadata = {**foreign.metadata(one.metadata), **judged}
            except ValueError as error:
                raise EpisodeError(f"{workflow}.run returned a trajectory whose {error}") from None
            self._check_mask(one, workflow)
            sampled = bool((one.loss_mask & (one.versions >= 0)).any())
            if getattr(self.engine, "record_experts", False) and sampled and one.routes is None:
                raise EpisodeError(
                    f"{workflow}.run returned a trajectory without the experts that the engine has recorded for it:"
                    " give it routes=response.routes, as to_trajectory does, or set record_experts of data.engine to"
                    " false"
                )
        check_credit(result)
        return result

    @staticmethod
    def _check_mask(one: Trajectory, workflow: str) -> None:
        """Either alone may be meant: tokens to imitate, or a reply that is left out. Both are a mask that has slipped,
        which would train parts of prompts."""
        given = int((one.loss_mask & (one.versions < 0)).sum())
        left_out = int((~one.loss_mask & (one.versions >= 0)).sum())
        if given and left_out:
            raise EpisodeError(
                f"{workflow}.run returned a trajectory whose loss_mask trains {given} tokens that the engine did not"
                f" sample (versions -1) and leaves out {left_out} that it did; it must be True where a reply's tokens"
                " stand in `tokens`, as in to_trajectory"
            )


async def evaluate(
    player: EpisodePlayer,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    temperature: float,
    seed: str,
    pending: dict[Any, Pending],
    arrivals: LastArrival,
) -> list[Group]:
    """Plays `samples` episodes of every prompt.

    Args:
        player: plays episodes.
        prompts: encoded.
        samples: episodes of each prompt.
        temperature: of sampling; 0 is greedy.
        seed: of the sampling.
        pending: kept up to date with what is being played.
        arrivals: told whenever something arrives.

    Returns:
        One group a prompt, without the episodes that failed (and without prompts none of whose episodes is left).

    Raises:
        RolloutsFailed: every episode failed, or one as the model and its workflow do not fit.
    """
    failures: list[str] = []
    misfits: list[str] = []
    version = player.engine.version

    async def sample(at: int, number: int) -> list[Trajectory]:
        prompt = prompts[at]
        pending[at, number] = table = Pending(prompt.id, arrivals)
        try:
            trajectories = await player.play(
                prompt,
                name=f"validation/{prompt.id}#{number}",
                seed=f"{seed}/{prompt.id}/{number}",
                sample=number,
                temperature=temperature,
                pending=table,
                score=None if player.pool is None else player.pool.held_out,
            )
            trajectories = label(trajectories, at, number, samples)
            to_batch([Group(at, prompt.id, version, trajectories)])
            return trajectories
        except Exception as error:
            if isinstance(error, Misfit):
                misfits.append(f"prompt '{prompt.id}': {error}")
            failures.append(f"prompt '{prompt.id}': {foreign.described(error)}{foreign.place(error)}")
            return []
        finally:
            del pending[at, number]

    episodes = await asyncio.gather(*(sample(at, number) for at in range(len(prompts)) for number in range(samples)))
    if misfits:
        raise RolloutsFailed(f"validation: {misfits[0]}")
    if failures:
        what = f"validation: {len(failures)} of {len(episodes)} episodes failed"
        if len(failures) == len(episodes):
            raise RolloutsFailed(f"{what}; the first: {failures[0]}")
        _log.warning("%s and are left out; the first: %s", what, failures[0])
    groups = []
    for at, prompt in enumerate(prompts):
        trajectories = [one for episode in episodes[at * samples : (at + 1) * samples] for one in episode]
        if trajectories:
            groups.append(Group(at, prompt.id, version, trajectories))
    return groups


def _describe(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {type(value[0]).__name__}" if value else "an empty list"
    return type(value).__name__
