"""What a workflow is, and the inference engine as its episodes see it.

A workflow plays one episode: `async def run(engine, prompt) -> list[Trajectory]`. Any class with that method will do.
It awaits `engine.generate(GenerationRequest(...))` as often as it likes, `engine.score(prompt, text)` for the
configured reward, and returns one trajectory a training sequence, each with the episode's reward. While it waits for
anything else, a tool say, it does so inside `engine.waiting("tool", name)`, so that a stall can be told.

Promises: seeds, sampling temperature of validation and request names are filled in here, group and episode ids by the
producer, so that a workflow knows nothing of streams, versions or validation. A request with stop tokens is ended by
whatever else ends a turn of this model, too (`engine.ends`); one without, by nothing. An exception in a workflow costs
its group, never the run.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from app.batch import Trajectory
from datamodules.conversations.image_processor import ImageProcessor
from datamodules.inference.protocol import (
    GenerationError,
    GenerationRequest,
    GenerationResponse,
    InferenceEngine,
)
from datamodules.pending import Pending
from datamodules.prompts.base import Prompt
from datamodules.rewards.options import Judgement
from datamodules.workflows.episode_routes import EpisodeRoutes
from datamodules.workflows.turn_ends import TurnEnds


class Workflow(ABC):
    """Plays episodes. Any class with an async method `run` counts as one, without inheriting from this.

    `max_new_tokens` is the most tokens of one reply, so that prompts without room for it are found before training. A
    method `prepare(tokenizer)`, where there is one, is called before the first episode. A method `encode(prompt)`,
    where there is one, gives the token ids with which a prompt's episodes begin (tools in the chat template, say); the
    prompt's own text or messages are encoded otherwise. A method `after_group(prompt, episodes, max_context)`, where
    there is one, is called with the training sequences of each episode of a group once all have been played and
    rewarded (not of held-out prompts): it may change their rewards and add to their metadata. A method
    `log_to(directory)`, where there is one, is called before all of them with a folder of the run directory for what is
    worth keeping. A method `close()`, where there is one, is called when rollouts end.
    """

    max_new_tokens: int

    @abstractmethod
    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        """One episode from `prompt.tokens`: its training sequences, in order of their turns."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        # A user's plain class is accepted by its shape; for a Protocol, jsonargparse would ask for our annotations too.
        return cls is Workflow and inspect.iscoroutinefunction(getattr(other, "run", None))


class Misfit(RuntimeError):
    """The model, the workflow and its configuration do not fit, whatever the prompt: the run ends with this text."""


class PlaceholderSampled(RuntimeError):
    """A reply with a token that stands for a picture: no model can be shown it again, so its group is dropped."""


class EpisodeEngine:
    """The inference engine, for one episode.

    Args:
        engine: the real one.
        tokenizer: the model's.
        score: the reward, None when workflows bring their own.
        name: of the episode, for request ids.
        seed: of the episode: turn t samples with a seed made of this and t.
        sample: number of the episode among those of its prompt, from 0.
        temperature: replaces the workflow's own (validation); None leaves it.
        before: awaited before every request (held while training rollouts are paused).
        held: seconds for which requests were held there so far.
        pending: kept up to date with the requests and rewards the episode waits for.
        ends: what ends a turn of the model; None for what the tokenizer says of it.
        image_processor: the model's; None for one that sees no pictures.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        score: Callable[[Prompt, Any], Awaitable[Judgement]] | None,
        *,
        name: str,
        seed: str,
        sample: int = 0,
        temperature: float | None = None,
        before: Callable[[], Awaitable[Any]] | None = None,
        held: Callable[[], float] | None = None,
        pending: Pending | None = None,
        ends: TurnEnds | None = None,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.ends = TurnEnds.of(tokenizer) if ends is None else ends
        self.sample = sample
        self._engine = engine
        self._score = score
        self._name = name
        self._seed = seed
        self._temperature = temperature
        self._before, self._held = before, held
        self._pending = pending or Pending()
        self._turn = 0
        self.judgement: Judgement | None = None  # the last one asked for
        self._records: bool = getattr(engine, "record_experts", False)
        self._routes = EpisodeRoutes()

    @property
    def version(self) -> int:
        """Policy version of the weights that generate the next token."""
        return self._engine.version

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def max_context(self) -> int:
        """Most tokens, prompt and reply together, of one request."""
        return self._engine.max_context

    @property
    def shapings(self) -> tuple[str, ...]:
        """Fields of `GenerationRequest.shaping` that it honours."""
        return getattr(self._engine, "shapings", ())

    @property
    def is_held_out(self) -> bool:
        """Whether this is an episode of validation, for which those of training are paused: it must not wait for what
        they hold."""
        return self._temperature is not None

    @property
    def has_reward(self) -> bool:
        """Whether `score` may be asked."""
        return self._score is not None

    @property
    def held_s(self) -> float:
        """Seconds so far that no deadline counts: requests were held, or the engine stood still. Both at once count
        twice, but weights are new before validation, or after it."""
        still: float = getattr(self._engine, "still_s", 0.0)
        return still + (0.0 if self._held is None else self._held())

    def waiting(self, what: str, name: str = "") -> AbstractContextManager[None]:
        """`with engine.waiting("tool", "search"): await ...` says in time-outs and to the watchdog what is awaited."""
        return self._pending.waiting(what, name)

    def seed(self, name: object) -> int:
        """A seed of this episode: the same for the same name, and another one in every other sample of a group."""
        return random.Random(f"{self._seed}/{name}").getrandbits(62)

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        """Samples one reply. Fills in the request's `seed`, `request_id` and, for stop texts, `decode` where empty, and
        validation's temperature, and adds what ends a turn of this model to its stop tokens where there are any.

        Raises:
            GenerationError: the request is invalid, the engine failed, or it ended the reply early.
            PlaceholderSampled: the reply has a placeholder of a picture, at which it ended.
        """
        for field in () if request.shaping is None else request.shaping.names:
            if field not in self.shapings:
                raise GenerationError(f"request.shaping.{field}: {type(self._engine).__name__} does not honour it")
        turn, self._turn = self._turn, self._turn + 1
        if request.seed is None:
            request.seed = self.seed(turn)
        if self._temperature is not None:
            request.temperature = self._temperature
        request.request_id = request.request_id or f"{self._name}/{turn}"
        if request.stop_texts and request.decode is None:
            request.decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        if request.stop_token_ids:
            request.stop_token_ids = tuple(dict.fromkeys([*request.stop_token_ids, *self.ends.ids]))
        placeholders = self._check_pictures(request)
        request.stop_token_ids = tuple(dict.fromkeys([*request.stop_token_ids, *placeholders]))
        if self._before is not None:
            await self._before()
        known = self._routes.begin(request) if self._records else None
        with self._pending.waiting("reply", request.request_id):
            response = await self._engine.generate(request)
        if known is not None and response.finish_reason != "abort":
            self._routes.end(request, response, known)
        if response.finish_reason == "abort":
            raise GenerationError(
                f"request '{request.request_id}' was ended by the engine after {len(response.tokens)} tokens"
            )
        if placeholders and not placeholders.isdisjoint(response.tokens):
            raise PlaceholderSampled(f"reply '{request.request_id}' has a placeholder of a picture that is not there")
        return response

    def _check_pictures(self, request: GenerationRequest) -> frozenset[int]:
        """The tokens that no reply may hold. Raises GenerationError for pictures that the model cannot be shown."""
        if self.image_processor is None or not hasattr(self._engine, "use_images"):
            if request.pictures:
                raise GenerationError(
                    f"request.pictures: {type(self._engine).__name__} shows no pictures to this model"
                )
            return frozenset()
        placeholders = frozenset(self.image_processor.placeholders)
        images = request.images or [-1] * len(request.tokens)
        at = next((k for k, (t, i) in enumerate(zip(request.tokens, images)) if (t in placeholders) != (i >= 0)), None)
        if at is not None:
            raise GenerationError(
                f"request.images: token {request.tokens[at]} at position {at} "
                + ("is a placeholder of no picture" if images[at] < 0 else "of a picture is no placeholder")
            )
        return placeholders

    async def score(self, prompt: Prompt, completion: Any) -> float:
        """The configured reward of `completion` (text, or whatever else the function takes that can be pickled), from a
        worker process. Raises RewardError when there is none.

        What the last asked-for one is made of goes into the metadata of the episode's trajectories.
        """
        if self._score is None:
            raise ValueError("the workflow asks for a reward and none is configured; set the data's reward")
        with self._pending.waiting("reward", self._name):
            self.judgement = await self._score(prompt, completion)
        return self.judgement.value

    def settle(self, value: float, why: str) -> float:
        """A reward that the configured one is not asked for, and why; in the metadata as one that failed."""
        self.judgement = Judgement(value, failed=why)
        return value


def to_trajectory(
    prompt: Prompt, request: GenerationRequest, response: GenerationResponse, turn_index: int = 0
) -> Trajectory:
    """The training sequence of one request: prompt tokens, then the generated ones, which are trained.

    The reward is 0.0 until the workflow knows it; ids and log-probabilities are the engine's own.
    """
    given, made = len(request.tokens), len(response.tokens)
    return Trajectory(
        tokens=torch.tensor([*request.tokens, *response.tokens]),
        loss_mask=torch.tensor([False] * given + [True] * made),
        behavior_logprobs=torch.tensor([0.0] * given + response.logprobs, dtype=torch.float32),
        versions=torch.tensor([-1] * given + response.versions),
        reward=0.0,
        group_id=0,
        episode_id=0,
        turn_index=turn_index,
        prompt_id=prompt.id,
        finish_reason=response.finish_reason,
        temperature=request.temperature or 1.0,  # greedy replies carry log-probabilities at temperature 1
        images=None if request.images is None else torch.tensor([*request.images, *[-1] * made]),
        pictures=request.pictures,
        routes=response.routes,
    )
