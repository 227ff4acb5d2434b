"""The answer of OpenAI's Responses: its object, its items, and the events that build them up.

Promises: the items of a streamed answer, put together, are those of the whole one. A response that reached its limit is
"incomplete" and says why.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols.base import Asked, EventWriter, Sampled
from datamodules.workflows.gateway.transcript import Call

Item = dict[str, Any]
TEXT = "input"
"""The argument by which the model knows what a tool takes that takes a text."""

# Of calls, the events that say what is given to the tool, and the item's key of it.
_GIVEN = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}


def response(asked: Asked, name: str, created: int, items: list[Item], call: Call | None) -> dict[str, Any]:
    """The object; `call` is None while the reply is sampled."""
    usage = incomplete = None
    if call is not None:
        given, made = call.given, len(call.response.tokens)
        usage = {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + made,
        }
        if call.response.finish_reason == "length":
            incomplete = {"reason": "max_output_tokens"}
    status = "in_progress" if call is None else "incomplete" if incomplete else "completed"
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": incomplete,
        "model": asked.model,
        "output": items,
        "max_output_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": 1.0,
        "parallel_tool_calls": True,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "usage": usage,
        **asked.own,
    }


def in_namespace(space: str, name: str) -> str:
    """What the model knows a tool by."""
    return f"{space}.{name}"


def items_of(tools: Sequence[Item], name: str, call: Call, tokens: Sequence[Sampled]) -> list[Item]:
    """What a reply consists of: its text, then its calls; by the names that the request's `tools` have."""
    status = "incomplete" if call.response.finish_reason == "length" else "completed"
    calls = call.message.get("tool_calls", [])
    said = call.message["content"] or ""
    items = [_message(name, said, tokens, status)] if said or not calls else []
    return items + [_function_call(tools, one, status) for one in calls]


class ResponseEvents(EventWriter):
    """See there."""

    def __init__(self, asked: Asked, name: str) -> None:
        self._asked, self._name = asked, name
        self._created = int(time.time())
        self._sent = 0
        self._items: list[Item] = []
        self._tokens: list[Sampled] = []
        self._open = False  # the item of text

    def begin(self) -> bytes:
        begun = response(self._asked, self._name, self._created, [], None)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def text(self, choice: int, piece: str, tokens: Sequence[Sampled]) -> bytes:
        self._tokens += tokens
        if not piece:
            return b""
        return self._opened() + self._of_text("response.output_text.delta", delta=piece, logprobs=_logprobs(tokens))

    def end(self, choice: int, call: Call) -> bytes:
        self._items = items_of(self._asked.own["tools"], self._name, call, self._tokens)
        told = []
        for k, item in enumerate(self._items):
            if item["type"] == "message":
                part = item["content"][0]
                told.append(self._opened())
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                told.append(self._of_text("response.output_text.done", **done))
                told.append(self._of_text("response.content_part.done", part=part))
            else:
                kind, key = _GIVEN[item["type"]]
                begun = {**item, key: "", "status": "in_progress"}
                told.append(self._event("response.output_item.added", output_index=k, item=begun))
                at = {"item_id": item["id"], "output_index": k}
                told.append(self._event(f"response.{kind}.delta", **at, delta=item[key]))
                done = {key: item[key]} | ({"name": item["name"]} if key == "arguments" else {})
                told.append(self._event(f"response.{kind}.done", **at, **done))
            told.append(self._event("response.output_item.done", output_index=k, item=item))
        return b"".join(told)

    def finish(self, calls: Sequence[Call]) -> bytes:
        whole = response(self._asked, self._name, self._created, self._items, calls[0])
        return self._event(f"response.{whole['status']}", response=whole)

    def fail(self, problem: RequestError) -> bytes:
        return self._event("error", message=str(problem), code=problem.code, param=problem.param)

    def _opened(self) -> bytes:
        """The item of text and its only part, once."""
        if self._open:
            return b""
        self._open = True
        item = {**_message(self._name, "", (), "in_progress"), "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        added = self._event("response.output_item.added", output_index=0, item=item)
        return added + self._of_text("response.content_part.added", part=part)

    def _of_text(self, kind: str, **content: Any) -> bytes:
        return self._event(kind, item_id=f"msg_{self._name}", output_index=0, content_index=0, **content)

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._sent = self._sent, self._sent + 1
        told = {"type": kind, "sequence_number": number, **content}
        return f"event: {kind}\ndata: {json.dumps(told)}\n\n".encode()


def _message(name: str, text: str, tokens: Sequence[Sampled], status: str) -> Item:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": _logprobs(tokens)}
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [part]}


def _function_call(tools: Sequence[Item], call: dict[str, Any], status: str) -> Item:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    known = [(None, one, one["name"]) for one in tools if one["type"] != "namespace"]
    spaces = [tool for tool in tools if tool["type"] == "namespace"]
    known += [(one["name"], tool, in_namespace(one["name"], tool["name"])) for one in spaces for tool in one["tools"]]
    called: Item = {"type": "function", "name": name}
    space, tool = next(((space, tool) for space, tool, by in known if by == name), (None, called))
    about = {"call_id": call["id"], "name": tool["name"], "status": status} | ({"namespace": space} if space else {})
    if tool["type"] == "custom":
        given = json.loads(arguments)
        is_text = given.keys() == {TEXT} and isinstance(given[TEXT], str)
        # Arguments of another shape are the client's to refuse.
        text = given[TEXT] if is_text else arguments
        return {"id": f"ctc_{call['id']}", "type": "custom_tool_call", "input": text, **about}
    return {"id": f"fc_{call['id']}", "type": "function_call", "arguments": arguments, **about}


def _logprobs(tokens: Sequence[Sampled]) -> list[dict[str, Any]]:
    return [{"token": one.text, "logprob": one.logprob, "bytes": one.bytes or [], "top_logprobs": []} for one in tokens]
