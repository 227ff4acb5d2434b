"""Tool calls by the response template that a model's tokenizer comes with, which transformers reads and maintains.

Promises: whatever family that template is of, its calls are found as transformers' `parse_response` finds them, with
arguments typed by the tools' schemas where the model writes them without types; what cannot be read, or is not closed,
is a call with `error` set. Calls inside thoughts (`<think>...</think>`) are no calls. Where a tokenizer has no response
template, those of `trl`, when it is installed, are looked up by the chat template.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from datamodules.workflows.tool_calls import ToolCall, checked_call, said_aloud

_MOST_SHOWN = 200  # characters of an error


class ResponseTemplate:
    """A parser of tool calls for families that `hermes_calls` and `json_calls` do not read: Qwen3.5, GLM and whatever
    ships a template.

    Args:
        template: in place of the tokenizer's own: a response template as transformers documents it.
    """

    def __init__(self, template: dict[str, Any] | None = None) -> None:
        self._template = template
        self._opening = self._closing = re.compile("")
        self._end = ""
        self._parse: Callable[..., Any] | None = None

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Finds the template. Raises ValueError when there is none, or one without calls."""
        template = self._template or getattr(tokenizer, "response_template", None) or _of_trl(tokenizer)
        if template is None:
            raise ValueError(
                "ResponseTemplate: the tokenizer has no response_template, and trl knows none for its chat template;"
                " set template, or use hermes_calls or json_calls"
            )
        field = template.get("fields", {}).get("tool_calls") or {}
        opening = field.get("open_pattern") or (re.escape(field["open"]) if isinstance(field.get("open"), str) else "")
        if not opening:
            raise ValueError("ResponseTemplate.template: it says nothing of tool_calls, or not how they begin")
        closing = field.get("close_pattern") or re.escape(field.get("close") or "")
        self._opening, self._closing = re.compile(opening), re.compile(closing)
        self._end = str(tokenizer.eos_token or "")
        self._template, self._parse = template, tokenizer.parse_response

    def __call__(self, text: str, tools: list[dict[str, Any]] | None = None) -> list[ToolCall]:
        """The calls in a reply; `tools` are the schemas by which their arguments get types."""
        assert self._parse is not None, "prepare comes first"
        said = said_aloud(text) + self._end
        *_, last = [0, *(one.end() for one in self._opening.finditer(said))]
        if last and not self._closing.search(said, last):  # which the template reads as far as it goes
            return [ToolCall(error="a call is not closed")]
        try:
            found = self._parse(said, self._template, prefix="", tools=tools)
            calls = [one["function"] for one in found.get("tool_calls") or []]
        except Exception as error:  # whatever a template makes of what a model says
            return [ToolCall(error=f"{type(error).__name__}: {str(error)[:_MOST_SHOWN]}")]
        return [checked_call(one) for one in calls]

    def of_tools(self, tools: list[dict[str, Any]]) -> Callable[[str], list[ToolCall]]:
        """The same for replies to which these tools were offered."""
        return _OfTools(self, tools)

    def begin(self, text: str) -> int:
        """Where the first call begins; `len(text)` where there is none."""
        said = said_aloud(text)
        start = text.find(said) if said else 0
        found = self._opening.search(text, start)
        return len(text) if found is None else found.start()


class _OfTools:
    def __init__(self, parser: ResponseTemplate, tools: list[dict[str, Any]]) -> None:
        self.begin = parser.begin
        self._parser, self._tools = parser, tools

    def __call__(self, text: str) -> list[ToolCall]:
        return self._parser(text, self._tools)


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
