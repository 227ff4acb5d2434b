"""OpenAI's Chat Completions: what a request asks for, and what it is answered.

Promises: a field that changes what is sampled and is not honoured is refused by its name; fields that change nothing
here (`user`, `metadata`, `store` and their like) are passed over; what is not known at all is refused too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from datamodules.conversations.chat_template import Message
from datamodules.inference.protocol import SHAPINGS
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.history import Shown
from datamodules.workflows.gateway.protocols import fields, images, structured
from datamodules.workflows.gateway.protocols.base import Asked, EventWriter, Sampled, WireProtocol
from datamodules.workflows.gateway.transcript import Call

_WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "modalities": (["text"],),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHOW_PICTURES = ("user", "tool")
_SPEAKERS = ("system", "user", "assistant")
_MESSAGES_FIELDS = ("role", "content", "name", "tool_call_id", "reasoning_content", "tool_calls")
# What a client sends back as it got it, marks of what is worth caching (SWE-agent's), and notes of its own (Copilot's,
# once it goes on with a conversation).
_MESSAGES_WITHOUT_EFFECT = ("annotations", "provider_specific_fields", "cache_control", "__copilotMessageSource")
_MOST_CHOICES = 128
_MOST_STOPS = 4


class ChatCompletions(WireProtocol):
    """`/v1/chat/completions`."""

    path = "chat/completions"

    def parse(self, body: dict[str, Any]) -> Asked:
        left = {key: value for key, value in body.items() if key not in _WITHOUT_EFFECT}
        fields.take_neutral(left, _NEUTRAL)
        tools = _tools(left.pop("tools", None))
        tools = None if left.get("tool_choice") == "none" else tools
        form = structured.reply_format("response_format", left.pop("response_format", None), tools)
        older, most = left.pop("max_tokens", None), left.pop("max_completion_tokens", None)
        key, most = ("max_tokens", older) if most is None else ("max_completion_tokens", most)
        asked = Asked(
            messages=_messages(left.pop("messages", None)),
            tools=tools,
            demands=(*form, *structured.openai_calls(left, tools)),
            max_tokens=fields.number(key, most, int, 1),
            logprobs=fields.flag("logprobs", left.pop("logprobs", None)),
            **shared(left),
        )
        fields.nothing_left(left)
        return asked

    def answer(
        self, asked: Asked, name: str, calls: Sequence[Call], tokens: Sequence[Sequence[Sampled]] | None
    ) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": asked.model,
            "choices": [
                {
                    "index": k,
                    "message": call.message,
                    "finish_reason": _finish(call),
                    "logprobs": None if tokens is None else _logprobs(tokens[k]),
                }
                for k, call in enumerate(calls)
            ],
            "usage": usage(calls),
        }

    def events(self, asked: Asked, name: str) -> EventWriter:
        return _Events(asked, name)

    def error(self, problem: RequestError) -> dict[str, Any]:
        return openai_error(problem)


def shared(left: dict[str, Any]) -> dict[str, Any]:
    """Takes out of a request what Chat Completions and Completions say alike; as arguments of `Asked`. Raises
    RequestError."""
    stop = left.pop("stop", None)
    stops = fields.texts("stop", [stop] if isinstance(stop, str) else stop)
    if len(stops) > _MOST_STOPS:
        raise RequestError(f"stop: {len(stops)} texts, at most {_MOST_STOPS} are possible", param="stop")
    options = left.pop("stream_options", None)
    options = {} if options is None else fields.an_object("stream_options", options)
    return {
        "model": fields.optional_text("model", left.pop("model", None)),
        "temperature": fields.number("temperature", left.pop("temperature", None), float, 0),
        "stop": stops,
        "seed": fields.number("seed", left.pop("seed", None), int, -(2**63), 2**63 - 1),
        "n": fields.number("n", left.pop("n", None), int, 1, _MOST_CHOICES) or 1,
        "stream": fields.flag("stream", left.pop("stream", None)),
        "shaping": fields.take_shaping(left, SHAPINGS),
        "own": {"usage": fields.flag("stream_options.include_usage", options.get("include_usage"))},
    }


def openai_error(problem: RequestError) -> dict[str, Any]:
    """A refusal in the shape of all of OpenAI's protocols."""
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        problem.status, "invalid_request_error" if problem.status < 500 else "server_error"
    )
    return {"error": {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code}}


def usage(calls: Sequence[Call]) -> dict[str, int]:
    """Tokens of the prompt and of all replies to it."""
    given = calls[0].given
    made = sum(len(call.response.tokens) for call in calls)
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


class _Events(EventWriter):
    def __init__(self, asked: Asked, name: str) -> None:
        self._asked = asked
        self._base = {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": asked.model,
        }

    def begin(self) -> bytes:
        return b"".join(self._delta(k, {"role": "assistant", "content": ""}) for k in range(self._asked.n))

    def text(self, choice: int, piece: str, tokens: Sequence[Sampled]) -> bytes:
        return self._delta(choice, {"content": piece}, None, _logprobs(tokens) if tokens else None)

    def end(self, choice: int, call: Call) -> bytes:
        calls = [{"index": i, **one} for i, one in enumerate(call.message.get("tool_calls", []))]
        thought = call.message.get("reasoning_content")
        told = [self._delta(choice, {"reasoning_content": thought})] if thought else []
        told += [self._delta(choice, {"tool_calls": [one]}) for one in calls]
        return b"".join([*told, self._delta(choice, {}, _finish(call))])

    def finish(self, calls: Sequence[Call]) -> bytes:
        counted = self._event([], usage=usage(calls)) if self._asked.own["usage"] else b""
        return counted + b"data: [DONE]\n\n"

    def fail(self, problem: RequestError) -> bytes:
        return b"data: " + json.dumps(openai_error(problem)).encode() + b"\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + json.dumps({**self._base, "choices": choices, **more}).encode() + b"\n\n"

    def _delta(self, choice: int, delta: Message, finish: str | None = None, logprobs: Any = None) -> bytes:
        return self._event([{"index": choice, "delta": delta, "finish_reason": finish, "logprobs": logprobs}])


def _finish(call: Call) -> str:
    if call.response.finish_reason == "length":
        return "length"
    return "tool_calls" if call.message.get("tool_calls") else "stop"


def _logprobs(tokens: Sequence[Sampled]) -> dict[str, Any]:
    content = [
        {
            "token": one.text,
            "logprob": one.logprob,
            "bytes": one.bytes,
            "top_logprobs": [],
        }
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def _messages(found: Any) -> list[Message]:
    if not isinstance(found, list) or not found:
        raise RequestError("messages: must be a list of at least one message", param="messages")
    messages: list[Message] = list(found.read) if isinstance(found, Shown) else []
    known = {*_MESSAGES_FIELDS, *_MESSAGES_WITHOUT_EFFECT}
    for i, one in enumerate(found[len(messages) :], len(messages)):
        if type(one) is dict and len(one) == 2 and type(one.get("content")) is str and one.get("role") in _SPEAKERS:
            messages.append(one)  # most are so, and histories are long
            continue
        where = f"messages[{i}]"
        one = fields.an_object(where, one)
        role = fields.one_of(f"{where}.role", one.get("role"), _ROLES)
        message: Message = {"role": "system" if role == "developer" else role, "content": _content(where, one, role)}
        for key in ("name", "tool_call_id", "reasoning_content"):
            if one.get(key) is not None:
                message[key] = fields.a_text(f"{where}.{key}", one[key])
        if one.get("tool_calls") is not None:
            called = fields.a_list(f"{where}.tool_calls", one["tool_calls"])
            calls = [_call(f"{where}.tool_calls[{k}]", call) for k, call in enumerate(called)]
            message |= {"tool_calls": calls} if calls else {}
        if message.get("tool_call_id") is not None and message["tool_call_id"] not in _called(messages):
            raise RequestError(
                f"{where}.tool_call_id: {fields.shown(message['tool_call_id'])}, no message before it made a call of"
                " this id; send the assistant's message with its tool_calls first",
                param=f"{where}.tool_call_id",
            )
        fields.nothing_left({key: value for key, value in one.items() if key not in known}, where)
        messages.append(message)
    if isinstance(found, Shown):
        found.read = messages
    return messages


def _called(messages: list[Message]) -> Iterator[str]:
    """The ids of calls, the latest first."""
    for one in reversed(messages):
        for call in one.get("tool_calls", ()):
            yield call.get("id", "")


def _content(where: str, message: dict[str, Any], role: str) -> Any:
    """Text, or with pictures `images.content_of`."""
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""
    if isinstance(content, str):
        return content
    said: list[str | images.Sent] = []
    for k, part in enumerate(fields.parts(f"{where}.content", content)):
        part = fields.an_object(f"{where}.content[{k}]", part)
        if part.get("type") == "image_url" and role in _SHOW_PICTURES:
            at = f"{where}.content[{k}].image_url"
            given = dict(fields.an_object(at, part.get("image_url")))
            said.append(images.sent(f"{at}.url", given.pop("url", None)))
            fields.take_neutral(given, {"detail": ("auto",)})
            fields.nothing_left(given, at)
            continue
        if part.get("type") != "text":
            raise RequestError(
                f"{where}.content[{k}].type: {fields.shown(part.get('type'))}, only text is supported, and image_url"
                " in messages of the user or of a tool",
                param=f"{where}.content",
            )
        said.append(fields.a_text(f"{where}.content[{k}].text", part.get("text")))
    return images.content_of(said)


def _call(where: str, call: Any) -> dict[str, Any]:
    call = fields.an_object(where, call)
    function = fields.an_object(f"{where}.function", call.get("function"))
    name = fields.a_text(f"{where}.function.name", function.get("name"))
    arguments = fields.a_text(f"{where}.function.arguments", function.get("arguments"))
    identity = {} if call.get("id") is None else {"id": fields.a_text(f"{where}.id", call["id"])}
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tools(found: Any) -> list[dict[str, Any]] | None:
    if found is None:
        return None
    tools = []
    for k, tool in enumerate(fields.a_list("tools", found)):
        where = f"tools[{k}]"
        fields.one_of(f"{where}.type", fields.an_object(where, tool).get("type"), ("function",))
        fields.only(where, tool, ("type", "function", "cache_control"))
        where = f"{where}.function"
        function = fields.an_object(where, tool.get("function"))
        fields.only(where, function, ("name", "description", "parameters", "strict"))
        # `strict` is not shown to the model: nothing here forces arguments into their schema.
        tools.append(fields.function_tool(where, function, function.get("parameters"), f"{where}.parameters"))
    return tools or None
