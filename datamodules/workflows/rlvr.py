"""One reply, one reward: reinforcement learning with verifiable rewards (RLVR).

Promises: the reply is trained as sampled, its stop token included; the reward sees its text without special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from app.batch import Trajectory
from datamodules.prompts.base import Prompt
from datamodules.workflows.base import EpisodeEngine, to_trajectory
from datamodules.workflows.turns import ReplyOptions


class RLVRWorkflow:
    """Samples one reply to the prompt and scores it with the configured reward.

    Args:
        max_new_tokens: most tokens of a reply, at least 1.
        temperature: of sampling, above 0.
        stop: tokens, besides what ends a turn anyway (see `datamodules.workflows.turn_ends`), that end a reply (each
            must be one token).

    Raises:
        ValueError: an argument out of range, a stop text that is not one token.
    """

    def __init__(self, max_new_tokens: int = 256, temperature: float = 1.0, stop: Sequence[str] = ()) -> None:
        self.max_new_tokens = max_new_tokens
        self.stop = tuple(stop)
        self._options = ReplyOptions("RLVRWorkflow", max_new_tokens, temperature, stop)

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Looks up the stop tokens, once, before the first episode."""
        self._options.prepare(tokenizer)

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        request = self._options.request(prompt.tokens, None, prompt.images, prompt.pictures)
        response = await engine.generate(request)
        trajectory = to_trajectory(prompt, request, response)
        ended = response.tokens[-1:] and response.tokens[-1] in engine.ends.ids
        text = engine.tokenizer.decode(response.tokens[:-1] if ended else response.tokens, skip_special_tokens=True)
        trajectory.reward = await engine.score(prompt, text)
        trajectory.metadata = {"completion": text, "answer": prompt.answer}
        return [trajectory]


class VisionRLVRWorkflow(RLVRWorkflow):
    """The same for prompts with pictures, which each of them must have: one without shows a mistake in the data."""

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        if not prompt.pictures:
            raise ValueError(f"prompt '{prompt.id}' has no picture; use RLVRWorkflow where that is meant")
        return await super().run(engine, prompt)
