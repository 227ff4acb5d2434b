"""Tool calls by the response template that a model's tokenizer comes with, which transformers reads and maintains.

Promises: whatever family that template is of, its calls are read as transformers' `parse_response` reads them, with
arguments typed by the tools' schemas where the model writes them without types, and with their white space; what cannot
be read, is no argument, or is not closed, is a call with `error` set. A reply is read from left to right: calls inside
thoughts are no calls, and marks of thoughts inside calls are text. Where a tokenizer has no response template, those of
`trl`, when it is installed, are looked up by the chat template. A template that would read other arguments than the
chat template writes, or of which a reply is more than text and calls, is refused.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from datamodules.conversations.chat_template import Chat
from datamodules.workflows.tool_calls import ToolCall, checked_call

_log = logging.getLogger(__name__)
_MOST_SHOWN = 200  # characters of an error
_TAG = re.compile(r"(?:\(\?:)?(<(?:\\\|)?\w+(?:\\\|)?>)")  # at the beginning of a pattern
_OTHERS = "use hermes_calls, json_calls or a parser of your own"
# A value without the white space around it.
_LOOSE = re.compile(r"\\s[*+](\(\?P<value>(?:\.|\[\\s\\S\]|\[\\S\\s\])[*+]\?\))\\s[*+]")
_TYPED = ("json", "python-call-list")  # contents in which the model writes types itself
_NO_ARGUMENTS = re.compile(r"[\s,]*(?:</\w+>)?")  # what may stand around arguments: `</function>`
_WRITTEN = {"text": '  a, b(c) "d" <e>\n', "digits": "075", "count": 75, "nested": {"flags": [True, 1]}}
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
        self._argument: re.Pattern[str] | None = None
        self._is_typed = False
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
        self._template, self._parse = _exact(template), tokenizer.parse_response
        self._argument = _argument(self._template)
        self._is_typed = fields["tool_calls"].get("content") in _TYPED
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
        # Some families' calls are closed by the end of the reply, of which they have several.
        ends = self._ends if end is None else (end, *self._ends) if end else ("",)
        readings = [self._read(text + one) for one in ends]
        found = next((one for one in readings if not any(fault for _, fault in one)), readings[0])
        regions = [[ToolCall(error=fault)] if fault else self._calls(said, tools) for said, fault in found]
        return [call for calls in regions for call in calls]

    def _calls(self, said: str, tools: list[dict[str, Any]] | None) -> list[ToolCall]:
        """What the template makes of one region: a call, or all of a reply in families that list them."""
        assert self._parse is not None, "prepare comes first"
        try:
            # Where the model wrote types itself, those of the schemas would undo them: "7" may be meant as a text.
            read = self._parse(said, self._template, prefix="", tools=None if self._is_typed else tools)
            found = [checked_call(one["function"]) for one in _flat(read.get("tool_calls", []))]
            return found or [ToolCall(error=f"no call is in it: {said[:_MOST_SHOWN]!r}")]
        except Exception as error:  # whatever a template makes of what a model says
            return [ToolCall(error=f"{type(error).__name__}: {str(error)[:_MOST_SHOWN]}")]

    def of_tools(self, tools: list[dict[str, Any]]) -> TemplateCalls:
        """The same for replies to which these tools were offered."""
        return TemplateCalls(self, tools)

    def begin(self, text: str) -> int:
        """Where the first call begins; `len(text)` where there is none."""
        return self._next(text, 0)

    def _next(self, text: str, at: int) -> int:
        """Where the next call begins that is in no thought; `len(text)` where there is none."""
        while True:
            if self._mark:
                found = text.find(self._mark, at)
                first = len(text) if found < 0 else found
            else:
                opened = self._opening.search(text, at)
                first = len(text) if opened is None else opened.start()
            thought = self._thought.search(text, at, first)
            if thought is None:
                return first
            over = self._thought_over.search(text, thought.end())
            if over is None:
                return len(text)
            at = over.end()

    def _read(self, text: str) -> list[tuple[str, str]]:
        """The calls as they are written, each with what is wrong with it as such: the template would read it as far as
        it goes, or not at all. Nothing is read behind one without an end."""
        found: list[tuple[str, str]] = []
        at = 0
        while (begin := self._next(text, at)) < len(text):
            opened = self._opening.match(text, begin)
            closed = None if opened is None else self._closing.search(text, opened.end())
            if opened is None or closed is None:
                shown = repr(text[begin : begin + _MOST_SHOWN])
                fault = "a call is not closed" if opened else f"this is not how a call begins: {shown}"
                return [*found, ("", fault)]
            at = closed.end()
            rest = "" if self._argument is None else self._argument.sub("", text[opened.end() : closed.start()]).strip()
            fault = "" if _NO_ARGUMENTS.fullmatch(rest) else f"this is no argument: {rest[:_MOST_SHOWN]!r}"
            found.append((text[begin:at], fault))
        return found

    def _check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """That a call which the chat template writes, where it does so in this form, is read as it was written; a
        template that leaves out white space around texts is warned of."""
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
        wanted = ToolCall("probe", _WRITTEN)
        if found and [_trimmed(one) for one in found] != [_trimmed(wanted)]:
            raise ValueError(
                "ResponseTemplate: it reads calls otherwise than the chat template writes them, so that tools would"
                f" get other arguments than the model gave: {found[0].error or found[0].arguments} for {_WRITTEN};"
                f" {_OTHERS}"
            )
        if found and found != [wanted]:
            _log.warning(
                "ResponseTemplate: texts in calls lose the white space around them, such as the indentation of code."
                " To keep it, set template with (?P<value>...) without \\s around it in tag_pattern, and with strip:"
                " false in the args of its value_parser"
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


def _flat(found: Any) -> list[Any]:
    """The calls, of which a region may be a list."""
    return [one for each in found for one in _flat(each)] if isinstance(found, list) else [found]


def _trimmed(call: ToolCall) -> ToolCall:
    """The call with texts as arguments without the white space around them."""
    given = {name: one.strip() if isinstance(one, str) else one for name, one in call.arguments.items()}
    return ToolCall(call.name, given, call.error)


def _exact(template: dict[str, Any]) -> dict[str, Any]:
    """The template with values as they are written: some leave out white space around them, indentation say. Only a
    line break at each edge is the family's own. And with names as tools have them: Gemma 4's end at '-' and '.'."""
    made: dict[str, Any] = copy.deepcopy(template)
    calls = made["fields"]["tool_calls"]
    if isinstance(calls.get("open_pattern"), str):
        calls["open_pattern"] = calls["open_pattern"].replace(r"(?P<name>\w+)", r"(?P<name>[\w.-]+)")
    if calls.get("content") == "xml-inline":
        given = calls.get("content_args", {})
        given["tag_pattern"] = _LOOSE.sub(r"\\n?\1\\n?", given.get("tag_pattern", ""))
        values = given.get("value_parser") or {}
        if values.get("name") == "text" or (values.get("args") or {}).get("allow_non_json"):
            values.setdefault("args", {})["strip"] = False
    return made


def _argument(template: dict[str, Any]) -> re.Pattern[str] | None:
    """How an argument is written; None for families that write JSON."""
    calls = template["fields"]["tool_calls"]
    return re.compile(calls["content_args"]["tag_pattern"], re.DOTALL) if calls.get("content") == "xml-inline" else None


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
