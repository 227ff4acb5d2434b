"""What passes between an agent and a provider as conversations, and the files they are written to.

    DIR/conversations_00000012.jsonl      a session: its conversations 12 and following of this directory, one a line

Promises: a line is what `load_transcripts` reads, a conversation that is not the beginning of another one of its
session; each reply is trained in one line, once, and what no reply of the session says has weight 0. A file that is
there is whole, and is never overwritten. Nothing of a request's head is here: no keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from datamodules.conversations.chat import check_messages
from datamodules.files.json_lines import parse_json
from datamodules.files.recording import RecordingError, versions

_NAME = re.compile(r"conversations_(\d{8})\.jsonl")
_WHOLE = ("stop", "tool_calls")


class NotRecorded(Exception):
    """An answer of which no conversation is made; `cause` is "cut_off" or "not_text"."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class Conversations:
    """Those of one session, as a tree: a message is kept once, however many requests show it.

    Attributes:
        size: characters of all messages.
        replies: number of those heard.
    """

    def __init__(self) -> None:
        self.size = self.replies = 0
        self._messages: dict[bytes, tuple[bytes, dict[str, Any]]] = {}  # by all that is said up to it: before, message
        self._tools: dict[bytes, list[dict[str, Any]]] = {}  # where conversations begin
        self._heard: dict[bytes, str] = {}  # replies, and the model that said them
        self._task = ""

    def add(self, request: bytes, answer: bytes, streamed: bool) -> None:
        """A call of Chat Completions. Raises NotRecorded: nothing, or no more, of it is kept."""
        try:
            asked = parse_json(request)
            tools = [] if asked.get("tool_choice") == "none" else list(asked.get("tools") or [])
            shown = [_message(one) for one in asked["messages"]]
            given = _joined(answer) if streamed else parse_json(answer)
            model = str(given.get("model") or asked.get("model") or "")
            choices = [
                (_message({**one["message"], "role": "assistant"}), one["finish_reason"]) for one in given["choices"]
            ]
            for reply, _ in choices:
                check_messages([*shown, reply], "request")
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # a RecordedDataError is a ValueError
            raise NotRecorded("not_text") from error
        whole = [reply for reply, reason in choices if reason in _WHOLE]
        if whole:
            at = _hash(b"", tools)
            self._tools[at] = tools
            for message in shown:
                at = self._keep(at, message)
            self._task = self._task or at.hex()[:12]
            self._heard |= {self._keep(at, reply): model for reply in whole}
            self.replies += len(whole)
        if len(whole) < len(choices) or not choices:
            raise NotRecorded("cut_off")

    def lines(self, session: str, reward: float | None) -> Iterator[dict[str, Any]]:
        """A record for each conversation, without the number of its trial."""
        begins: set[bytes] = set()
        for at in self._heard:
            while (at := self._messages[at][0]) not in self._tools and at not in begins:
                begins.add(at)
        trained: set[bytes] = set()
        for leaf, model in self._heard.items():
            if leaf in begins:
                continue
            messages, at = [], leaf
            while at not in self._tools:
                before, message = self._messages[at]
                if message["role"] == "assistant" and (at not in self._heard or at in trained):
                    message = {**message, "weight": 0}
                trained.add(at)
                messages.append(message)
                at = before
            tools = {"tools": self._tools[at]} if self._tools[at] else {}
            yield {
                "task_id": self._task,
                "model": model,
                "reward": 0.0 if reward is None else reward,
                "rewarded": reward is not None,
                "session": session,
                **tools,
                "messages": messages[::-1],
            }

    def _keep(self, before: bytes, message: dict[str, Any]) -> bytes:
        at = _hash(before, message)
        if at not in self._messages:
            self._messages[at] = (before, message)
            self.size += len(json.dumps(message))
        return at


class ConversationRecorder:
    """Writes sessions into a directory, which is made when the first one comes.

    Args:
        directory: where to; what it holds already stays, and the numbers go on.

    Raises:
        RecordingError: it holds recordings of another kind, or what cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if versions(directory):
            raise RecordingError(
                f"--record: {directory} holds sessions of a gateway with a model (batch_*.safetensors); name another"
            )
        last = max(
            (path for path in directory.glob("conversations_*.jsonl") if _NAME.fullmatch(path.name)), default=None
        )
        self._next = 0
        if last is not None:
            try:
                self._next = int(last.stem[-8:]) + last.read_bytes().count(b"\n")
            except OSError as error:
                raise RecordingError(f"--record: {last} cannot be read: {error.strerror}; name another") from error

    def write(self, records: list[dict[str, Any]]) -> Path:
        """Writes the conversations of a session. Raises RecordingError when the disk refuses it."""
        path = self.directory / f"conversations_{self._next:08d}.jsonl"
        lines = [json.dumps({"trial": self._next + k, **one}) + "\n" for k, one in enumerate(records)]
        aside = path.with_suffix(".part")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            aside.write_text("".join(lines), encoding="ascii")
            os.replace(aside, path)
        except OSError as error:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise RecordingError(
                f"--record: {path} could not be written: {error.strerror}; free space there, or name another directory"
            ) from error
        self._next += len(records)
        return path


def _hash(before: bytes, value: Any) -> bytes:
    return hashlib.blake2b(before + json.dumps(value, sort_keys=True).encode(), digest_size=20).digest()


def _message(one: dict[str, Any]) -> dict[str, Any]:
    """A message of Chat Completions as recordings have it; whatever it holds, or KeyError, TypeError or ValueError."""
    content, calls = one.get("content"), one.get("tool_calls") or []
    if one.get("function_call") or one.get("audio"):
        raise ValueError("no text")
    if isinstance(content, list):
        if any(part["type"] != "text" for part in content):
            raise ValueError("no text")
        content = "".join(part["text"] for part in content)
    result = {
        "role": "system" if one["role"] == "developer" else one["role"],
        "content": one.get("refusal") or "" if content is None else content,
    }
    if calls:
        result["tool_calls"] = [
            {
                "id": call.get("id") or "",
                "name": call["function"]["name"],
                "arguments": parse_json(call["function"]["arguments"] or "{}"),
            }
            for call in calls
        ]
        parse_json(json.dumps([[[result]]]))  # as deep as in a line, which may be too deep to be read
    if one["role"] == "tool":
        result["id"] = one["tool_call_id"]
    return result


def _joined(events: bytes) -> dict[str, Any]:
    """The answer that was streamed."""
    model = ""
    choices: dict[int, dict[str, Any]] = {}
    for line in events.splitlines():
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event = parse_json(data)
        if event.get("error"):
            raise NotRecorded("cut_off")
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
