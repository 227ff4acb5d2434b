"""Tool calls in the text of a reply. A parser is any function `(text) -> list[ToolCall]`, named by its import path.

Promises: the parsers here never raise; what cannot be read is a call with `error` set, so that the model can be told.
A reply is read from left to right: calls inside thoughts (`<think>...</think>`) are no calls, and marks of thoughts
inside calls are text. Where the prompt has opened a thought (`Chat.opened`) and the reply closes it, a parser is given
its mark too (`with_thought`). `begin_of_calls` tells what a reply says before its calls, while it is still being made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_PYTHON_TAG = "<|python_tag|>"
_UNCLOSED = "<tool_call> is not closed by </tool_call>"
_THOUGHT_OR_CALL = re.compile("<think>|<tool_call>")


@dataclass(frozen=True)
class ToolCall:
    """One call: the tool's name and its arguments; or `error`, why there is none."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def hermes_calls(text: str) -> list[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them: Hermes, Qwen 2.5, Qwen3."""
    calls, begin = [], _begin_of_marks(text, True)
    if begin == len(text) and "</tool_call>" in said_aloud(text):
        return [ToolCall(error="</tool_call> without <tool_call> before it")]
    while begin < len(text):
        call, text = _first_call(text[begin + len("<tool_call>") :])
        calls.append(call)
        begin = _begin_of_marks(text, True)
    return calls


def _first_call(text: str) -> tuple[ToolCall, str]:
    """The call whose mark is in front of `text`, and what is behind it."""
    said = text.lstrip()
    try:  # first, as its texts may spell any mark
        found, end = _JSON.raw_decode(said)
    except (ValueError, RecursionError):
        behind = ""
    else:
        behind = said[end:].lstrip()
    if behind.startswith("</tool_call>"):
        return checked_call(found), behind.removeprefix("</tool_call>")
    if behind.startswith("<tool_call>"):
        return ToolCall(error=_UNCLOSED), behind
    body, closed, behind = text.partition("</tool_call>")
    return _read(body) if closed else ToolCall(error=_UNCLOSED), behind


def with_thought(opened: str, text: str) -> str:
    """A reply behind the mark of the thought that its prompt has opened, "" for none, where it closes that thought.

    A model that does not close it has begun without one: its calls are calls.
    """
    return opened + text if "</think>" in text else text


def json_calls(text: str) -> list[ToolCall]:
    """The whole reply is one JSON object, or a list of them: `{"name": ..., "parameters": {...}}` (Llama 3.1 and up).

    A reply that does not begin as JSON ("{" or "[") is an answer, not a call.
    """
    said = text[_begin_of_json(text, True) :].strip().removeprefix(_PYTHON_TAG).strip()
    if not said.startswith(("{", "[")):
        return []
    try:
        found, end = _JSON.raw_decode(said)
        if said_aloud(said[end:]).strip():
            raise ValueError(f"there is more behind it: {said[end : end + 40]!r}")
    except (ValueError, RecursionError) as error:
        return [ToolCall(error=f"not valid JSON ({_brief(error)})")]
    return [checked_call(one) for one in found] if isinstance(found, list) else [checked_call(found)]


def begin_of_calls(parser: Callable[[str], list[ToolCall]], text: str, complete: bool = True, opened: str = "") -> int:
    """Where the calls begin that `parser` may find in `text`; what is before is said aloud.

    Args:
        parser: one of those here; any other may have a method `begin(text)` that says so, or else both forms are
            looked for.
        text: of a reply, from its beginning.
        complete: otherwise more may follow, and the end of `text` may be the beginning of a call. What is before the
            number returned then stays before it, whatever follows; for a parser of one's own that is nothing.
        opened: the mark of the thought that the prompt has opened, "" for none. It counts where `text` closes the
            thought, as in `with_thought`.

    Returns:
        `len(text)` where there are none; white space before them is theirs.
    """
    if parser not in (hermes_calls, json_calls) and not complete:
        return 0
    if opened and "</think>" not in text:
        without = begin_of_calls(parser, text, complete)
        return without if complete else min(without, _begin(parser, text, complete, opened))
    return _begin(parser, text, complete, opened)


def _begin(parser: Callable[[str], list[ToolCall]], text: str, complete: bool, opened: str) -> int:
    whole = opened + text
    if callable(begin := getattr(parser, "begin", None)):
        begins = begin(whole)
    else:
        begins = len(whole)
        if parser is not json_calls:
            begins = min(begins, _begin_of_marks(whole, complete))
        if parser is not hermes_calls:
            begins = min(begins, _begin_of_json(whole, complete))
    if complete and begins == len(whole):
        return len(text)
    return max(len(whole[:begins].rstrip()) - len(opened), 0)


def _begin_of_marks(text: str, complete: bool) -> int:
    at = 0
    while (mark := _THOUGHT_OR_CALL.search(text, at)) is not None:
        if mark[0] == "<tool_call>":
            return mark.start()
        at = text.find("</think>", mark.end())
        if at < 0:
            return len(text)
    return len(text) if complete else len(text) - _begun(text, "<tool_call>")


def _begin_of_json(text: str, complete: bool) -> int:
    """At the beginning, or behind a thought."""
    at = 0
    while True:
        said = text[at:].lstrip()
        if said.startswith(("{", "[", _PYTHON_TAG)) or (not complete and _PYTHON_TAG.startswith(said)):
            return at
        over = text.find("</think>", at)
        if over < 0:
            return len(text)
        at = over + len("</think>")


def _begun(text: str, mark: str) -> int:
    """Characters at the end of `text` with which `mark` begins."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def said_aloud(text: str) -> str:
    """What is said aloud: behind the last thought, and before one that never ends."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def _read(body: str) -> ToolCall:
    try:
        return checked_call(_JSON.decode(body.strip()))
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
            arguments = _JSON.decode(arguments)
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


_JSON = json.JSONDecoder(strict=False, parse_constant=_refuse)  # models write line ends inside strings


def _brief(error: BaseException) -> str:
    return str(error)[:200] or type(error).__name__
