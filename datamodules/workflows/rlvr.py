"""One reply, one reward: reinforcement learning with verifiable rewards (RLVR).

Promises: the reply is trained as sampled, its stop token included; the reward sees its text without special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from app import checks
from app.batch import TEACHER_PROMPT, Trajectory
from datamodules.prompts.base import Prompt
from datamodules.prompts.tokenizers import chat_of, encode_prompt
from datamodules.workflows.base import EpisodeEngine, to_trajectory
from datamodules.workflows.hints import Hints
from datamodules.workflows.turns import ReplyOptions


class RLVRWorkflow:
    """Samples one reply to the prompt and scores it with the configured reward. A record's `tools` and
    `chat_template_kwargs` are in what the model is shown (see `encode_prompt`); nobody executes calls.

    Args:
        max_new_tokens: most tokens of a reply, at least 1.
        temperature: of sampling, above 0.
        stop: tokens, besides what ends a turn anyway (see `datamodules.workflows.turn_ends`), that end a reply (each
            must be one token).
        hint: what a teacher reads in place of the prompt's text, or of its last user message, with the places {text}
            (that text), {answer} and {solution}: a policy that is its own teacher (`reference: initial` with
            `reference_refresh`) learns to say without the hint what it would say with it. {solved} is a reply of
            another episode of the group that earned `hint_solved_at`, without its thoughts; {feedback} what the reward
            said of this one (`datamodules.rewards.Reward`). Of several hints the first counts whose places are all
            known; a reply with none is not taught. None shows the prompt alone.
        hint_solved_at: least reward of a reply that is shown as {solved}; None for 1.0.
        template_options: further arguments of the chat template, such as `{enable_thinking: false}`: a model that
            thinks unless told otherwise needs room for it in `max_new_tokens`, and a reply that is cut is scored as it
            is.

    Raises:
        ValueError: an argument out of range, a stop text that is not one token, an unknown place in the hint.
    """

    def __init__(
        self,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        stop: Sequence[str] = (),
        hint: str | Sequence[str] | None = None,
        hint_solved_at: float | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self.stop = tuple(stop)
        self._hint, self._hint_solved_at = hint, hint_solved_at  # by which a run that goes on knows them again
        self._hints = None if hint is None else Hints(hint, "RLVRWorkflow", hint_solved_at, self.encode, self._quoted)
        if hint is None:
            checks.no_effect("without hint", {"RLVRWorkflow.hint_solved_at": hint_solved_at}, "remove it or set hint")
        self._options = ReplyOptions("RLVRWorkflow", max_new_tokens, temperature, stop)
        self._template_options = template_options
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Looks up the stop tokens, once, before the first episode."""
        self._options.prepare(tokenizer)
        self._tokenizer = tokenizer

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids an episode begins with. Raises ValueError as `encode_prompt`."""
        assert self._tokenizer is not None, "prepare comes first"
        return encode_prompt(self._tokenizer, prompt, template_options=self._template_options)

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        request = self._options.request(prompt.tokens, None, prompt.images, prompt.pictures)
        told = None
        if self._hints is not None and not self._hints.of_group and not engine.is_held_out:  # nobody is taught by those
            told = self._hints.of_prompt(prompt, self.max_new_tokens, engine.max_context)
        response = await engine.generate(request)
        trajectory = to_trajectory(prompt, request, response)
        ended = response.tokens[-1:] and response.tokens[-1] in engine.ends.ids
        text = engine.tokenizer.decode(response.tokens[:-1] if ended else response.tokens, skip_special_tokens=True)
        trajectory.reward = await engine.score(prompt, text)
        trajectory.metadata = {"completion": text, "answer": prompt.answer}
        if told is not None:
            trajectory.metadata[TEACHER_PROMPT] = told
        return [trajectory]

    def after_group(self, prompt: Prompt, episodes: Sequence[Sequence[Trajectory]], max_context: int) -> None:
        """Shows each episode's teacher what the others and the reward have said."""
        if self._hints is not None and self._hints.of_group:
            self._hints.of_episodes(prompt, [one for (one,) in episodes], max_context)

    def _quoted(self, prompt: Prompt, text: str) -> str:
        assert self._tokenizer is not None, "prepare comes first"
        if not prompt.messages:
            return text
        return chat_of(self._tokenizer, prompt, self._template_options).quoted(text)


class VisionRLVRWorkflow(RLVRWorkflow):
    """The same for prompts with pictures, which each of them must have: one without shows a mistake in the data."""

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        if not prompt.pictures:
            raise ValueError(f"prompt '{prompt.id}' has no picture; use RLVRWorkflow where that is meant")
        return await super().run(engine, prompt)
