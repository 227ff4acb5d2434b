"""Requests and answers of a provider as conversations, whatever the protocol: Chat Completions, Responses, Anthropic's
Messages, and legacy Completions, which have a prompt in place of messages; in one piece and as events.

Promises: what is read is all that the model was shown and said, but for thoughts; a call that holds anything else
(images, tools that run at the provider, conversations that it keeps) raises and is not read in part. The same message
reads the same wherever it is shown: as a reply, and in the requests after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from datamodules.conversations.messages import as_recorded
from datamodules.files.json_lines import parse_json
from datamodules.workflows.gateway.protocols import messages as anthropic
from datamodules.workflows.gateway.protocols import responses

Message = dict[str, Any]

_WHOLE = ("stop", "tool_calls")
_WHOLE_MESSAGES = ("end_turn", "tool_use", "stop_sequence")
_KEPT_BY_PROVIDERS = {  # what the model is shown and a request does not show
    "responses": ("conversation", "prompt", "context_management"),
    "messages": ("mcp_servers", "container"),
}


class BrokenOff(Exception):
    """The provider said in its stream that it failed."""


@dataclass(frozen=True)
class Heard:
    """A call.

    Attributes:
        model: that answered.
        messages: of the request, as recordings have them.
        replies: each as a message, and whether it is whole; texts, where there are `prompts`.
        tools: that were shown, as Chat Completions has them; None for those of the answer that this request goes on
            with, if it does.
        prompts: in place of messages, one a reply: what each goes on with.
        ended: of replies to `prompts`: whether the model ended them, as far as one can know.
        name: by which a later request goes on with this answer. continues: the one that this request goes on with.
        before: number of the messages that belong to this request alone, and not to what goes on with it.
    """

    model: str
    messages: list[Message]
    replies: list[tuple[Any, bool]]
    tools: list[dict[str, Any]] | None = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    ended: bool = False
    name: str = ""
    continues: str = ""
    before: int = 0


def read(path: str, request: bytes, answer: bytes, streamed: bool) -> Heard:
    """A call of `path`, one of READERS. Raises KeyError, TypeError, ValueError, AttributeError or RequestError for what
    it cannot read, and BrokenOff."""
    return READERS[path](parse_json(request), answer, streamed)


def _chat(asked: dict[str, Any], answer: bytes, streamed: bool) -> Heard:
    shown = [_message(one) for one in asked["messages"]]
    given = _joined(answer) if streamed else parse_json(answer)
    return Heard(
        model=str(given.get("model") or asked.get("model") or ""),
        messages=shown,
        replies=[
            (_message({**one["message"], "role": "assistant"}), one["finish_reason"] in _WHOLE)
            for one in given["choices"]
        ],
        tools=[] if asked.get("tool_choice") == "none" else list(asked.get("tools") or []),
    )


def _responses(asked: dict[str, Any], answer: bytes, streamed: bool) -> Heard:
    given = parse_json(answer) if not streamed else {}
    for event in _events(answer) if streamed else ():
        if event.get("type") in ("response.completed", "response.incomplete", "response.failed"):
            given = event["response"]
    _check_whole("responses", asked)
    told = asked.get("instructions")
    before = [{"role": "system", "content": told}] if told else []
    is_whole = given.get("status") == "completed"
    said = responses.messages_of(given["output"]) if is_whole else []
    if len(said) > 1 or any(one["role"] != "assistant" for one in said):
        raise ValueError("more than one message in a reply")
    return Heard(
        model=str(given.get("model") or asked.get("model") or ""),
        messages=[_message(one) for one in [*before, *responses.messages_of(asked["input"])]],
        replies=[(_message(one), True) for one in said],
        tools=[] if asked.get("tool_choice") == "none" else responses.tools_of(asked.get("tools"), exactly=False) or [],
        name=str(given.get("id") or ""),
        continues=str(asked.get("previous_response_id") or ""),
        before=len(before),
    )


def _messages(asked: dict[str, Any], answer: bytes, streamed: bool) -> Heard:
    given = _joined_messages(answer) if streamed else parse_json(answer)
    _check_whole("messages", asked)
    edits = (given.get("context_management") or {}).get("applied_edits") or []
    if any(not one["type"].startswith("clear_thinking") for one in edits):
        raise ValueError("the provider has cut the conversation")
    thread = asked.get("thread") or {"type": "create"}  # a thread has system and tools from where it begins
    continues = str(thread["previous_message_id"] if thread["type"] != "create" else "")
    system = anthropic.text_of("system", asked.get("system") or "")
    shown = [{"role": "system", "content": system}] if system else []
    shown += anthropic.messages_of(asked["messages"])
    is_whole = given["stop_reason"] in _WHOLE_MESSAGES
    # By the request's own reader, for which a message of the user is the last one.
    last = {"role": "user", "content": ""}
    said = anthropic.messages_of([{"role": "assistant", "content": given["content"]}, last])[0] if is_whole else None
    hides_tools = (asked.get("tool_choice") or {}).get("type") == "none"
    return Heard(
        model=str(given.get("model") or asked.get("model") or ""),
        messages=[_message(one) for one in shown],
        replies=[(_message(said), True)] if said else [],
        tools=[] if hides_tools else anthropic.tools_of(asked.get("tools"), exactly=False),
        name=str(given.get("id") or ""),
        continues=continues,
    )


def _completions(asked: dict[str, Any], answer: bytes, streamed: bool) -> Heard:
    prompts = [asked["prompt"]] if isinstance(asked["prompt"], str) else list(asked["prompt"])
    if asked.get("echo") or asked.get("suffix") or not all(isinstance(one, str) and one for one in prompts):
        raise ValueError("no text that is gone on with")
    model = ""
    said: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for event in _events(answer) if streamed else [parse_json(answer)]:
        model = event.get("model") or model
        for one in event.get("choices") or []:
            at = one.get("index", 0)
            said[at] = said.get(at, "") + one["text"]
            reasons[at] = one.get("finish_reason") or reasons.get(at)
    n = asked.get("n") or 1
    return Heard(
        model=str(model or asked.get("model") or ""),
        messages=[],
        replies=[(said[at], reasons[at] == "stop") for at in sorted(said)],
        prompts=[prompts[at // n] for at in sorted(said)],
        ended=not asked.get("stop"),  # a text of the client's may have ended it, which nobody is told
    )


READERS: dict[str, Callable[[dict[str, Any], bytes, bool], Heard]] = {
    "chat/completions": _chat,
    "responses": _responses,
    "messages": _messages,
    "completions": _completions,
}
"""By the path behind `/v1/`."""


def _check_whole(path: str, asked: dict[str, Any]) -> None:
    for key in _KEPT_BY_PROVIDERS[path]:
        if asked.get(key) is not None:
            raise ValueError(f"{key} is not in the request")


def _message(one: Message) -> Message:
    """A message of Chat Completions as recordings have it; whatever it holds, or KeyError, TypeError or ValueError."""
    if one.get("function_call") or one.get("audio"):
        raise ValueError("no text")
    kept = {key: one[key] for key in ("content", "tool_calls") if one.get(key)}
    result = as_recorded({"role": one["role"], "content": one.get("refusal") or "", **kept})
    if not isinstance(result["content"], str):  # pictures
        raise ValueError("no text")
    if "tool_calls" in result:
        parse_json(json.dumps([[[result]]]))  # as deep as in a line, which may be too deep to be read
    if one["role"] == "tool":
        result["id"] = one["tool_call_id"]
    return result


def _events(stream: bytes) -> Iterator[dict[str, Any]]:
    """Those of a stream. Raises BrokenOff at one that is an error."""
    for line in stream.splitlines():
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event = parse_json(data)
        if event.get("error") or event.get("type") == "error":
            raise BrokenOff
        yield event


def _joined(events: bytes) -> dict[str, Any]:
    """The answer of Chat Completions that was streamed."""
    model = ""
    choices: dict[int, dict[str, Any]] = {}
    for event in _events(events):
        model = event.get("model") or model
        for one in event.get("choices") or []:
            new: dict[str, Any] = {"said": [], "refused": [], "calls": {}, "reason": None}
            choice = choices.setdefault(one.get("index", 0), new)
            delta = one.get("delta") or {}
            choice["said"].append(delta.get("content") or "")
            choice["refused"].append(delta.get("refusal") or "")
            choice["reason"] = one.get("finish_reason") or choice["reason"]
            for k, part in enumerate(delta.get("tool_calls") or []):
                call = choice["calls"].setdefault(part.get("index", k), {"id": "", "name": [], "arguments": []})
                call["id"] = part.get("id") or call["id"]
                for name in ("name", "arguments"):
                    call[name].append((part.get("function") or {}).get(name) or "")
    found = []
    for choice in choices.values():
        calls = [
            {"id": call["id"], "function": {name: "".join(call[name]) for name in ("name", "arguments")}}
            for call in choice["calls"].values()
        ]
        message = {
            "role": "assistant",
            "content": "".join(choice["said"]) or "".join(choice["refused"]),
            "tool_calls": calls,
        }
        found.append({"message": message, "finish_reason": choice["reason"]})
    return {"model": model, "choices": found}


def _joined_messages(events: bytes) -> dict[str, Any]:
    """The answer of Messages that was streamed."""
    given: dict[str, Any] = {"stop_reason": None}
    blocks: dict[int, dict[str, Any]] = {}
    for event in _events(events):
        kind = event.get("type")
        if kind == "message_start":
            given |= {key: event["message"].get(key) for key in ("id", "model")}
        elif kind == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "_json": ""}
        elif kind == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for of, name in (("text", "text"), ("thinking", "thinking"), ("partial_json", "_json")):
                if of in delta:
                    block[name] = (block.get(name) or "") + delta[of]
        elif kind == "message_delta":
            given["stop_reason"] = event["delta"].get("stop_reason") or given["stop_reason"]
            given["context_management"] = event.get("context_management") or given.get("context_management")
    for block in blocks.values():
        if block["_json"]:
            block["input"] = parse_json(block["_json"])
    return {**given, "content": list(blocks.values())}
