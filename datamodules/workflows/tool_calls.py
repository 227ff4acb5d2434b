"""Tool calls in the text of a reply. A parser is any function `(text) -> list[ToolCall]`, named by its import path.

Promises: the parsers here never raise; what cannot be read is a call with `error` set, so that the model can be told.
Calls inside thoughts (`<think>...</think>`) are no calls. `begin_of_calls` tells what a reply says before its calls,
while it is still being made.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class ToolCall:
    """One call: the tool's name and its arguments; or `error`, why there is none."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def hermes_calls(text: str) -> list[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them: Hermes, Qwen 2.5, Qwen3."""
    said = said_aloud(text)
    pieces = said.split("<tool_call>")[1:]
    if not pieces and "</tool_call>" in said:
        return [ToolCall(error="</tool_call> without <tool_call> before it")]
    calls = []
    for piece in pieces:
        body, closed, _ = piece.partition("</tool_call>")
        calls.append(_read(body) if closed else ToolCall(error="<tool_call> is not closed by </tool_call>"))
    return calls


def json_calls(text: str) -> list[ToolCall]:
    """The whole reply is one JSON object, or a list of them: `{"name": ..., "parameters": {...}}` (Llama 3.1 and up).

    A reply that does not begin as JSON ("{" or "[") is an answer, not a call.
    """
    said = said_aloud(text).strip().removeprefix(_PYTHON_TAG).strip()
    if not said.startswith(("{", "[")):
        return []
    try:
        found = json.loads(said, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return [ToolCall(error=f"not valid JSON ({_brief(error)})")]
    return [checked_call(one) for one in found] if isinstance(found, list) else [checked_call(found)]


def begin_of_calls(parser: Callable[[str], list[ToolCall]], text: str, complete: bool = True) -> int:
    """Where the calls begin that `parser` may find in `text`; what is before is said aloud.

    Args:
        parser: one of those here; any other may have a method `begin(text)` that says so, or else both forms are
            looked for.
        text: of a reply, from its beginning.
        complete: otherwise more may follow, and the end of `text` may be the beginning of a call. What is before the
            number returned then stays before it, whatever follows; for a parser of one's own that is nothing.

    Returns:
        `len(text)` where there are none; white space before them is theirs.
    """
    if parser not in (hermes_calls, json_calls):
        if not complete:
            return 0
        if callable(begin := getattr(parser, "begin", None)):
            return len(text[: begin(text)].rstrip())
    begins = len(text)
    if parser is not json_calls:
        begins = min(begins, _begin_of_marks(text, complete))
    if parser is not hermes_calls:
        begins = min(begins, _begin_of_json(text, complete))
    return begins if complete and begins == len(text) else len(text[:begins].rstrip())


def _begin_of_marks(text: str, complete: bool) -> int:
    start = text.rfind("</think>") + 1  # no mark begins within one
    thought, mark = text.find("<think>", start), text.find("<tool_call>", start)
    if mark >= 0 and not 0 <= thought < mark:
        return mark
    return len(text) if complete or thought >= 0 else len(text) - _begun(text, "<tool_call>")


def _begin_of_json(text: str, complete: bool) -> int:
    start = text.rfind("</think>")
    start = 0 if start < 0 else start + len("</think>")
    said = text[start:].lstrip()
    begun = said.startswith(("{", "[", _PYTHON_TAG)) or (not complete and _PYTHON_TAG.startswith(said))
    return start if begun else len(text)


def _begun(text: str, mark: str) -> int:
    """Characters at the end of `text` with which `mark` begins."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def said_aloud(text: str) -> str:
    """What is said aloud: behind the last thought, and before one that never ends."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def _read(body: str) -> ToolCall:
    try:
        # Models write line ends inside strings.
        return checked_call(json.loads(body.strip(), strict=False, parse_constant=_refuse))
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"not valid JSON ({_brief(error)})")


def checked_call(found: Any) -> ToolCall:
    """A call of a name and arguments, or why it is none."""
    if not isinstance(found, dict):
        return ToolCall(error=f"a call must be a JSON object, this is a {type(found).__name__}")
    name = found.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall(error='a call needs a "name", which is a string')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON
        try:
            arguments = json.loads(arguments, strict=False, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, error=f'"arguments" is not valid JSON ({_brief(error)})')
    if not isinstance(arguments, dict):
        return ToolCall(name, error=f'"arguments" must be a JSON object, this is a {type(arguments).__name__}')
    try:
        json.dumps(arguments, allow_nan=False)  # 1e999 is read as infinity, which no other language reads back
    except (ValueError, TypeError, RecursionError) as error:
        return ToolCall(name, error=f'"arguments" cannot be written as JSON ({_brief(error)})')
    return ToolCall(name, arguments)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _brief(error: BaseException) -> str:
    return str(error)[:200] or type(error).__name__
