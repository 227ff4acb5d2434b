"""Tool calls by the response template that a model's tokenizer comes with, which transformers reads and maintains.

Promises: whatever family that template is of, its calls are found as transformers' `parse_response` finds them, with
arguments typed by the tools' schemas where the model writes them without types; what cannot be read, or is not closed,
is a call with `error` set. Calls inside thoughts are no calls, nor is text before them. Where a tokenizer has no
response template, those of `trl`, when it is installed, are looked up by the chat template. A template that would read
other arguments than the chat template writes, or of which a reply is more than text and calls, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from datamodules.conversations.chat_template import Chat
from datamodules.workflows.tool_calls import ToolCall, checked_call

_MOST_SHOWN = 200  # characters of an error
_TAG = re.compile(r"(?:\(\?:)?(<(?:\\\|)?\w+(?:\\\|)?>)")  # at the beginning of a pattern
_OTHERS = "use hermes_calls, json_calls or a parser of your own"
_WRITTEN = {"text": 'a, b(c) "d" <e>', "digits": "075", "count": 75, "nested": {"flags": [True, 1]}}
_TYPES = {"text": "string", "digits": "string", "count": "integer", "nested": "object"}
_PROBE = {"type": "object", "properties": {name: {"type": one} for name, one in _TYPES.items()}}


class ResponseTemplate:
    """A parser of tool calls for families that `hermes_calls` and `json_calls` do not read: Qwen3.5, GLM and whatever
    ships a template.

    Args:
        template: in place of the tokenizer's own: a response template as transformers documents it.
    """

    def __init__(self, template: dict[str, Any] | None = None) -> None:
        self._template = template
        self._opening = self._closing = self._thought = self._thought_over = re.compile("")
        self._mark = ""
        self._ends: tuple[str, ...] = ()
        self._parse: Callable[..., Any] | None = None

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Finds the template. Raises ValueError when there is none, one without calls, or one that cannot be used."""
        template = self._template or getattr(tokenizer, "response_template", None) or _of_trl(tokenizer)
        if template is None:
            raise ValueError(
                "ResponseTemplate: the tokenizer has no response_template, and trl knows none for its chat template;"
                " set template, or use hermes_calls or json_calls"
            )
        fields = template.get("fields", {})
        opening = _pattern(fields, "tool_calls", "open")
        if not opening:
            raise ValueError("ResponseTemplate.template: it says nothing of tool_calls, or not how they begin")
        if _pattern(fields, "content", "open"):
            raise ValueError(
                "ResponseTemplate: the family's answers stand in a channel of their own, as GPT-OSS' do, and such"
                f" replies cannot be shown again as text and calls; {_OTHERS}"
            )
        self._opening, self._closing = re.compile(opening), re.compile(_pattern(fields, "tool_calls", "close"))
        tag = _TAG.match(opening)
        self._mark = tag[1].replace("\\", "") if tag else ""
        thought = next((name for name in ("reasoning_content", "thinking") if name in fields), "")
        begins = [
            re.escape(one) for one in ["<think>", (fields.get(thought) or {}).get("open")] if isinstance(one, str)
        ]
        ends = [one for one in ["</think>", _pattern(fields, thought, "close")] if one]
        self._thought, self._thought_over = re.compile("|".join(begins)), re.compile("|".join(ends))
        closing = Chat(tokenizer).closing if tokenizer.chat_template else None
        named = [tokenizer.eos_token, None if closing is None else tokenizer.convert_ids_to_tokens(closing)]
        self._ends = tuple(dict.fromkeys(str(one) for one in named if one))
        self._template, self._parse = template, tokenizer.parse_response
        if tokenizer.chat_template:
            self._check(tokenizer)

    def __call__(self, text: str, tools: list[dict[str, Any]] | None = None, end: str | None = None) -> list[ToolCall]:
        """The calls in a reply.

        Args:
            text: of the reply, without what ended it.
            tools: schemas by which arguments get types.
            end: the token that ended it, "" where it was cut off; None for what ends the model's replies.
        """
        assert self._parse is not None, "prepare comes first"
        start, stop = self._aloud(text)
        said = text[self._first(text, start, stop) : stop]
        if not said:
            return []
        # Some families' calls are closed by the end of the reply, of which they have several.
        ends = self._ends if end is None else (end, *self._ends) if end else ("",)
        faults = {one: self._fault(said + one) for one in ends}
        whole = next((said + one for one, fault in faults.items() if not fault), None)
        if whole is None:
            return [ToolCall(error=faults[ends[0]])]
        try:
            found = self._parse(whole, self._template, prefix="", tools=tools)
            calls = [one["function"] for one in found.get("tool_calls") or []]
        except Exception as error:  # whatever a template makes of what a model says
            return [ToolCall(error=f"{type(error).__name__}: {str(error)[:_MOST_SHOWN]}")]
        return [checked_call(one) for one in calls]

    def of_tools(self, tools: list[dict[str, Any]]) -> TemplateCalls:
        """The same for replies to which these tools were offered."""
        return TemplateCalls(self, tools)

    def begin(self, text: str) -> int:
        """Where the first call begins; `len(text)` where there is none."""
        start, stop = self._aloud(text)
        first = self._first(text, start, stop)
        return len(text) if first == stop else first

    def _aloud(self, text: str) -> tuple[int, int]:
        """From behind the last thought to before one that never ends."""
        start = max((one.end() for one in self._thought_over.finditer(text)), default=0)
        unended = self._thought.search(text, start)
        return start, len(text) if unended is None else unended.start()

    def _first(self, text: str, start: int, stop: int) -> int:
        """Where the next call begins; `stop` where there is none."""
        if self._mark:
            found = text.find(self._mark, start, stop)
            return stop if found < 0 else found
        opened = self._opening.search(text, start, stop)
        return stop if opened is None else opened.start()

    def _fault(self, said: str) -> str:
        """What is wrong with the calls as such; the template would read them as far as it goes, or not at all."""
        at = 0
        while (at := self._first(said, at, len(said))) < len(said):
            opened = self._opening.match(said, at)
            if opened is None:
                return f"this is not how a call begins: {said[at : at + _MOST_SHOWN]!r}"
            closed = self._closing.search(said, opened.end())
            if closed is None:
                return "a call is not closed"
            at = closed.end()
        return ""

    def _check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """That a call which the chat template writes, where it does so in this form, is read as it was written."""
        asked = [{"role": "user", "content": "."}]
        call = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": _WRITTEN}}
        try:
            shown = Chat(tokenizer).text(
                [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}], None, False
            )
        except ValueError:  # it shows no calls
            return
        tools = [{"type": "function", "function": {"name": "probe", "parameters": _PROBE}}]
        found = self(shown, tools, end="")
        if found and found != [ToolCall("probe", _WRITTEN)]:
            raise ValueError(
                "ResponseTemplate: it reads calls otherwise than the chat template writes them, so that tools would"
                f" get other arguments than the model gave: {found[0].error or found[0].arguments} for {_WRITTEN};"
                f" {_OTHERS}"
            )


class TemplateCalls:
    """A `ResponseTemplate` for replies to which certain tools were offered, and that ended in a certain way.

    Args:
        parser: prepared.
        tools, end: as when it is called.
    """

    def __init__(self, parser: ResponseTemplate, tools: list[dict[str, Any]], end: str | None = None) -> None:
        self.begin = parser.begin
        self._parser, self._tools, self._end = parser, tools, end

    def __call__(self, text: str) -> list[ToolCall]:
        return self._parser(text, self._tools, self._end)

    def ended_by(self, end: str) -> TemplateCalls:
        """The same for a reply that this token ended; "" for one that was cut off."""
        return TemplateCalls(self._parser, self._tools, end)


def _pattern(fields: dict[str, Any], name: str, edge: str) -> str:
    """How the field of that name opens or closes; "" where that is not said."""
    field = fields.get(name) or {}
    literal = field.get(edge) or []
    literals = [literal] if isinstance(literal, str) else literal
    return str(field.get(f"{edge}_pattern") or "|".join(map(re.escape, literals)))


def _of_trl(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    if find_spec("trl") is None:
        return None
    from trl.chat_template_utils import add_response_schema

    before = getattr(tokenizer, "response_template", None)
    try:
        template: dict[str, Any] | None = add_response_schema(tokenizer).response_template
    except ValueError:  # a chat template that it does not know
        return None
    tokenizer.response_template = before  # the tokenizer is saved with the model, as it came
    return template
