"""Several tries: the model answers, is told what was wrong, and answers again.

Promises: the ids of every turn are exactly those served, the feedback's tokens appended to them (see
`datamodules.workflows.turns`); the episode has one reward; long feedback is tokenized while other episodes go on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

from transformers import PreTrainedTokenizerBase

from app import checks
from app.batch import Trajectory
from app.statistics import ROUNDING
from datamodules.conversations.chat_template import Chat, Message
from datamodules.processes.calls import DeadlinePassed
from datamodules.prompts.base import Prompt
from datamodules.prompts.tokenizers import chat_of, encode_prompt
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.calling import Caller
from datamodules.workflows.hints import Hints
from datamodules.workflows.turns import ReplyOptions, Sequences, Turns, tokenized

_MOST_AT_ONCE = 8  # feedback functions that are not asynchronous
Feedback = Callable[[Prompt, list[str]], str | Awaitable[str | None] | None]


class MultiTurnWorkflow:
    """Replies, with feedback in between, until nothing is wrong any more or `max_turns` are over.

    With `feedback`, that decides; the reward is the configured one of the last reply. Without, every reply is scored,
    and one that scores less than `success` is answered with `retry_message`. A prompt of messages goes on through the
    tokenizer's chat template, a prompt of text with the feedback's text as it is. In a chat special tokens that the
    feedback spells, as the output of the reply's own code may, get a space put into them, counted per episode in
    `quoted_feedback`. A reply that is cut off ends the episode. A record's `tools` and `chat_template_kwargs` are in
    what the model is shown, as by `RLVRWorkflow`; nobody executes calls.

    Args:
        max_turns: most replies, at least 2.
        max_new_tokens: most tokens of a reply, at least 1.
        temperature: of sampling, above 0.
        stop: tokens, besides what ends a turn anyway (see `datamodules.workflows.turn_ends`), that end a reply (each
            must be one token).
        feedback: `(prompt, replies so far) -> str | None`: what the model is told, None when it is done; the import
            path of a function, or class_path and init_args of a callable class. An asynchronous one is awaited, another
            runs in worker processes, each with state of its own and without environment variables that look like
            secrets (an API key, say). One that fails costs the group.
        feedback_deadline_s: seconds that may take; None for 30. With `feedback` only.
        feedback_isolated: False runs a feedback that is not asynchronous on threads of the training process, where one
            that keeps the interpreter's lock stops everything; None for True. With `feedback` only.
        retry_message: None for "That is not right. Try again.". Without `feedback` only.
        success: the reward a reply must have to be right; None for 1.0. Without `feedback` only.
        turn_discount: the last reply's reward times this for every turn before it, above 0 and at most 1.
        sequences: "whole", "turns" or "rendered"; see `datamodules.workflows.turns.Sequences`.
        hint: what a teacher reads in place of the prompt's text, or of its last user message, at the beginning of the
            whole episode; as of `RLVRWorkflow`, {solved} being the last reply of another episode. With sequences
            "whole".
        hint_solved_at: least reward of an episode whose reply is shown as {solved}; None for 1.0, which with a
            `turn_discount` only the first reply can earn.
        template_options: further arguments of the chat template, such as `{enable_thinking: false}`.

    Raises:
        ValueError: an argument out of range or without effect.
    """

    def __init__(
        self,
        max_turns: int = 3,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        stop: Sequence[str] = (),
        feedback: Feedback | None = None,
        feedback_deadline_s: float | None = None,
        feedback_isolated: bool | None = None,
        retry_message: str | None = None,
        success: float | None = None,
        turn_discount: float = 1.0,
        sequences: Sequences = "whole",
        hint: str | Sequence[str] | None = None,
        hint_solved_at: float | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        checks.at_least(2, {f"{name}.max_turns": max_turns}, "; RLVRWorkflow has one turn")
        checks.fraction({f"{name}.turn_discount": turn_discount})
        checks.one_of(f"{name}.sequences", sequences, get_args(Sequences))
        unused: dict[str, object]
        if feedback is None:
            unused = {"feedback_deadline_s": feedback_deadline_s, "feedback_isolated": feedback_isolated}
            why, remedy = "without feedback", "remove it or set feedback"
        else:
            unused = {"retry_message": retry_message, "success": success}
            why, remedy = "with feedback, which decides", "remove one of them"
        checks.no_effect(why, {f"{name}.{key}": value for key, value in unused.items()}, remedy)
        checks.deadline({f"{name}.feedback_deadline_s": feedback_deadline_s})
        self.max_turns = max_turns
        self.max_new_tokens = max_new_tokens
        self.turn_discount = turn_discount
        self.sequences: Sequences = sequences
        self.stop = tuple(stop)
        self._options = ReplyOptions(name, max_new_tokens, temperature, stop)
        self._feedback: Caller | None = None
        if feedback is not None:
            isolated = feedback_isolated is not False
            self._feedback = Caller(
                {"feedback": feedback},
                isolated=isolated,
                workers=_MOST_AT_ONCE,
                owner=name,
                option="feedback_isolated",
            )
        self._feedback_deadline_s = feedback_deadline_s or 30.0
        self._retry_message = "That is not right. Try again." if retry_message is None else retry_message
        # Rewards are sums of parts: 0.7 + 0.2 + 0.1 falls short of 1.0.
        self._success = (1.0 if success is None else success) - ROUNDING
        self._template_options = template_options
        self._hint, self._hint_solved_at = hint, hint_solved_at  # by which a run that goes on knows them again
        self._hints = Hints.of_turns(hint, name, hint_solved_at, self.encode, self._quoted, sequences)
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Looks up the stop tokens, once, before the first episode."""
        self._options.prepare(tokenizer)
        self._tokenizer = tokenizer

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids an episode begins with. Raises ValueError when prompt, tokenizer and options do not fit together."""
        assert self._tokenizer is not None, "prepare comes first"
        if prompt.messages:
            if not self._tokenizer.chat_template:
                raise ValueError(f"prompt '{prompt.id}' is a chat, and the tokenizer has no chat template for it")
            return tuple(self._chat_of(prompt).prompt(prompt.messages))
        if self.sequences == "rendered" or self._template_options:
            raise ValueError(
                f"{type(self).__name__}: prompt '{prompt.id}' is text, which no chat template renders; give messages"
                " (chat: true), or leave out sequences: rendered and template_options"
            )
        return tuple(encode_prompt(self._tokenizer, prompt))

    def close(self) -> None:
        """Ends the processes that feedback runs in."""
        if self._feedback is not None:
            self._feedback.stop()

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        turns = Turns(prompt, self._options)
        messages: list[Message] = list(prompt.messages)
        replies: list[str] = []
        reward: float | None = None
        quoted = 0
        while (response := await turns.generate(engine)) is not None:
            replies.append(turns.reply(engine.tokenizer))
            is_last = turns.count == self.max_turns or response.finish_reason == "length"
            if self._feedback is None:
                reward = await engine.score(prompt, replies[-1])
                told = None if reward >= self._success else self._retry_message
            else:
                reward = None
                told = None if is_last else await self._ask(engine, prompt, replies)
            if is_last or told is None:
                break
            if prompt.messages:
                shown = self._chat_of(prompt).quoted(told)
                quoted, told = quoted + (shown != told), shown
            said = turns.reply(engine.tokenizer, special=True)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
            await self._tell(turns, prompt, messages, engine)
        if reward is None:
            reward = await engine.score(prompt, replies[-1])
        metadata: dict[str, object] = {"completion": replies[-1], "answer": prompt.answer, "replies": replies}
        if quoted:
            metadata["quoted_feedback"] = quoted
        return turns.trajectories(self.sequences, reward * self.turn_discount ** (turns.count - 1), metadata)

    def after_group(self, prompt: Prompt, episodes: Sequence[Sequence[Trajectory]], max_context: int) -> None:
        """Marks each episode with what its teacher is shown."""
        if self._hints is not None:
            self._hints.of_episodes(prompt, [one for (one,) in episodes], max_context)

    async def _tell(self, turns: Turns, prompt: Prompt, messages: list[Message], engine: EpisodeEngine) -> None:
        """The model's next prompt is the conversation so far and the last of the messages."""
        tokenizer = self._tokenizer
        assert tokenizer is not None, "prepare comes first"

        def as_text(last: list[Message]) -> list[int]:
            return list(encode_prompt(tokenizer, replace(prompt, text=last[0]["content"]), bare=True))

        if not prompt.messages:
            turns.extend(await tokenized(as_text, messages[-1:]))
            return
        chat = self._chat_of(prompt)
        if self.sequences == "rendered":
            turns.rewrite(await tokenized(chat.prompt, messages), engine.image_processor)
        else:
            end, ends = turns.end, engine.ends.ids
            turns.extend(await tokenized(lambda last: chat.after_reply(last, end, ends), messages[-1:]))

    def _chat_of(self, prompt: Prompt) -> Chat:
        assert self._tokenizer is not None, "prepare comes first"
        return chat_of(self._tokenizer, prompt, self._template_options)

    def _quoted(self, prompt: Prompt, text: str) -> str:
        return self._chat_of(prompt).quoted(text) if prompt.messages else text

    async def _ask(self, engine: EpisodeEngine, prompt: Prompt, replies: list[str]) -> str | None:
        assert self._feedback is not None
        try:
            with engine.waiting("feedback", prompt.id):
                told = await self._feedback.call("feedback", (prompt, list(replies)), {}, self._feedback_deadline_s)
        except DeadlinePassed as error:
            raise TimeoutError(
                f"feedback on prompt '{prompt.id}' was not there after {self._feedback_deadline_s:g} s"
                " (feedback_deadline_s)"
            ) from error
        if told is not None and (not isinstance(told, str) or not told):
            raise TypeError(f"feedback on prompt '{prompt.id}' is {told!r}; it must be a text, or None when done")
        return told
