"""Producers for tests: numbered prompts, a workflow without a reward worker, and engines that misbehave on demand."""

from __future__ import annotations

import asyncio
import io
import re
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from app.batch import Trajectory
from datamodules.groups import Group
from datamodules.inference.protocol import GenerationError, GenerationRequest
from datamodules.pipeline.gate import StalenessGate
from datamodules.pipeline.limits import Limits
from datamodules.pipeline.player import EpisodePlayer
from datamodules.pipeline.producer import Producer
from datamodules.prompts import Prompt, PromptSource
from datamodules.prompts.dealer import PromptDealer
from datamodules.prompts.tokenizers import load_tokenizer
from datamodules.rewards import RewardPool
from datamodules.workflows import EpisodeEngine, to_trajectory
from tests.datamodules.fake_engine import VOCABULARY, FakeEngine


class Numbered(PromptSource):
    """Prompt i is "i=", named "p<i>"; `rewards` says how the reward of a prompt misbehaves."""

    def __init__(self, rewards: dict[int, str] | None = None) -> None:
        self.rewards = rewards or {}

    @property
    def size(self) -> None:
        return None

    def deal(self, index: int) -> Prompt:
        how = {"reward": self.rewards[index]} if index in self.rewards else {}
        return Prompt(id=f"p{index}", text=f"{index}=", metadata=how)


class Flow:
    """One reply; the reward is its first token, so that no reward worker is needed."""

    max_new_tokens = 4

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        request = GenerationRequest(list(prompt.tokens), max_new_tokens=4, stop_token_ids=(1,))
        response = await engine.generate(request)
        trajectory = to_trajectory(prompt, request, response)
        trajectory.reward = float(response.tokens[0])
        return [trajectory]


Build = Callable[..., Producer]


class Factory:
    """Makes started producers, and closes all of them."""

    def __init__(self) -> None:
        self._made: list[tuple[Producer, RewardPool | None]] = []

    def __call__(
        self,
        engine: FakeEngine | None = None,
        *,
        batch_size: int = 2,
        max_staleness: int = 0,
        max_concurrent: int = 100,
        over_sampling: float = 1.0,
        group_size: int = 3,
        source: PromptSource | None = None,
        workflow: Any = None,
        pool: RewardPool | None = None,
        episode_deadline_s: float = 30.0,
        limits: Limits = Limits(max_failures=8),
        max_context: int = 64,
        long_prompts: Any = "error",
        version: int = 0,
        state: dict[str, Any] | None = None,
        **options: Any,
    ) -> Producer:
        engine = engine or FakeEngine()
        tokenizer = load_tokenizer(f"char:{VOCABULARY}")
        dealer = PromptDealer(
            source or Numbered(),
            tokenizer,
            vocab_size=engine.vocab_size,
            max_context=max_context,
            reply_tokens=4,
            long_prompts=long_prompts,
        )
        workflow = workflow or Flow()
        if hasattr(workflow, "prepare"):
            workflow.prepare(tokenizer)
        producer = Producer(
            EpisodePlayer(workflow, engine, tokenizer, pool, episode_deadline_s),
            dealer,
            StalenessGate(batch_size, max_staleness, max_concurrent, over_sampling),
            group_size=group_size,
            seed=7,
            limits=limits,
            **options,
        )
        self._made.append((producer, pool))
        engine.version = version
        producer.start(version, state)
        return producer

    def close(self) -> None:
        for producer, pool in self._made:
            producer.close()
            if pool is not None:
                pool.close()


class Collecting(threading.Thread):
    """A trainer that waits for a batch, on a thread of its own."""

    def __init__(self, producer: Producer, count: int = 2) -> None:
        super().__init__(daemon=True)
        self.producer, self.count = producer, count
        self.groups: list[Any] = []
        self.error: Exception | None = None
        self.start()
        wait_until(lambda: self.producer.trainer_waits or not self.is_alive())

    def run(self) -> None:
        try:
            self.groups = self.producer.collect(self.count, 60.0)
        except Exception as error:
            self.error = error

    def done(self) -> None:
        self.join(60.0)
        assert not self.is_alive()


def ids(groups: list[Group]) -> list[str]:
    return [group.prompt_id for group in groups]


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "never came true"
        time.sleep(0.005)


def skip(producer: Producer, seconds: float) -> None:
    """The producer's event loop takes it that this much time has passed: a test need not live through a deadline, nor
    be quick enough for what it does before that."""
    loop = producer.loop
    assert loop is not None
    now = loop.time
    loop.call_soon_threadsafe(setattr, loop, "time", lambda: now() + seconds)


def only(numbers: set[int], act: Callable[[], Awaitable[None]]) -> Callable[[GenerationRequest], Awaitable[None]]:
    """Acts on the requests of these prompts (of all their samples)."""

    async def before(request: GenerationRequest) -> None:
        if int(re.split(r"[p#]", request.request_id)[1]) in numbers:
            await act()
        else:
            await asyncio.sleep(0)

    return before


async def hang() -> None:
    await asyncio.sleep(3600)


async def fail() -> None:
    raise GenerationError("the server caught fire")


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)  # nothing but tensors and primitives
    return loaded
