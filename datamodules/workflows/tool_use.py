"""An agent with tools: the model calls them, reads the results, and goes on until it answers without a call.

Promises: the ids of every turn are exactly those served (see `datamodules.workflows.turns`); whatever is wrong with a
call is told to the model and counted in the metadata, and costs neither the episode nor its group.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from app import checks
from app.batch import Trajectory
from datamodules.conversations.chat_template import Chat
from datamodules.prompts.base import Prompt
from datamodules.prompts.tokenizers import chat_of
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.calling import within
from datamodules.workflows.hints import Hints
from datamodules.workflows.response_template import ResponseTemplate, TemplateCalls
from datamodules.workflows.tool_calls import ToolCall, hermes_calls, json_calls, with_thought
from datamodules.workflows.tools import Toolbox, ToolRunner
from datamodules.workflows.turns import ReplyOptions, Sequences, Turns, tokenized

_CLOSE_S = 60.0


class ToolWorkflow:
    """Plays an agent with tools.

    An episode ends with a reply without calls ("stop"), with a reply cut off or a context that is full ("length"), or
    with calls in the last turn, which are not carried out ("max_turns"). Its reward is the tools' own, where they have
    one, else the configured one of the last reply. The metadata counts, where there were any, `tool_calls` and among
    them `malformed_calls`, `unknown_tools`, `invalid_arguments`, `failed_calls`, `timed_out_calls`, `refused_calls`,
    `cut_results` (too long) and `quoted_results` (they spelled tokens of the chat template, which got a space put into
    them).

    Args:
        tools: JSON schemas and what carries out the calls: `FunctionTools` or your own class; see
            `datamodules.workflows.tools.Toolbox`.
        max_turns: most replies, at least 2.
        max_new_tokens: most tokens of a reply, at least 1.
        temperature: of sampling, above 0.
        stop: tokens, besides what ends a turn anyway (see `datamodules.workflows.turn_ends`), that end a reply (each
            must be one token).
        parser: finds the calls in a reply: `datamodules.workflows.hermes_calls`, `json_calls`, a `ResponseTemplate` or
            a function of your own, which is given the reply's text, and the `<think>` that the prompt ended with where
            the reply closes it.
        sequences: "whole", "turns" or "rendered"; see `datamodules.workflows.turns.Sequences`. Templates that drop old
            thoughts only do so with "rendered": otherwise the model sees its thoughts again, as it wrote them.
        tool_role: role of the messages that carry results; "user" for templates that know no "tool".
        show_tools: whether the chat template shows the tools to the model; if not, the prompts' messages must.
        tool_deadline_s: seconds a call may take; then the model is told so.
        tool_deadlines_s: tool name -> seconds, for tools with a deadline of their own.
        max_calls: calls of one reply that are carried out; the model is told about those that were not.
        max_result_chars: longest result; longer ones are cut, and say so. None for no limit.
        hint: what a teacher reads in place of the prompt's text, or of its last user message, at the beginning of the
            whole episode; as of `RLVRWorkflow`, {solved} being the last reply of another episode. With sequences
            "whole".
        hint_solved_at: least reward of an episode whose reply is shown as {solved}; None for 1.0.
        template_options: further arguments of the chat template, such as `{enable_thinking: false}`. A record's
            `chat_template_kwargs` go first; its `tools` are left out, since these are the workflow's.

    Raises:
        ValueError: an argument out of range, tools that are none.
    """

    def __init__(
        self,
        tools: Toolbox,
        max_turns: int = 8,
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        stop: Sequence[str] = (),
        parser: Callable[[str], list[ToolCall]] = hermes_calls,
        sequences: Sequences = "whole",
        tool_role: Literal["tool", "user"] = "tool",
        show_tools: bool = True,
        tool_deadline_s: float = 30.0,
        tool_deadlines_s: Mapping[str, float] | None = None,
        max_calls: int = 16,
        max_result_chars: int | None = None,
        hint: str | Sequence[str] | None = None,
        hint_solved_at: float | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        checks.at_least(2, {f"{name}.max_turns": max_turns}, ": a call, and an answer")
        checks.one_of(f"{name}.tool_role", tool_role, ("tool", "user"))
        if not inspect.iscoroutinefunction(getattr(tools, "call", None)) or not hasattr(tools, "tools"):
            raise ValueError(f"{name}.tools: {type(tools).__name__} needs an attribute tools and an async method call")
        checks.one_of(f"{name}.sequences", sequences, get_args(Sequences))
        self.tools = tools
        self.max_turns = max_turns
        self.max_new_tokens = max_new_tokens
        self.sequences: Sequences = sequences
        self.tool_role = tool_role
        self.stop = tuple(stop)
        self._options = ReplyOptions(name, max_new_tokens, temperature, stop)
        self._parser: Callable[[str], list[ToolCall]] = parser
        self._show_tools = show_tools
        self._runs = partial(
            ToolRunner,
            deadline_s=tool_deadline_s,
            deadlines=tool_deadlines_s,
            max_calls=max_calls,
            max_result_chars=max_result_chars,
        )
        self._runner: ToolRunner | None = None if hasattr(tools, "prepare") else self._runs(tools.tools)
        self._template_options = template_options
        self._hint, self._hint_solved_at = hint, hint_solved_at  # by which a run that goes on knows them again
        self._hints = Hints.of_turns(hint, name, hint_solved_at, self.encode, self._quoted, sequences)
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Prepares the tools and tries the chat template. Raises ValueError when it cannot show tools or their results,
        or writes calls in a form that is not the parser's, and what the tools' own preparation raises."""
        self._options.prepare(tokenizer)
        self._tokenizer = tokenizer
        if hasattr(self.tools, "prepare"):
            self.tools.prepare()
            self._runner = self._runs(self.tools.tools)
        if isinstance(self._parser, ResponseTemplate):
            self._parser.prepare(tokenizer)
            self._parser = self._parser.of_tools(self.tools.tools)
        chat = Chat(tokenizer, self.tools.tools if self._show_tools else None, self._template_options)
        if self.sequences != "rendered":
            chat.after_reply([{"role": self.tool_role, "content": "."}])
        if not chat.shows(self.tool_role):
            raise ValueError(
                f"ToolWorkflow.tool_role: the tokenizer's chat template does not show messages of the role"
                f" '{self.tool_role}' that follow a reply, so the model would never see a result; set tool_role: user"
            )
        if self._show_tools and self._parser in (hermes_calls, json_calls):
            _check_form(self._parser, chat)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids an episode begins with, the tools' descriptions included."""
        return tuple(self._chat_of(prompt).prompt(prompt.conversation()))

    def log_to(self, directory: Path) -> None:
        """Where tools may keep what they print."""
        if hasattr(self.tools, "log_to"):
            self.tools.log_to(directory)

    def close(self) -> None:
        """Ends what the tools started for all episodes."""
        if hasattr(self.tools, "stop"):
            self.tools.stop()

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        box: Any = self.tools
        if hasattr(box, "open"):
            box = box.open(prompt)
            if inspect.isawaitable(box):
                with engine.waiting("tools", "open"):
                    box = await box
        try:
            turns, reply, counts = await self._play(engine, prompt, box)
            reward = await (box.reward(prompt, reply) if hasattr(box, "reward") else engine.score(prompt, reply))
        finally:
            if box is not self.tools and hasattr(box, "close"):
                await within(_CLOSE_S, box.close())  # the episode's own deadline may have passed already
        metadata: dict[str, object] = {"completion": reply, "answer": prompt.answer, **counts}
        return turns.trajectories(self.sequences, float(reward), metadata)

    def after_group(self, prompt: Prompt, episodes: Sequence[Sequence[Trajectory]], max_context: int) -> None:
        """Marks each episode with what its teacher is shown."""
        if self._hints is not None:
            self._hints.of_episodes(prompt, [one for (one,) in episodes], max_context)

    async def _play(self, engine: EpisodeEngine, prompt: Prompt, box: Toolbox) -> tuple[Turns, str, Counter[str]]:
        """The conversation, the last reply's text, and what became of the calls."""
        chat, tokenizer = self._chat_of(prompt), engine.tokenizer
        assert self._runner is not None, "prepare comes first"
        messages = prompt.conversation()
        turns = Turns(prompt, self._options)
        counts: Counter[str] = Counter()
        reply = ""
        while (response := await turns.generate(engine)) is not None:
            reply = turns.reply(tokenizer)
            if response.finish_reason == "length":
                break
            said = turns.reply(tokenizer, special=True)
            end = str(tokenizer.decode([turns.end])) if turns.end in engine.ends.ids else ""
            opened = chat.opened(turns.tokens, len(response.tokens))
            calls = self._calls(with_thought(opened, said), end)
            if not calls:
                break
            if turns.count == self.max_turns:
                turns.finish_reason = "max_turns"
                break
            results = await self._runner.answer(box, calls, engine, counts)
            quoted = [chat.quoted(result) for result in results]
            if changed := sum(one != other for one, other in zip(results, quoted, strict=True)):
                counts["quoted_results"] += changed
            answers = [
                {"role": self.tool_role, "name": one.name, "content": result}
                for one, result in zip(calls, quoted, strict=True)
            ]
            messages += [{"role": "assistant", "content": said}, *answers]
            if self.sequences == "rendered":
                turns.rewrite(await tokenized(chat.prompt, messages), engine.image_processor)
            else:
                after_reply = partial(chat.after_reply, last=turns.end, ends=engine.ends.ids)
                turns.extend(await tokenized(after_reply, answers))
        return turns, reply, counts

    def _calls(self, text: str, end: str) -> list[ToolCall]:
        parser = self._parser.ended_by(end) if isinstance(self._parser, TemplateCalls) else self._parser
        try:
            return parser(text)
        except Exception as error:  # a user's own parser
            return [ToolCall(error=f"{type(error).__name__}: {error}")]

    def _quoted(self, prompt: Prompt, text: str) -> str:
        return self._chat_of(prompt).quoted(text)

    def _chat_of(self, prompt: Prompt) -> Chat:
        assert self._tokenizer is not None, "prepare comes first"
        return chat_of(self._tokenizer, prompt, self._template_options, self.tools.tools if self._show_tools else [])


def _check_form(parser: Callable[[str], list[ToolCall]], chat: Chat) -> None:
    """That a call which the chat template writes, where it does, is found: the model is used to that form."""
    call = ToolCall("probe", {"text": 'a "b"', "count": 75})
    written = chat.written_call(call.name, call.arguments)
    if written and parser(written) != [call]:
        others = (one.__name__ for one in (hermes_calls, json_calls) if one(written) == [call])
        remedy = next(others, "{class_path: datamodules.workflows.ResponseTemplate} or a function of your own")
        raise ValueError(
            f"ToolWorkflow.parser: {parser.__name__} does not read calls as the tokenizer's chat template writes them,"
            f" {written.strip()[:200]!r}, so the model's would be missed; use {remedy}"
        )
