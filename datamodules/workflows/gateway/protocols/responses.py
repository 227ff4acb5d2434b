"""OpenAI's Responses: what a request asks for, and what it is answered.

Promises: as those of Chat Completions. Items become the messages they would be there: an assistant's thoughts, text and
calls are one message. Tools of a namespace are shown the model as `namespace.tool`, and called by their client's names;
tools that take a text (`custom`) as functions of one argument, `input`, and what a grammar would force it into is told.
What is stored can be gone on with (`previous_response_id`), and its items named (`item_reference`), within its session.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from datamodules.conversations.chat_template import Message
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols import fields, images, structured
from datamodules.workflows.gateway.protocols.base import Asked, Demand, EventWriter, Sampled, WireProtocol
from datamodules.workflows.gateway.protocols.chat_completions import openai_error
from datamodules.workflows.gateway.protocols.response_events import (
    TEXT,
    ResponseEvents,
    in_namespace,
    items_of,
    response,
)
from datamodules.workflows.gateway.transcript import Call

_WITHOUT_EFFECT = (
    "user",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "stream_options",
    "client_metadata",
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "background": (False,),
    "reasoning": ({},),
}
_INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
_PREFIX = "resp_"
_TAKES_TEXT = {"type": "object", "properties": {TEXT: {"type": "string"}}, "required": [TEXT]}
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = tuple(f"{kind}_output" for kind in _CALLS)


class Responses(WireProtocol):
    """`/v1/responses`."""

    path = "responses"

    def whole(self, body: dict[str, Any], calls: Sequence[Call]) -> dict[str, Any]:
        given = body.get("input")
        if not isinstance(given, list) or not any(map(_reference, given)):
            return body
        said = {item["id"]: item for call in calls for item in items_of((), call.id, call, ())}
        return {**body, "input": [said.get(_reference(item), item) for item in given]}

    def parse(self, body: dict[str, Any]) -> Asked:
        left = {key: value for key, value in body.items() if key not in _WITHOUT_EFFECT}
        if isinstance(left.get("reasoning"), dict):
            left["reasoning"] = fields.said(left["reasoning"])
        fields.take_neutral(left, _NEUTRAL)
        text = left.pop("text", None)
        written = {} if text is None else dict(fields.an_object("text", text))
        form = written.pop("format", None)
        fields.take_neutral(written, {"verbosity": ()}, "text")
        fields.nothing_left(written, "text")
        offered = left.get("tool_choice") != "none"
        instructions = fields.optional_text("instructions", left.pop("instructions", None))
        tools = tools_of(left.pop("tools", None))
        tools = tools if offered else None
        left["tool_choice"] = _as_known(left.get("tool_choice"), body.get("tools"))
        include = fields.texts("include", left.pop("include", None))
        for k, one in enumerate(include):
            fields.one_of(f"include[{k}]", one, _INCLUDED)
        previous = fields.optional_text("previous_response_id", left.pop("previous_response_id", None))
        given = left.pop("input", None)
        messages = messages_of(given)
        unmade = _unmade(given)
        if not previous:
            fields.check_made(unmade)
        store = left.pop("store", None)  # a session's answers are always at hand in it
        metadata = left.pop("metadata", None)
        asked = Asked(
            model=fields.optional_text("model", left.pop("model", None)),
            messages=messages,
            tools=tools,
            demands=(
                *structured.reply_format("text.format", form, tools),
                *structured.openai_calls(left, tools),
                *_grammars(body["tools"] if tools else ()),
            ),
            max_tokens=fields.number("max_output_tokens", left.pop("max_output_tokens", None), int, 1),
            temperature=fields.number("temperature", left.pop("temperature", None), float, 0),
            logprobs="message.output_text.logprobs" in include,
            shaping=fields.take_shaping(left, ("top_p",)),
            stream=fields.flag("stream", left.pop("stream", None)),
            before=[{"role": "system", "content": instructions}] if instructions else [],
            continues=previous.removeprefix(_PREFIX),
            unmade=unmade,
            own={
                "instructions": instructions or None,
                "metadata": {} if metadata is None else fields.an_object("metadata", metadata),
                "tools": body.get("tools") or [],
                "tool_choice": "auto" if offered else "none",
                "previous_response_id": previous or None,
                "store": store is None or fields.flag("store", store),
            },
        )
        fields.nothing_left(left)
        return asked

    def answer(
        self, asked: Asked, name: str, calls: Sequence[Call], tokens: Sequence[Sequence[Sampled]] | None
    ) -> dict[str, Any]:
        (call,) = calls
        items = items_of(asked.own["tools"], name, call, tokens[0] if tokens else ())
        return response(asked, name, int(time.time()), items, call)

    def events(self, asked: Asked, name: str) -> EventWriter:
        return ResponseEvents(asked, name)

    def error(self, problem: RequestError) -> dict[str, Any]:
        return openai_error(problem)


def tools_of(found: Any, exactly: bool = True) -> list[dict[str, Any]] | None:
    """As Chat Completions has them, those of namespaces by both names. `exactly`: fields that are not known are
    refused, and tools of different namespaces that the model would know by one name."""
    tools = []
    spaces: dict[str, str] = {}  # by what the model knows their tools by; "" for none

    def add(where: str, tool: dict[str, Any], space: str = "") -> None:
        made = _tool(where, tool, exactly)
        name = made["function"]["name"]
        if spaces.setdefault(name, space) != space and exactly:
            raise RequestError(
                f"{where}.name: the model would know two tools as {fields.shown(name)}, and whose it calls could not be"
                " told; rename one of them, or its namespace",
                param=f"{where}.name",
            )
        tools.append(made)

    for k, tool in enumerate([] if found is None else fields.a_list("tools", found)):
        where = f"tools[{k}]"
        tool = fields.an_object(where, tool)
        if tool.get("type") != "namespace":
            add(where, tool)
            continue
        if exactly:
            fields.only(where, tool, ("type", "name", "description", "tools"))
        space = fields.a_text(f"{where}.name", tool.get("name"))
        told = fields.optional_text(f"{where}.description", tool.get("description"))
        for i, inner in enumerate(fields.a_list(f"{where}.tools", tool.get("tools"))):
            at = f"{where}.tools[{i}]"
            named = fields.a_text(f"{at}.name", fields.an_object(at, inner).get("name"))
            about = fields.optional_text(f"{at}.description", inner.get("description"))
            about = "\n\n".join(one for one in (told if i == 0 else "", about) if one)  # once, in front of all of them
            add(at, {**inner, "name": in_namespace(space, named), "description": about}, space)
    return tools or None


def _as_known(choice: Any, tools: Any) -> Any:
    """A `tool_choice` with the name by which the model knows its tool, where that is of one namespace alone."""
    if not isinstance(choice, dict) or "name" not in choice:
        return choice
    spaces = [("", one) for one in tools or () if one["type"] != "namespace"]
    spaces += [(one["name"], inner) for one in tools or () if one["type"] == "namespace" for inner in one["tools"]]
    found = [space for space, tool in spaces if tool["name"] == choice["name"]]
    return {**choice, "name": in_namespace(found[0], choice["name"])} if len(found) == 1 and found[0] else choice


def _tool(where: str, tool: dict[str, Any], exactly: bool) -> dict[str, Any]:
    if tool.get("type") == "custom":
        if exactly:
            fields.only(where, tool, ("type", "name", "description", "format"))
        return fields.function_tool(where, tool, _TAKES_TEXT, where)
    if tool.get("type") != "function":
        raise RequestError(
            f'{where}.type: {fields.shown(tool.get("type"))}, must be "function", "custom", or a "namespace" of such: a'
            ' provider runs the others; have the agent not offer it (Codex: web_search = "disabled" in its'
            " config.toml)",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    if exactly:
        left = dict(tool)
        fields.take_neutral(left, fields.TOOL_NEUTRAL, where)
        fields.only(where, left, ("type", "name", "description", "parameters", "strict"))
    return fields.function_tool(where, tool, tool.get("parameters"), f"{where}.parameters")


def _grammars(tools: Sequence[dict[str, Any]]) -> Iterator[Demand]:
    """Of tools that take a text of a grammar. Raises RequestError."""
    for k, tool in enumerate(tools):
        inner = tool["tools"] if tool["type"] == "namespace" else [tool]
        for i, one in enumerate(inner):
            where = f"tools[{k}].tools[{i}].format" if tool["type"] == "namespace" else f"tools[{k}].format"
            form = fields.an_object(where, one.get("format") or {"type": "text"}) if one["type"] == "custom" else {}
            if not form or fields.one_of(f"{where}.type", form.get("type"), ("text", "grammar")) == "text":
                continue
            fields.only(where, form, ("type", "syntax", "definition"))
            syntax = fields.one_of(f"{where}.syntax", form.get("syntax"), ("lark", "regex"))
            name = in_namespace(tool["name"], one["name"]) if tool["type"] == "namespace" else one["name"]
            definition = fields.a_text(f"{where}.definition", form.get("definition"))
            yield Demand(
                where,
                "a grammar cannot be honoured; nothing forces the input of a tool into it: have override_sampling tell"
                " the model of it, or the agent not offer the tool",
                f"The {TEXT} of the tool {name} must follow this grammar ({syntax}):\n{definition}",
            )


def messages_of(found: Any) -> list[Message]:
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    messages: list[Message] = []
    saying = False  # the last message is a reply's, and goes on
    for i, item in enumerate(fields.a_list("input", found)):
        where = f"input[{i}]"
        item = fields.an_object(where, item)
        if _reference(item):
            raise RequestError(
                f"{where}.id: no answer of this session has it; send the item itself (AI SDK: providerOptions:"
                " {openai: {store: false}})",
                param=f"{where}.id",
            )
        known = ("message", *_CALLS, *_RESULTS, "reasoning")
        kind = fields.one_of(f"{where}.type", item.get("type") or "message", known)
        if kind in _RESULTS:
            identity = fields.a_text(f"{where}.call_id", item.get("call_id"))
            content = _content(f"{where}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": identity, "content": content})
            saying = False
            continue
        role = "assistant"
        if kind == "message":
            role = fields.one_of(f"{where}.role", item.get("role"), ("user", "assistant", "system", "developer"))
        if role != "assistant":
            content = (_content if role == "user" else _text)(f"{where}.content", item.get("content"))
            messages.append({"role": "system" if role == "developer" else role, "content": content})
            saying = False
            continue
        # Thoughts begin a reply, and so does a text, unless thoughts alone are before it.
        begins = kind == "reasoning" or (kind == "message" and not _thought_alone(messages[-1:]))
        if begins or not saying:
            messages.append({"role": "assistant", "content": ""})
        saying = True
        _add(where, kind, item, messages[-1])
    if not messages:
        raise RequestError("input: must be a text or a list of at least one item", param="input")
    return messages


def _reference(item: Any) -> str:
    """The id of the item that is named only, whose type may be left out; "" for an item that is there."""
    kind = item.get("type") if isinstance(item, dict) else ""
    named = kind == "item_reference" or (kind is None and "id" in item and item.keys() <= {"id", "type"})
    return str(item["id"]) if named and item.get("id") is not None else ""


def _unmade(found: Any) -> dict[str, str]:
    """Where an input that was read has results of calls that no item before them made, by the ids of these calls."""
    made: set[str] = set()
    results: dict[str, str] = {}
    for i, item in enumerate([] if isinstance(found, str) else found):
        if item.get("type") in _CALLS:
            made.add(item["call_id"])
        elif item.get("type") in _RESULTS and item["call_id"] not in made:
            results[item["call_id"]] = f"input[{i}].call_id"
    return results


def _thought_alone(last: Sequence[Message]) -> bool:
    return bool(last) and last[0].keys() == {"role", "content", "reasoning_content"} and not last[0]["content"]


def _add(where: str, kind: str, item: dict[str, Any], message: Message) -> None:
    """A part of a reply to its message."""
    if kind == "message":
        message["content"] += _text(f"{where}.content", item.get("content"))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        thought = "".join(
            fields.a_text(f"{where}.content[{k}].text", fields.an_object(f"{where}.content[{k}]", part).get("text"))
            for k, part in enumerate(fields.a_list(f"{where}.content", parts))
        )
        message["reasoning_content"] = message.get("reasoning_content", "") + thought
    else:
        name = fields.a_text(f"{where}.name", item.get("name"))
        if item.get("namespace") is not None:
            name = in_namespace(fields.a_text(f"{where}.namespace", item["namespace"]), name)
        if kind == "function_call":
            arguments = fields.a_text(f"{where}.arguments", item.get("arguments"))
        else:
            arguments = json.dumps({TEXT: fields.a_text(f"{where}.input", item.get("input"))}, ensure_ascii=False)
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        identity = fields.a_text(f"{where}.call_id", item.get("call_id"))
        message.setdefault("tool_calls", []).append({"id": identity, **call})


def _text(where: str, content: Any) -> str:
    """A text, or parts of it."""
    return "".join(map(str, _parts(where, content, shows=False)))


def _content(where: str, content: Any) -> Any:
    """The same, or with pictures `images.content_of`."""
    return images.content_of(_parts(where, content, shows=True))


def _parts(where: str, content: Any, shows: bool) -> list[str | images.Sent]:
    if isinstance(content, str):
        return [content]
    said: list[str | images.Sent] = []
    for k, part in enumerate(fields.parts(where, content)):
        at = f"{where}[{k}]"
        kind = fields.an_object(at, part).get("type")
        if kind == "input_image" and shows:
            left = {key: value for key, value in part.items() if key != "type"}
            said.append(images.sent(f"{at}.image_url", left.pop("image_url", None)))
            fields.take_neutral(left, {"detail": ("auto",)})
            fields.nothing_left(left, at)
            continue
        if kind not in ("input_text", "output_text", "text"):
            known = "text, and input_image" if shows else "text"
            raise RequestError(
                f"{at}.type: {fields.shown(kind)} is not supported here; only {known}", param=f"{at}.type"
            )
        said.append(fields.a_text(f"{at}.text", part.get("text")))
    return said
