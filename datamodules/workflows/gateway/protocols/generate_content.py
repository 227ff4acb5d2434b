"""Google's Gemini API: what a request asks for, and what it is answered.

Promises: as those of Chat Completions. Names of fields are read as clients write them, `maxOutputTokens` or
`max_output_tokens`, and types of schemas, `OBJECT` or `object`. A result is that of the call with its id; of a client
that sends no ids, that of the first call of its name in the reply before that has none yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from datamodules.conversations.chat_template import Message
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols import fields, images, structured
from datamodules.workflows.gateway.protocols.base import Asked, EventWriter, Sampled, WireProtocol
from datamodules.workflows.gateway.transcript import Call

_WITHOUT_EFFECT = ("safetySettings", "labels", "store", "serviceTier", "model")  # the model is in the path
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "responseModalities": (["TEXT"],),
    "responseLogprobs": (False,),
}
_SHAPINGS = {
    "topP": "top_p",
    "topK": "top_k",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
# Each as a schema of the protocol's own, or as JSON schema.
_PARAMETERS = ("parameters", "parametersJsonSchema")
_RESULTS = ("response", "responseJsonSchema")
_SHAPES = ("responseSchema", "responseJsonSchema")
_MOST_CHOICES = 8
_MOST_STOPS = 5
_KINDS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
_UNDERSCORED = re.compile(r"_([a-z])")
_SCHEMA = ("items", "additionalProperties")  # keywords of a schema that hold one
_SCHEMAS = ("anyOf", "prefixItems")  # that hold some
_NAMED_SCHEMAS = ("properties", "defs", "$defs")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


class GenerateContent(WireProtocol):
    """`models/<model>:generateContent`, or `:streamGenerateContent`, which of both `stream` says."""

    alive = b"\n\n"  # its packages know no comments in a stream

    def __init__(self, stream: bool = False) -> None:
        self._stream = stream
        self.path = "streamGenerateContent" if stream else "generateContent"

    def whole(self, body: dict[str, Any], calls: Sequence[Call]) -> dict[str, Any]:
        left = _named(body)
        config = left.get("generationConfig")
        return {**left, "generationConfig": _named(config)} if isinstance(config, dict) else left

    def parse(self, body: dict[str, Any]) -> Asked:
        where = "generationConfig"
        left = self.whole(body, ())
        config = left.pop(where, None)
        config = {} if config is None else _object(where, config)
        fields.take_neutral(config, _NEUTRAL, where)
        thinking = config.pop("thinkingConfig", None)
        thinking = {} if thinking is None else _object(f"{where}.thinkingConfig", thinking)
        fields.flag(f"{where}.thinkingConfig.includeThoughts", thinking.pop("includeThoughts", None))  # none are shown
        fields.nothing_left(thinking, f"{where}.thinkingConfig")
        form = _reply_format(config)
        asked = self.counted(left)
        shaping = {name: config.pop(key, None) for key, name in _SHAPINGS.items()}
        stop = fields.texts(f"{where}.stopSequences", config.pop("stopSequences", None))
        if len(stop) > _MOST_STOPS:
            param = f"{where}.stopSequences"
            raise RequestError(f"{param}: {len(stop)} texts, at most {_MOST_STOPS} are possible", param=param)
        asked = replace(
            asked,
            demands=(*structured.reply_format(f"{where}.responseSchema", form, asked.tools), *asked.demands),
            max_tokens=fields.number(f"{where}.maxOutputTokens", config.pop("maxOutputTokens", None), int, 1),
            temperature=fields.number(f"{where}.temperature", config.pop("temperature", None), float, 0),
            stop=stop,
            seed=fields.number(f"{where}.seed", config.pop("seed", None), int, -(2**63), 2**63 - 1),
            n=fields.number(f"{where}.candidateCount", config.pop("candidateCount", None), int, 1, _MOST_CHOICES) or 1,
            stream=self._stream,
            shaping=fields.take_shaping(shaping, _SHAPINGS.values()),
        )
        fields.nothing_left(config, where)
        return asked

    def counted(self, body: dict[str, Any]) -> Asked:
        """A request of `:countTokens`: what makes a prompt. Raises RequestError."""
        left = _named(body)
        within = left.pop("generateContentRequest", None)
        left |= {} if within is None else _object("generateContentRequest", within)
        left = {key: value for key, value in left.items() if key not in (*_WITHOUT_EFFECT, "generationConfig")}
        tools = tools_of(left.pop("tools", None))
        choice = left.pop("toolConfig", None)
        choice = {} if choice is None else _object("toolConfig", choice)
        calling = choice.pop("functionCallingConfig", None)
        calling = {} if calling is None else _object("toolConfig.functionCallingConfig", calling)
        fields.only("toolConfig", choice, ())
        tools = None if calling.get("mode") == "NONE" else tools
        told = left.pop("systemInstruction", None)
        system = "" if told is None else _system("systemInstruction", told)
        messages = messages_of(left.pop("contents", None))
        asked = Asked(
            model="",
            messages=[{"role": "system", "content": system}, *messages] if system else messages,
            tools=tools,
            demands=structured.google_calls(calling, tools),
        )
        fields.nothing_left(left)
        return asked

    def answer(
        self, asked: Asked, name: str, calls: Sequence[Call], tokens: Sequence[Sequence[Sampled]] | None
    ) -> dict[str, Any]:
        said = [[{"text": call.message["content"]}] if call.message["content"] else [] for call in calls]
        found = [_candidate(k, [*said[k], *_called(one)], one) for k, one in enumerate(calls)]
        return _response(asked, name, found, calls)

    def events(self, asked: Asked, name: str) -> EventWriter:
        return _Events(asked, name)

    def error(self, problem: RequestError) -> dict[str, Any]:
        kind = _KINDS.get(problem.status, "INVALID_ARGUMENT" if problem.status < 500 else "INTERNAL")
        return {"error": {"code": problem.status, "message": str(problem), "status": kind}}


class _Events(EventWriter):
    def __init__(self, asked: Asked, name: str) -> None:
        self._asked, self._name = asked, name
        self._ended: list[Call] = []

    def begin(self) -> bytes:
        return b""

    def text(self, choice: int, piece: str, tokens: Sequence[Sampled]) -> bytes:
        return self._event([_candidate(choice, [{"text": piece}])]) if piece else b""

    def end(self, choice: int, call: Call) -> bytes:
        self._ended.append(call)
        return self._event([_candidate(choice, _called(call), call)])

    def finish(self, calls: Sequence[Call]) -> bytes:
        return b""

    def fail(self, problem: RequestError) -> bytes:
        return _event(GenerateContent().error(problem))

    def _event(self, candidates: list[dict[str, Any]]) -> bytes:
        return _event(_response(self._asked, self._name, candidates, self._ended))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _response(asked: Asked, name: str, candidates: list[dict[str, Any]], calls: Sequence[Call]) -> dict[str, Any]:
    """A whole answer, or a part of one; `calls` are those that are complete."""
    told: dict[str, Any] = {"candidates": candidates, "modelVersion": asked.model, "responseId": name}
    if calls:
        given, made = calls[0].given, sum(len(call.response.tokens) for call in calls)
        counts = {"promptTokenCount": given, "candidatesTokenCount": made, "totalTokenCount": given + made}
        told["usageMetadata"] = counts
    return told


def _candidate(choice: int, parts: list[dict[str, Any]], call: Call | None = None) -> dict[str, Any]:
    """What a choice says; `call` where it is complete."""
    ended = {}
    if call is not None:
        parts = parts or [{"text": ""}]
        ended = {"finishReason": "MAX_TOKENS" if call.response.finish_reason == "length" else "STOP"}
    return {"content": {"parts": parts, "role": "model"}, **ended, "index": choice}


def _called(call: Call) -> list[dict[str, Any]]:
    """The parts of a reply that are calls."""
    parts = []
    for one in call.message.get("tool_calls", []):
        function = one["function"]
        called = {"id": one["id"], "name": function["name"], "args": json.loads(function["arguments"])}
        parts.append({"functionCall": called})
    return parts


def _named(found: dict[str, Any]) -> dict[str, Any]:
    """An object by the names that the protocol's documentation has."""
    return {_UNDERSCORED.sub(lambda one: one[1].upper(), key): value for key, value in found.items()}


def _object(where: str, value: Any) -> dict[str, Any]:
    return _named(fields.an_object(where, value))


def _reply_format(config: dict[str, Any]) -> dict[str, Any] | None:
    """Takes the shape of a reply out of a configuration; as `structured.reply_format` takes it."""
    kind = config.pop("responseMimeType", None)
    param, schema = _schema(config, _SHAPES)
    for key in _SHAPES:
        config.pop(key, None)
    where = "generationConfig"
    kind = fields.one_of(f"{where}.responseMimeType", kind or "text/plain", ("text/plain", "application/json"))
    if kind == "text/plain":
        fields.nothing_left({param: schema}, where)
        return None
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "schema": fields.an_object(f"{where}.{param}", schema)}


def as_json_schema(schema: Any) -> Any:
    """A schema of the protocol's own as JSON schema, which it also takes: `STRING` is `string`, `nullable` another
    type, counts are no texts."""
    if not isinstance(schema, dict):
        return schema
    found = {key: value for key, value in schema.items() if key not in ("nullable", "propertyOrdering")}
    for key, value in found.items():
        if key in _SCHEMA:
            found[key] = as_json_schema(value)
        elif key in _SCHEMAS and isinstance(value, list):
            found[key] = [as_json_schema(one) for one in value]
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            found[key] = {name: as_json_schema(one) for name, one in value.items()}
        elif key in _COUNTS and isinstance(value, str) and value.isascii() and value.isdigit():
            found[key] = int(value)
    if isinstance(kind := found.get("type"), str):
        found["type"] = [kind.lower(), "null"] if schema.get("nullable") is True else kind.lower()
        if kind == "TYPE_UNSPECIFIED":
            del found["type"]
    return found


def tools_of(found: Any) -> list[dict[str, Any]] | None:
    """As Chat Completions has them."""
    tools = []
    for k, tool in enumerate([] if found is None else fields.a_list("tools", found)):
        where = f"tools[{k}]"
        tool = _object(where, tool)
        declared = tool.pop("functionDeclarations", None)
        for name, value in tool.items():
            if value is not None:
                raise RequestError(
                    f"{where}.{name}: runs at the provider; only functionDeclarations of the agent's own are supported,"
                    " have the agent not offer it",
                    param=f"{where}.{name}",
                    code="unsupported_parameter",
                )
        where = f"{where}.functionDeclarations"
        for i, one in enumerate([] if declared is None else fields.a_list(where, declared)):
            at = f"{where}[{i}]"
            one = _object(at, one)
            fields.take_neutral(one, {"behavior": ("BLOCKING", "UNSPECIFIED")}, at)
            fields.only(at, one, ("name", "description", *_PARAMETERS, *_RESULTS))
            about = fields.optional_text(f"{at}.description", one.get("description"))
            key, gives = _schema(one, _RESULTS)
            if gives is not None:  # templates know no place for it
                shape = fields.a_schema(f"{at}.{key}", gives)
                one["description"] = f"{about}\n\nIts result follows this schema: {shape}".strip()
            key, takes = _schema(one, _PARAMETERS)
            tools.append(fields.function_tool(at, one, takes, f"{at}.{key}"))
    return tools or None


def _schema(found: dict[str, Any], keys: tuple[str, str]) -> tuple[str, Any]:
    """Which of two fields has a schema, and that; None for none."""
    key = next((key for key in keys if found.get(key) is not None), keys[0])
    return key, as_json_schema(found.get(key))


def messages_of(found: Any) -> list[Message]:
    found = _some(found)
    if not isinstance(found, list) or not found:
        raise RequestError("contents: must be a list of at least one content", param="contents")
    messages: list[Message] = []
    made: dict[str, dict[str, Any]] = {}  # calls, by their ids
    waiting: list[dict[str, Any]] = []  # those of the last reply that have no result yet
    for i, one in enumerate(found):
        where = f"contents[{i}]"
        one = _object(where, one)
        fields.only(where, one, ("role", "parts"))
        role = fields.one_of(f"{where}.role", one.get("role") or "user", ("user", "model", "function"))
        parts = fields.a_list(f"{where}.parts", _some(one.get("parts")))
        if role == "model":
            messages.append(_said(f"{where}.parts", parts, i))
            waiting = list(messages[-1].get("tool_calls", ()))
            made |= {one["id"]: one for one in waiting}
        else:
            messages += _asked(f"{where}.parts", parts, made, waiting)
    if messages[-1]["role"] == "assistant":
        raise RequestError(
            "contents: the last one must be the user's; a reply that was begun cannot be gone on with", param="contents"
        )
    return messages


def _some(found: Any) -> Any:
    """A list of one where that stands alone, as the provider takes it and shows it to those who write JSON."""
    return [found] if isinstance(found, dict) else found


def _said(where: str, parts: list[Any], place: int) -> Message:
    """A message of the assistant, the content at that place."""
    message: Message = {"role": "assistant", "content": ""}
    for k, part in enumerate(parts):
        at = f"{where}[{k}]"
        part = _object(at, part)
        kind = _kind(at, part, ("text", "functionCall"))
        if kind == "text":
            name = "reasoning_content" if fields.flag(f"{at}.thought", part.get("thought")) else "content"
            message[name] = message.get(name, "") + fields.a_text(f"{at}.text", part["text"])
            continue
        at = f"{at}.functionCall"
        call = _object(at, part["functionCall"])
        fields.only(at, call, ("id", "name", "args"))
        name = fields.a_text(f"{at}.name", call.get("name"))
        arguments = json.dumps(fields.an_object(f"{at}.args", call.get("args") or {}), ensure_ascii=False)
        identity = fields.optional_text(f"{at}.id", call.get("id")) or f"call_{place}_{k}"
        function = {"name": name, "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": identity, "type": "function", "function": function})
    return message


def _asked(
    where: str, parts: list[Any], made: dict[str, dict[str, Any]], waiting: list[dict[str, Any]]
) -> list[Message]:
    """A message of the user; the results of tools in it are messages of their own, of the calls `made` before it. They
    wait no longer."""
    messages: list[Message] = []
    for k, part in enumerate(parts):
        at = f"{where}[{k}]"
        part = _object(at, part)
        if _kind(at, part, ("text", "inlineData", "functionResponse")) != "functionResponse":
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append(_shown(at, part))
            continue
        at = f"{at}.functionResponse"
        result = _object(at, part["functionResponse"])
        fields.only(at, result, ("id", "name", "response", "parts"))
        name, identity = (fields.optional_text(f"{at}.{key}", result.get(key)) for key in ("name", "id"))
        by_name = next((one for one in waiting if one["function"]["name"] == name), None)
        call = made.get(identity) if identity else by_name
        if call is None:
            key = "id" if identity else "name"
            raise RequestError(
                f"{at}.{key}: {fields.shown(identity or name)}, nothing before it made such a call that waits for its"
                " result; send the call first",
                param=f"{at}.{key}",
            )
        if call in waiting:
            waiting.remove(call)
        shown = [
            _shown(f"{at}.parts[{i}]", _object(f"{at}.parts[{i}]", one))
            for i, one in enumerate(fields.a_list(f"{at}.parts", result.get("parts") or []))
        ]
        told = _result(fields.an_object(f"{at}.response", result.get("response")))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": [told, *shown]})
    return [{**one, "content": images.content_of(one["content"])} for one in messages] or [
        {"role": "user", "content": ""}
    ]


def _result(response: dict[str, Any]) -> str:
    """What a tool gave: of an `output` alone that, as the protocol says, else all of it."""
    given = response["output"] if response.keys() == {"output"} else response
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _shown(where: str, part: dict[str, Any]) -> str | images.Sent:
    """A text, or a picture."""
    if _kind(where, part, ("text", "inlineData")) == "text":
        return fields.a_text(f"{where}.text", part["text"])
    data = _object(f"{where}.inlineData", part["inlineData"])
    fields.only(f"{where}.inlineData", data, ("mimeType", "data", "displayName"))
    kind = fields.a_text(f"{where}.inlineData.mimeType", data.get("mimeType"))
    return images.sent(
        f"{where}.inlineData.data", f"data:{kind};base64,{fields.a_text(f'{where}.inlineData.data', data.get('data'))}"
    )


def _kind(where: str, part: dict[str, Any], known: Sequence[str]) -> str:
    """Which of the `known` fields a part has, and no other."""
    held = [key for key, value in part.items() if value is not None and key not in ("thought", "thoughtSignature")]
    if len(held) != 1 or held[0] not in known:
        what = ", ".join(held)[:100] or "an empty part"
        raise RequestError(f"{where}: {what}, must hold one of {', '.join(known)}", param=where)
    return held[0]


def _system(where: str, content: Any) -> str:
    """The text of a content."""
    content = _object(where, content)
    fields.only(where, content, ("role", "parts"))
    said = []
    for k, part in enumerate(fields.a_list(f"{where}.parts", _some(content.get("parts")))):
        part = _object(f"{where}.parts[{k}]", part)
        _kind(f"{where}.parts[{k}]", part, ("text",))
        said.append(fields.a_text(f"{where}.parts[{k}].text", part["text"]))
    return "".join(said)
