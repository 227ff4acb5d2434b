"""One reply, one reward: reinforcement learning with verifiable rewards (RLVR).

Promises: the reply is trained as sampled, its stop token included; the reward sees its text without special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from app.batch import TEACHER_PROMPT, Trajectory
from datamodules.files.expressions import Template
from datamodules.prompts.base import Prompt
from datamodules.prompts.tokenizers import encode_prompt
from datamodules.workflows.base import EpisodeEngine, to_trajectory
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
            `reference_refresh`) learns to say without the hint what it would say with it. None shows the prompt alone.
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
        hint: str | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self.stop = tuple(stop)
        self._hint = None if hint is None else Template(hint, "RLVRWorkflow.hint")
        if self._hint is not None and (unknown := sorted(self._hint.names - {"text", "answer", "solution"})):
            raise ValueError(f"RLVRWorkflow.hint: {{{unknown[0]}}} is none of {{text}}, {{answer}}, {{solution}}")
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
        if self._hint is not None and not engine.is_held_out:  # nobody is taught by those
            told = self._told(engine, self._hinted(prompt, self._hint))
        response = await engine.generate(request)
        trajectory = to_trajectory(prompt, request, response)
        ended = response.tokens[-1:] and response.tokens[-1] in engine.ends.ids
        text = engine.tokenizer.decode(response.tokens[:-1] if ended else response.tokens, skip_special_tokens=True)
        trajectory.reward = await engine.score(prompt, text)
        trajectory.metadata = {"completion": text, "answer": prompt.answer}
        if told is not None:
            trajectory.metadata[TEACHER_PROMPT] = told
        return [trajectory]

    def _told(self, engine: EpisodeEngine, hinted: Prompt) -> list[int]:
        """Token ids of what the teacher is shown. Raises ValueError: no room behind them for the longest reply, which
        is asked before there is one, lest long replies alone be dropped."""
        tokens = list(encode_prompt(engine.tokenizer, hinted, template_options=self._template_options))
        if len(tokens) + self.max_new_tokens > engine.max_context:
            raise ValueError(
                f"RLVRWorkflow.hint: prompt '{hinted.id}' has {len(tokens)} tokens with its hint, which leaves no room"
                f" for {self.max_new_tokens} new ones in the context of {engine.max_context}; shorten the hint"
            )
        return tokens

    @staticmethod
    def _hinted(prompt: Prompt, hint: Template) -> Prompt:
        """What the teacher is shown. Raises ValueError: no user message that the hint belongs into."""
        if prompt.pictures:
            raise ValueError(
                f"RLVRWorkflow.hint: prompt '{prompt.id}' has pictures, which a hint cannot hold; leave it out"
            )
        values = {"text": prompt.text, "answer": prompt.answer, "solution": prompt.solution}
        if not prompt.messages:
            return replace(prompt, text=hint.fill(values.__getitem__))
        at = max((k for k, one in enumerate(prompt.messages) if one.get("role") == "user"), default=-1)
        if at < 0 or not isinstance(prompt.messages[at].get("content"), str):
            raise ValueError(f"RLVRWorkflow.hint: prompt '{prompt.id}' has no user message of text; leave hint out")
        values["text"] = prompt.messages[at]["content"]
        told = {**prompt.messages[at], "content": hint.fill(values.__getitem__)}
        return replace(prompt, messages=(*prompt.messages[:at], told, *prompt.messages[at + 1 :]))


class VisionRLVRWorkflow(RLVRWorkflow):
    """The same for prompts with pictures, which each of them must have: one without shows a mistake in the data."""

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        if not prompt.pictures:
            raise ValueError(f"prompt '{prompt.id}' has no picture; use RLVRWorkflow where that is meant")
        return await super().run(engine, prompt)
