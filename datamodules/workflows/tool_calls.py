"""Tool calls in the text of a reply. A parser is any function `(text) -> list[ToolCall]`, named by its import path.

Promises: the parsers here never raise; what cannot be read is a call with `error` set, so that the model can be told.
A reply is read from left to right: calls inside thoughts (`<think>...</think>`) are no calls, and marks of thoughts
inside calls are text. Where the prompt has opened a thought (`Chat.opened`) and the reply closes it, a parser is given
its mark too (`with_thought`). `begin_of_calls` tells what a reply says before its calls, `GrowingCalls` while it is
still being made.
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
    calls, begin = [], _begin_of_marks(text)
    if begin == len(text) and "</tool_call>" in said_aloud(text):
        return [ToolCall(error="</tool_call> without <tool_call> before it")]
    while begin < len(text):
        call, text = _first_call(text[begin + len("<tool_call>") :])
        calls.append(call)
        begin = _begin_of_marks(text)
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
    said = text[_begin_of_json(text) :].strip().removeprefix(_PYTHON_TAG).strip()
    if not said.startswith(("{", "[")):
        return []
    try:
        found, end = _JSON.raw_decode(said)
        if said_aloud(said[end:]).strip():
            raise ValueError(f"there is more behind it: {said[end : end + 40]!r}")
    except (ValueError, RecursionError) as error:
        return [ToolCall(error=f"not valid JSON ({_brief(error)})")]
    return [checked_call(one) for one in found] if isinstance(found, list) else [checked_call(found)]


def begin_of_calls(parser: Callable[[str], list[ToolCall]], text: str, opened: str = "") -> int:
    """Where the calls begin that `parser` may find in `text`; what is before is said aloud.

    Args:
        parser: one of those here; any other may have a method `begin(text)` that says so, or else both forms are
            looked for.
        text: a whole reply.
        opened: the mark of the thought that the prompt has opened, "" for none. It counts where `text` closes the
            thought, as in `with_thought`.

    Returns:
        `len(text)` where there are none; white space before them is theirs.
    """
    whole = with_thought(opened, text)
    if callable(begin := getattr(parser, "begin", None)):
        begins = begin(whole)
    else:
        begins = len(whole)
        if parser is not json_calls:
            begins = min(begins, _begin_of_marks(whole))
        if parser is not hermes_calls:
            begins = min(begins, _begin_of_json(whole))
    if begins == len(whole):
        return len(text)
    return max(len(whole[:begins].rstrip()) - (len(whole) - len(text)), 0)


class GrowingCalls:
    """`begin_of_calls` of a reply of which more may follow, at the cost of what is new in it.

    Args:
        parser, opened: as there. For a parser of one's own nothing is known before the reply is whole.
    """

    def __init__(self, parser: Callable[[str], list[ToolCall]], opened: str) -> None:
        form = _GrowingMarks if parser is hermes_calls else _GrowingJson if parser is json_calls else None
        self._bare = None if form is None else form(in_thought=False)
        # Whether it counts that the prompt has opened a thought is known when the reply closes it.
        self._opened = None if form is None or not opened else form(in_thought=True)
        self._begin = self._aloud = 0

    def begin(self, text: str, end: int) -> int:
        """What is before this stays before the calls, whatever follows.

        Args:
            text: that of the last time, and more.
            end: of what is looked at; no less than the last time.
        """
        if self._bare is None:
            return 0
        if self._opened is None:
            begins = self._bare.begin(text, end)
        else:
            begins = self._opened.begin(text, end)
            if not self._opened.has_closed:
                begins = min(begins, self._bare.begin(text, end))
        if said := text[self._begin : begins].rstrip():
            self._aloud = self._begin + len(said)
        self._begin = begins
        return self._aloud


class _Growing:
    """Where calls of one form begin, in a reply outside or inside of a thought at first.

    Attributes:
        has_closed: whether a thought was closed.
    """

    def __init__(self, in_thought: bool) -> None:
        self.has_closed = False
        self._in_thought = in_thought
        self._at = 0  # what is before was looked at
        self._found: int | None = None

    def begin(self, text: str, end: int) -> int:
        """Where they may begin in `text[:end]`; `end` where they do not."""
        while self._found is None:
            if self._in_thought:
                over = text.find("</think>", self._at, end)
                if over < 0:
                    self._at = max(self._at, end - len("</think>") + 1)
                    return end
                self._at, self._in_thought, self.has_closed = over + len("</think>"), False, True
            elif (begins := self._look(text, end)) is not None:
                return begins
        return self._found

    def _look(self, text: str, end: int) -> int | None:
        """Outside of thoughts: where they may begin; None where that is known now, or a thought begins."""
        raise NotImplementedError


class _GrowingMarks(_Growing):
    def _look(self, text: str, end: int) -> int | None:
        mark = _THOUGHT_OR_CALL.search(text, self._at, end)
        if mark is None:
            self._at = max(self._at, end - len("<tool_call>") + 1)
            sizes = range(min(len("<tool_call>") - 1, end), 0, -1)
            return end - next((size for size in sizes if text.endswith("<tool_call>"[:size], 0, end)), 0)
        if mark[0] == "<tool_call>":
            self._found = mark.start()
        else:
            self._at, self._in_thought = mark.end(), True
        return None


class _GrowingJson(_Growing):
    """They begin where the reply does, or behind a thought; else what follows is searched for the end of another."""

    _blanks = 0  # white space there

    def _look(self, text: str, end: int) -> int | None:
        begins = self._at
        while begins + self._blanks < end and text[begins + self._blanks].isspace():
            self._blanks += 1
        said = text[begins + self._blanks : min(begins + self._blanks + len(_PYTHON_TAG), end)]
        if said.startswith(("{", "[", _PYTHON_TAG)):
            self._found = begins
        elif _PYTHON_TAG.startswith(said):
            return begins
        else:
            self._in_thought, self._blanks = True, 0
        return None


def _begin_of_marks(text: str) -> int:
    at = 0
    while (mark := _THOUGHT_OR_CALL.search(text, at)) is not None:
        if mark[0] == "<tool_call>":
            return mark.start()
        at = text.find("</think>", mark.end())
        if at < 0:
            break
    return len(text)


def _begin_of_json(text: str) -> int:
    """At the beginning, or behind a thought."""
    at = 0
    while True:
        if text[at:].lstrip().startswith(("{", "[", _PYTHON_TAG)):
            return at
        over = text.find("</think>", at)
        if over < 0:
            return len(text)
        at = over + len("</think>")


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
