"""Anthropic's Messages: what a request asks for, and what it is answered.

Promises: as those of Chat Completions. Results of tools become messages of the role "tool", thoughts of the history the
message's `reasoning_content`, so that the model's template shows them as its own. Thoughts of a reply stay in its text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from datamodules.conversations.chat_template import Message
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols import fields, images, structured
from datamodules.workflows.gateway.protocols.base import Asked, EventWriter, Sampled, WireProtocol
from datamodules.workflows.gateway.transcript import Call

_WITHOUT_EFFECT = ("metadata", "service_tier", "cache_control", "inference_geo")
UNTHREADED = "thread_unsupported_request"
"""Code of a refusal after which the provider's package, in its runner of tools, sends whole conversations."""
_KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "context_management": ({"edits": []}, _KEEPS_ALL),  # Claude Code sends the latter
}
# `strict` is not shown to the model: nothing here forces arguments into their schema.
_TOOL_FIELDS = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
_KINDS = {
    "authentication_error": (401,),
    "permission_error": (403,),
    "not_found_error": (404,),
    "request_too_large": (413,),
    "rate_limit_error": (429,),
}


class Messages(WireProtocol):
    """`/v1/messages`."""

    path = "messages"

    def parse(self, body: dict[str, Any]) -> Asked:
        left = {key: value for key, value in body.items() if key not in _WITHOUT_EFFECT}
        if left.get("max_tokens") is None:
            raise RequestError("max_tokens: must be given", param="max_tokens")
        most = fields.number("max_tokens", left.pop("max_tokens"), int, 1)
        temperature = fields.number("temperature", left.pop("temperature", None), float, 0, 1)
        stop = fields.texts("stop_sequences", left.pop("stop_sequences", None))
        stream = fields.flag("stream", left.pop("stream", None))
        asked = self.counted(left)
        return replace(asked, max_tokens=most, temperature=temperature, stop=stop, stream=stream)

    def counted(self, body: dict[str, Any]) -> Asked:
        """A request of `/v1/messages/count_tokens`: what makes a prompt. Raises RequestError."""
        left = {key: value for key, value in body.items() if key not in _WITHOUT_EFFECT}
        fields.take_neutral(left, _NEUTRAL)
        if left.pop("thread", None):
            raise RequestError(
                "thread: no conversation is kept here, each request has to hold the whole one: leave it out, or have"
                " thread() continue_unthreaded (unsupported_request_behavior)",
                param="thread",
                code=UNTHREADED,
            )
        output = left.pop("output_config", None)
        output = {} if output is None else dict(fields.an_object("output_config", output))
        forms = {"output_config.format": output.pop("format", None), "output_format": left.pop("output_format", None)}
        fields.nothing_left(output, "output_config")
        tools = tools_of(left.pop("tools", None))
        choice = left.pop("tool_choice", None)
        choice = {"type": "auto"} if choice is None else fields.an_object("tool_choice", choice)
        tools = None if choice.get("type") == "none" else tools
        shapes = [one for key, form in forms.items() for one in structured.reply_format(key, form, tools)]
        system = text_of("system", left.pop("system", None) or "")
        given = left.pop("messages", None)
        messages = messages_of(given)
        _check_results(given)
        asked = Asked(
            model=fields.optional_text("model", left.pop("model", None)),
            messages=[{"role": "system", "content": system}, *messages] if system else messages,
            tools=tools,
            demands=(*shapes, *structured.anthropic_calls(choice, tools)),
            shaping=fields.take_shaping(left, ("top_p", "top_k")),
        )
        fields.nothing_left(left)
        return asked

    def answer(
        self, asked: Asked, name: str, calls: Sequence[Call], tokens: Sequence[Sequence[Sampled]] | None
    ) -> dict[str, Any]:
        (call,) = calls
        said = [{"type": "text", "text": call.message["content"]}] if call.message["content"] else []
        used = [
            _tool_use(one) | {"input": json.loads(one["function"]["arguments"])}
            for one in call.message.get("tool_calls", [])
        ]
        return _message(asked, name, [*said, *used], _stop(call), _usage(call))

    def events(self, asked: Asked, name: str) -> EventWriter:
        return _Events(asked, name)

    def error(self, problem: RequestError) -> dict[str, Any]:
        kind = next((kind for kind, statuses in _KINDS.items() if problem.status in statuses), None)
        kind = kind or ("invalid_request_error" if problem.status < 500 else "api_error")
        # By this beginning clients know a conversation that is too long: the provider has no code for it.
        long = "prompt is too long: " if problem.code == "context_length_exceeded" else ""
        said: dict[str, Any] = {"type": kind, "message": long + str(problem)}
        if problem.code == UNTHREADED:
            said["details"] = {"error_code": UNTHREADED, "unsupported": ["thread"]}
        return {"type": "error", "error": said}


class _Events(EventWriter):
    def __init__(self, asked: Asked, name: str) -> None:
        self._asked, self._name = asked, name
        self._blocks = 0
        self._open = False  # a block of text

    def begin(self) -> bytes:
        nothing = {"input_tokens": 0, "output_tokens": 0}  # counted at the end
        message = _message(self._asked, self._name, [], {"stop_reason": None, "stop_sequence": None}, nothing)
        return _event("message_start", message=message)

    def text(self, choice: int, piece: str, tokens: Sequence[Sampled]) -> bytes:
        if not piece:
            return b""
        opened = b"" if self._open else self._start({"type": "text", "text": ""})
        self._open = True
        return opened + self._delta({"type": "text_delta", "text": piece})

    def end(self, choice: int, call: Call) -> bytes:
        told = [self._stop()] if self._open else []
        self._open = False
        for one in call.message.get("tool_calls", []):
            told.append(self._start({**_tool_use(one), "input": {}}))
            told.append(self._delta({"type": "input_json_delta", "partial_json": one["function"]["arguments"]}))
            told.append(self._stop())
        return b"".join(told)

    def finish(self, calls: Sequence[Call]) -> bytes:
        (call,) = calls
        return _event("message_delta", delta=_stop(call), usage=_usage(call)) + _event("message_stop")

    def fail(self, problem: RequestError) -> bytes:
        return _event("error", error=Messages().error(problem)["error"])

    def _start(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _stop(self) -> bytes:
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **content: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **content})}\n\n".encode()


def _message(
    asked: Asked, name: str, content: list[dict[str, Any]], stop: dict[str, Any], usage: dict[str, int]
) -> dict[str, Any]:
    head = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": asked.model}
    return {**head, "content": content, **stop, "usage": usage}


def _stop(call: Call) -> dict[str, Any]:
    if call.response.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if call.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if call.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": call.stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(call: Call) -> dict[str, int]:
    return {"input_tokens": call.given, "output_tokens": len(call.response.tokens)}


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def tools_of(found: Any, exactly: bool = True) -> list[dict[str, Any]] | None:
    """As Chat Completions has them. `exactly`: fields that are not known are refused."""
    tools = []
    for k, tool in enumerate([] if found is None else fields.a_list("tools", found)):
        where = f"tools[{k}]"
        tool = fields.an_object(where, tool)
        if tool.get("type") not in (None, "custom"):
            raise RequestError(
                f"{where}.type: {fields.shown(tool['type'])} runs at the provider; only tools of the agent's own are"
                " supported",
                param=f"{where}.type",
                code="unsupported_parameter",
            )
        if exactly:
            left = dict(tool)
            fields.take_neutral(left, fields.TOOL_NEUTRAL, where)
            fields.only(where, left, _TOOL_FIELDS)
        schema = fields.an_object(f"{where}.input_schema", tool.get("input_schema"))
        tools.append(fields.function_tool(where, tool, schema, f"{where}.input_schema"))
    return tools or None


def messages_of(found: Any) -> list[Message]:
    if not isinstance(found, list) or not found:
        raise RequestError("messages: must be a list of at least one message", param="messages")
    messages: list[Message] = []
    for i, one in enumerate(found):
        where = f"messages[{i}]"
        one = fields.an_object(where, one)
        role = fields.one_of(f"{where}.role", one.get("role"), ("user", "assistant", "system"))
        fields.nothing_left({key: value for key, value in one.items() if key not in ("role", "content")}, where)
        where, content = f"{where}.content", one.get("content")
        if role == "system":  # behind the first message, where Claude Code tells of skills and changes
            messages.append({"role": "system", "content": text_of(where, content)})
            continue
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else fields.parts(where, content)
        messages += (_said if role == "assistant" else _asked)(where, blocks)
    if messages[-1:] and messages[-1]["role"] == "assistant":
        raise RequestError(
            "messages: the last one must be the user's; a reply that was begun cannot be gone on with", param="messages"
        )
    return messages


def _check_results(found: list[dict[str, Any]]) -> None:
    """Raises RequestError for results, in messages that were read, of calls that none before them made."""
    made: set[str] = set()
    for i, one in enumerate(found):
        for k, block in enumerate([] if isinstance(one["content"], str) else one["content"]):
            if block["type"] == "tool_use":
                made.add(block["id"])
            elif block["type"] == "tool_result" and block["tool_use_id"] not in made:
                fields.check_made({block["tool_use_id"]: f"messages[{i}].content[{k}].tool_use_id"})


def _asked(where: str, blocks: list[Any]) -> list[Message]:
    """A message of the user; the results of tools in it are messages of their own."""
    messages: list[Message] = []
    for k, block in enumerate(blocks):
        at = f"{where}[{k}]"
        kind = _kind(at, block, ("text", "image", "tool_result"))
        if kind != "tool_result":
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append(_part(at, block))
            continue
        fields.flag(f"{at}.is_error", block.get("is_error"))  # the text says so to the model
        identity = fields.a_text(f"{at}.tool_use_id", block.get("tool_use_id"))
        where_told, told = f"{at}.content", block.get("content") or ""
        blocks_told = [{"type": "text", "text": told}] if isinstance(told, str) else fields.a_list(where_told, told)
        parts = [_part(f"{where_told}[{i}]", one) for i, one in enumerate(blocks_told)]
        messages.append({"role": "tool", "tool_call_id": identity, "content": parts})
    return [{**one, "content": images.content_of(one["content"])} for one in messages] or [
        {"role": "user", "content": ""}
    ]


def _part(where: str, block: Any) -> str | images.Sent:
    """A text, or a picture."""
    if _kind(where, block, ("text", "image")) == "text":
        return fields.a_text(f"{where}.text", block.get("text"))
    source = fields.an_object(f"{where}.source", block.get("source"))
    if source.get("type") != "base64":
        raise RequestError(
            f"{where}.source.type: {fields.shown(source.get('type'))}, must be base64: nothing is fetched; send the"
            " picture itself",
            param=f"{where}.source.type",
        )
    kind = fields.a_text(f"{where}.source.media_type", source.get("media_type"))
    data = fields.a_text(f"{where}.source.data", source.get("data"))
    return images.sent(f"{where}.source.data", f"data:{kind};base64,{data}")


def _said(where: str, blocks: list[Any]) -> list[Message]:
    """A message of the assistant."""
    message: Message = {"role": "assistant", "content": ""}
    for k, block in enumerate(blocks):
        at = f"{where}[{k}]"
        kind = _kind(at, block, ("text", "tool_use", "thinking"))
        if kind == "text":
            message["content"] += fields.a_text(f"{at}.text", block.get("text"))
        elif kind == "thinking":
            thought = fields.a_text(f"{at}.thinking", block.get("thinking"))
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        else:
            name = fields.a_text(f"{at}.name", block.get("name"))
            arguments = json.dumps(fields.an_object(f"{at}.input", block.get("input")), ensure_ascii=False)
            call = {"type": "function", "function": {"name": name, "arguments": arguments}}
            identity = fields.a_text(f"{at}.id", block.get("id"))
            message.setdefault("tool_calls", []).append({"id": identity, **call})
    return [message]


def _kind(where: str, block: Any, known: Sequence[str]) -> str:
    kind = fields.an_object(where, block).get("type")
    if kind not in known:
        raise RequestError(
            f"{where}.type: {fields.shown(kind)} is not supported here; only {', '.join(known)}", param=f"{where}.type"
        )
    return str(kind)


def text_of(where: str, content: Any) -> str:
    """A text, or blocks of it."""
    if isinstance(content, str):
        return content
    said = []
    for k, block in enumerate(fields.parts(where, content)):
        _kind(f"{where}[{k}]", block, ("text",))
        said.append(fields.a_text(f"{where}[{k}].text", block.get("text")))
    return "".join(said)
