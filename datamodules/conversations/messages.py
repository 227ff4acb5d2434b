"""Messages as recordings hold them, and OpenAI's form of the same.

Promises: what would be lost on the way to a chat template is refused by its place in the list; a message in OpenAI's
form reads as the same message in the form of recordings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from app.text import printable
from datamodules.files.data_files import RecordedDataError
from datamodules.files.json_lines import parse_json

ROLES = ("system", "user", "assistant", "tool")
_KEYS = ("role", "content", "tool_calls", "weight", "id", "tool_call_id")
_NOTHING: tuple[Any, ...] = (None, "", [], {})  # 0 and false say something


def check_messages(messages: Any, source: str) -> list[dict[str, Any]]:
    """`messages` itself if all have the form of recordings; raises RecordedDataError naming the first that has not.

    A message has `role` (system, user, assistant, tool), `content` and, on assistant messages, `tool_calls`:
    `[{"id", "name", "arguments"}]`, and `weight`: 0 for one that is shown and not trained (default 1); a result has the
    `id` of its call (or `tool_call_id`), and may have the tool's `name`. Other keys, which no template would be given,
    are refused unless they hold nothing.
    """

    def refuse(where: str, problem: str) -> None:
        raise RecordedDataError(f"{source}: {where} {problem}; correct or remove the conversation")

    if not isinstance(messages, list) or not messages:
        refuse("messages", "must be a non-empty list")
    for k, message in enumerate(messages):
        where = f"messages[{k}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            refuse(f"{where}.role", f"must be one of {ROLES}")
        keys = (*_KEYS, "name") if message["role"] == "tool" else _KEYS
        unused = next((key for key, value in message.items() if key not in keys and value not in _NOTHING), None)
        if unused is not None:
            hint = "; thoughts belong into content, as the model writes them" if message["role"] == "assistant" else ""
            refuse(f"{where}.{printable(unused, 40)}", f"would be left out, a message has {', '.join(keys)}{hint}")
        if not isinstance(message.get("content"), str):
            refuse(f"{where}.content", "must be text (empty where there is none)")
        calls = message.get("tool_calls", [])
        if not isinstance(calls, list) or (calls and message["role"] != "assistant"):
            refuse(f"{where}.tool_calls", "must be a list, on an assistant message")
        for n, call in enumerate(calls):
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                refuse(f"{where}.tool_calls[{n}].name", "must be a string (or one in 'function')")
            if not isinstance(call.get("arguments"), dict):
                refuse(f"{where}.tool_calls[{n}].arguments", "must be an object, or the JSON text of one")
        if "weight" in message and (message["weight"] not in (0, 1) or message["role"] != "assistant"):
            refuse(f"{where}.weight", "must be 0 or 1, on an assistant message")
    if not any(map(is_trained, messages)):
        refuse("messages", "holds no assistant message (of weight 1), so nothing to train on")
    return messages


def tools_of(tools: Any, source: str) -> list[dict[str, Any]] | None:
    """The JSON schemas of a record, given as a list or its JSON text; None for none. Raises RecordedDataError."""
    try:
        found = parse_json(tools or "null") if isinstance(tools, str) else tools
    except ValueError:
        found = tools
    if found is not None and not (isinstance(found, list) and all(isinstance(tool, dict) for tool in found)):
        raise RecordedDataError(f"{source}: 'tools' must be a list of JSON schemas; correct or remove the line")
    return found


def is_trained(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and message.get("weight", 1) == 1


def as_recorded(message: Any) -> Any:
    """A message of OpenAI's Chat Completions in the form of recordings; one in that form as it is.

    Calls are `{"id", "name", "arguments"}` with the arguments an object, in place of `function` with their JSON text;
    parts of text are one text, and no content beside calls is an empty one, or the refusal; `developer` is the system;
    keys with null are left out. What is in neither form stays, for `check_messages` to name.
    """
    if not isinstance(message, dict):
        return message
    result = {key: value for key, value in message.items() if value is not None}
    if result.get("role") == "developer":
        result["role"] = "system"
    if "content" not in result and (result.get("tool_calls") or "refusal" in result):
        result["content"] = result.pop("refusal", "")
    content = result.get("content")
    if isinstance(content, list) and all(map(_is_text, content)):
        result["content"] = "".join(part["text"] for part in content)
    if isinstance(calls := result.get("tool_calls"), list):
        result["tool_calls"] = list(map(_flat, calls))
    return result


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _flat(call: Any) -> Any:
    """A call without `function`, its arguments as an object."""
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    if isinstance(function, dict) and call.get("type", "function") == "function":
        call = {"id": call.get("id") or "", "name": function.get("name"), "arguments": function.get("arguments")}
    if isinstance(text := call.get("arguments"), str):
        with suppress(ValueError):
            call = {**call, "arguments": parse_json(text or "{}")}
    return call


def with_arguments(message: dict[str, Any], arguments: Callable[[Any], Any]) -> dict[str, Any]:
    """Most templates take the arguments of calls as objects; clients and files have them as text.

    Args:
        message: with calls in OpenAI's form, or without any.
        arguments: `Chat.arguments` of the template.
    """
    if not message.get("tool_calls"):
        return message
    calls = []
    for one in message["tool_calls"]:
        function = one.get("function")
        if isinstance(function, Mapping) and "arguments" in function:
            one = {**one, "function": {**function, "arguments": arguments(parsed(function["arguments"]))}}
        calls.append(one)
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def parsed(arguments: Any) -> Any:
    """The arguments of a call as an object; as they are where they are none."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, Mapping) else arguments
