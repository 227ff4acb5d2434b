"""OpenAI's Chat Completions: what a request asks for, and what it is answered.

Promises: a field that changes what is sampled and is not honoured is refused by its name; fields that change nothing
here (`user`, `metadata`, `store` and their like) are passed over; what is not known at all is refused too.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from datamodules.conversations.chat_template import Message
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.transcript import Call

_WITHOUT_EFFECT = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "model",
}
# What must have the value that samples from the model as it is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_CHOICES = 128


@dataclass(frozen=True)
class ChatRequest:
    """What is asked for.

    Attributes:
        messages: for the chat template; contents are text.
        tools: JSON schemas, None for none.
        max_tokens: most of a reply, None for no limit of the client's.
        temperature: None for the session's.
        stop: texts that end a reply.
        seed: of the first choice.
        n: choices.
        logprobs: of the reply's tokens are wanted.
        stream, usage: events instead of one answer; the last one counts tokens.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    max_tokens: int | None
    temperature: float | None
    stop: tuple[str, ...]
    seed: int | None
    n: int
    logprobs: bool
    stream: bool
    usage: bool


def parse(body: Any) -> ChatRequest:
    """The request in `body`, which came from JSON. Raises RequestError naming the field."""
    if not isinstance(body, dict):
        raise RequestError("the request must be a JSON object")
    left = dict(body)
    for key in _WITHOUT_EFFECT:
        left.pop(key, None)
    for key, neutral in _NEUTRAL.items():
        value = left.pop(key, None)
        if value is not None and value not in neutral:
            raise RequestError(
                f"{key}: {json.dumps(value)[:100]} would change what is sampled, and what is trained must be sampled"
                " from the model as it is; leave it out",
                param=key,
                code="unsupported_parameter",
            )
    choice = left.pop("tool_choice", None)
    if choice not in (None, "auto", "none"):
        raise RequestError(
            'tool_choice: only "auto" and "none" are supported: nothing forces the model to call',
            param="tool_choice",
            code="unsupported_parameter",
        )
    tools = _tools(left.pop("tools", None))
    older = left.pop("max_tokens", None)
    most = left.pop("max_completion_tokens", None)
    stop = left.pop("stop", None)
    options = left.pop("stream_options", None)
    request = ChatRequest(
        messages=_messages(left.pop("messages", None)),
        tools=None if choice == "none" else tools,
        max_tokens=_number("max_completion_tokens", older if most is None else most, int, 1),
        temperature=_number("temperature", left.pop("temperature", None), float, 0),
        stop=tuple(_texts("stop", [stop] if isinstance(stop, str) else [] if stop is None else stop)),
        seed=_number("seed", left.pop("seed", None), int, -(2**63)),
        n=_number("n", left.pop("n", None), int, 1, _MOST_CHOICES) or 1,
        logprobs=_flag("logprobs", left.pop("logprobs", None)),
        stream=_flag("stream", left.pop("stream", None)),
        usage=_flag(
            "stream_options.include_usage",
            _dict("stream_options", {} if options is None else options).get("include_usage"),
        ),
    )
    for key, value in left.items():
        if value is not None:
            raise RequestError(f"{key}: not supported; leave it out", param=key, code="unsupported_parameter")
    return request


def completion(name: str, model: str, calls: Sequence[Call], pieces: Sequence[Sequence[str]] | None) -> dict[str, Any]:
    """The answer.

    Args:
        name: id of the answer.
        model: name that was asked for.
        calls: one a choice.
        pieces: text of each token of each choice, where log-probabilities are wanted.
    """
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": k,
                "message": call.message,
                "finish_reason": _finish(call),
                "logprobs": None if pieces is None else _logprobs(call, pieces[k]),
            }
            for k, call in enumerate(calls)
        ],
        "usage": _usage(calls),
    }


def events(
    name: str, model: str, calls: Sequence[Call], pieces: Sequence[Sequence[str]] | None, usage: bool
) -> Iterator[bytes]:
    """The same as server-sent events."""
    base = {"id": name, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + json.dumps({**base, "choices": choices, **more}).encode() + b"\n\n"

    def delta(k: int, content: Message, finish: str | None = None, logprobs: Any = None) -> bytes:
        return event([{"index": k, "delta": content, "finish_reason": finish, "logprobs": logprobs}])

    for k, call in enumerate(calls):
        message = call.message
        yield delta(k, {"role": "assistant", "content": ""})
        if message["content"]:
            yield delta(
                k, {"content": message["content"]}, None, None if pieces is None else _logprobs(call, pieces[k])
            )
        for i, one in enumerate(message.get("tool_calls", [])):
            yield delta(k, {"tool_calls": [{"index": i, **one}]})
        yield delta(k, {}, _finish(call))
    if usage:
        yield event([], usage=_usage(calls))
    yield b"data: [DONE]\n\n"


def error(problem: RequestError) -> dict[str, Any]:
    """A refusal in this protocol's shape."""
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        problem.status, "invalid_request_error" if problem.status < 500 else "server_error"
    )
    return {"error": {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code}}


def _finish(call: Call) -> str:
    if call.response.finish_reason == "length":
        return "length"
    return "tool_calls" if call.message.get("tool_calls") else "stop"


def _usage(calls: Sequence[Call]) -> dict[str, int]:
    given = len(calls[0].request.tokens)
    made = sum(len(call.response.tokens) for call in calls)
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _logprobs(call: Call, pieces: Sequence[str]) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
        for text, value in zip(pieces, call.response.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _messages(found: Any) -> list[Message]:
    if not isinstance(found, list) or not found:
        raise RequestError("messages: must be a list of at least one message", param="messages")
    messages = []
    for i, one in enumerate(found):
        where = f"messages[{i}]"
        one = _dict(where, one)
        role = one.get("role")
        if role not in _ROLES:
            raise RequestError(f"{where}.role: {role!r}, must be one of {', '.join(_ROLES)}", param=f"{where}.role")
        message: Message = {"role": "system" if role == "developer" else role, "content": _content(where, one)}
        for key in ("name", "tool_call_id", "reasoning_content"):
            if one.get(key) is not None:
                message[key] = _text(f"{where}.{key}", one[key])
        if calls := one.get("tool_calls"):
            where = f"{where}.tool_calls"
            message["tool_calls"] = [_call(f"{where}[{k}]", call) for k, call in enumerate(_list(where, calls))]
        messages.append(message)
    return messages


def _content(where: str, message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for k, part in enumerate(_list(f"{where}.content", content)):
        part = _dict(f"{where}.content[{k}]", part)
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise RequestError(
                f"{where}.content[{k}].type: {part.get('type')!r}, only text is supported", param=f"{where}.content"
            )
        texts.append(_text(f"{where}.content[{k}].text", part.get("text")))
    return "".join(texts)


def _call(where: str, call: Any) -> dict[str, Any]:
    function = _dict(f"{where}.function", _dict(where, call).get("function"))
    name = _text(f"{where}.function.name", function.get("name"))
    arguments = _text(f"{where}.function.arguments", function.get("arguments"))
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _tools(found: Any) -> list[dict[str, Any]] | None:
    if found is None or found == []:
        return None
    for k, tool in enumerate(_list("tools", found)):
        where = f"tools[{k}]"
        tool = _dict(where, tool)
        if tool.get("type") != "function":
            raise RequestError(f'{where}.type: {tool.get("type")!r}, must be "function"', param=f"{where}.type")
        function = _dict(f"{where}.function", tool.get("function"))
        _text(f"{where}.function.name", function.get("name"))
        if not isinstance(function.get("parameters", {}), dict):
            raise RequestError(f"{where}.function.parameters: must be a JSON schema", param=where)
    return list(found)


def _list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{key}: must be a list, this is {type(value).__name__}", param=key)
    return value


def _dict(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{key}: must be an object, this is {type(value).__name__}", param=key)
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{key}: must be a text, this is {type(value).__name__}", param=key)
    return value


def _texts(key: str, values: Any) -> list[str]:
    return [_text(f"{key}[{k}]", one) for k, one in enumerate(_list(key, values))]


def _flag(key: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RequestError(f"{key}: must be true or false", param=key)


def _number(key: str, value: Any, kind: type, least: float, most: float = math.inf) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise RequestError(f"{key}: must be a number, this is {type(value).__name__}", param=key)
    if not least <= value <= most:
        raise RequestError(f"{key}: {value}, must be between {least:g} and {most:g}", param=key)
    return kind(value)
