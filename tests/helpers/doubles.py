"""What end-to-end tests put in the place of a model that could solve problems, and small recorded data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from app.batch import Trajectory
from datamodules.conversations.tokens import Conversation, save_npz
from datamodules.prompts.base import Prompt
from datamodules.workflows import EpisodeEngine


def off_by_one(prompt: Prompt) -> str:
    """The solution, its answer off by one."""
    steps, mark, answer = (prompt.solution or prompt.answer).rpartition("#### ")
    return f"{steps}{mark}{float(answer.replace(',', '')) + 1:.12g}"


class WrittenSolutions:
    """Replies with the data's own solution to every other asking of a prompt, and with a wrong answer to the others."""

    def __init__(self, max_new_tokens: int = 64) -> None:
        self.max_new_tokens = max_new_tokens
        self._asked: Counter[str] = Counter()

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        right = self._asked[prompt.id] % 2 == 0
        self._asked[prompt.id] += 1
        text = (prompt.solution or prompt.answer) if right else off_by_one(prompt)
        given, made = list(prompt.tokens), engine.tokenizer.encode(text)
        length = len(given) + len(made)
        return [
            Trajectory(
                tokens=torch.tensor([*given, *made]),
                loss_mask=torch.arange(length) >= len(given),
                behavior_logprobs=torch.zeros(length),
                versions=torch.full((length,), -1),  # not sampled: nobody knows with what probability
                reward=await engine.score(prompt, engine.tokenizer.decode(made)),
                group_id=0,
                episode_id=0,
                prompt_id=prompt.id,
            )
        ]


class ShortMask(WrittenSolutions):
    """Forgets the last token's entry in the mask."""

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        (whole,) = await super().run(engine, prompt)
        return [replace(whole, loss_mask=whole.loss_mask[:-1])]


class Mistyped(WrittenSolutions):
    """Has a bug in its code."""

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        return prompt.no_such_field  # type: ignore[attr-defined]


def conversations(path: Path, tasks: int = 4, trials: int = 4, vocabulary: int = 100) -> Path:
    """Recorded conversations of 40 tokens with three generated turns; trials of a task begin alike."""
    made = []
    for task in range(tasks):
        tokens = np.random.default_rng(task).integers(0, vocabulary, 40)
        for trial in range(trials):
            own = tokens.copy()
            own[12 + trial :] = np.random.default_rng([task, trial]).integers(0, vocabulary, 28 - trial)
            starts, ends = np.array([8, 18, 30]), np.array([14, 25, 40])
            reward = float((task + trial) % 2)
            made.append(Conversation(str(task), trial, "m", reward, "made", own, starts, ends, np.array([1, 3, 5])))
    save_npz(path, made)
    return path


def exploding(step: int) -> float:
    """A learning rate's factor that destroys any model in its third step."""
    return 1.0 if step < 2 else 1e30
