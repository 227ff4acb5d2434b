"""What passes between an agent and a provider as conversations, and the files they are written to.

    DIR/conversations_00000012.jsonl      a session: its conversations 12 and following of this directory, one a line

Promises: a line is what `load_transcripts` reads, a conversation that is not the beginning of another one of its
session, or a prompt and its completion where no template was asked for; each reply is trained in one line, once, and
what no reply of the session says has weight 0. A file that is there is whole, and is never overwritten. Nothing of a
request's head is here: no keys.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from datamodules.conversations.messages import check_messages
from datamodules.files.publish import aside_of, publish
from datamodules.files.recording import RecordingError, versions
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.heard import BrokenOff, Heard, read

_NAME = re.compile(r"conversations_(\d{8})\.jsonl")


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
        self._answers: dict[str, tuple[bytes, int]] = {}  # that can be gone on with by their name: the reply, and
        # how many messages before it belonged to their request alone
        self._completed: list[dict[str, Any]] = []

    def add(self, path: str, request: bytes, answer: bytes, streamed: bool) -> None:
        """A call of one of the READERS. Raises NotRecorded: nothing, or no more, of it is kept."""
        try:
            heard = read(path, request, answer, streamed)
            messages, tools = self._continued(heard)
            if not heard.prompts:
                for reply, _ in heard.replies:
                    check_messages([*messages, reply], "request")
        except BrokenOff as error:
            raise NotRecorded("cut_off") from error
        except (KeyError, TypeError, ValueError, AttributeError, RequestError) as error:  # RecordedDataError too
            raise NotRecorded("not_text") from error
        whole = [reply for reply, is_whole in heard.replies if is_whole]
        if heard.prompts:
            self._complete(heard)
        elif whole:
            at = _hash(b"", tools)
            self._tools[at] = tools
            for message in messages:
                at = self._keep(at, message)
            kept = [self._keep(at, reply) for reply in whole]
            self._heard |= dict.fromkeys(kept, heard.model)
            if heard.name:
                self._answers[heard.name] = (kept[0], heard.before)
        self.replies += len(whole)
        if len(whole) < len(heard.replies) or not heard.replies:
            raise NotRecorded("cut_off")

    def _complete(self, heard: Heard) -> None:
        for prompt, (text, is_whole) in zip(heard.prompts, heard.replies, strict=True):
            if is_whole:
                said = {"model": heard.model, "prompt": prompt, "completion": text, "ended": heard.ended}
                self._completed.append(said)
                self.size += len(prompt) + len(text)

    def _continued(self, heard: Heard) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """All messages and tools that the model was shown."""
        if not heard.continues:
            return heard.messages, heard.tools or []
        at, before = self._answers[heard.continues]  # a KeyError where its answer was not heard
        messages = []
        while at not in self._tools:
            at, message = self._messages[at]
            messages.append(message)
        whole = [*heard.messages[: heard.before], *messages[::-1][before:], *heard.messages[heard.before :]]
        return whole, self._tools[at] if heard.tools is None else heard.tools

    def lines(self, session: str, reward: float | None) -> Iterator[dict[str, Any]]:
        """A record for each conversation, without the number of its trial. Those that began alike, up to the first
        reply, are of one task, whatever the sessions they are of."""
        common = {
            "reward": 0.0 if reward is None else reward,
            "rewarded": reward is not None,
            "session": session,
        }
        begins: set[bytes] = set()
        for at in self._heard:
            while (at := self._messages[at][0]) not in self._tools and at not in begins:
                begins.add(at)
        trained: set[bytes] = set()
        for leaf, model in self._heard.items():
            if leaf in begins:
                continue
            messages, at, begun = [], leaf, leaf
            while at not in self._tools:
                before, message = self._messages[at]
                begun = before if at in self._heard else begun
                if message["role"] == "assistant" and (at not in self._heard or at in trained):
                    message = {**message, "weight": 0}
                trained.add(at)
                messages.append(message)
                at = before
            tools = {"tools": self._tools[at]} if self._tools[at] else {}
            yield {"task_id": begun.hex()[:12], **common, "model": model, **tools, "messages": messages[::-1]}
        for one in self._completed:
            yield {"task_id": _hash(b"", one["prompt"]).hex()[:12], **common, **one}

    def _keep(self, before: bytes, message: dict[str, Any]) -> bytes:
        at = _hash(before, message)
        if at not in self._messages:
            self._messages[at] = (before, message)
            self.size += len(json.dumps(message))
        return at


class ConversationRecorder:
    """Writes sessions into a directory, which is made when the first one comes.

    Args:
        directory: where to; what it holds already stays, and the numbers go on. Several gateways may write there.

    Raises:
        RecordingError: it holds recordings of another kind, or what cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if versions(directory):
            raise RecordingError(
                f"--record: {directory} holds sessions of a gateway with a model (batch_*.safetensors); name another"
            )
        self._number = self._free()

    def _free(self) -> int:
        """The number behind all that are there. It takes a listing of the directory. Raises RecordingError."""
        found = (path for path in self.directory.glob("conversations_*.jsonl") if _NAME.fullmatch(path.name))
        last = max(found, default=None)
        if last is None:
            return 0
        try:
            return int(last.stem[-8:]) + max(last.read_bytes().count(b"\n"), 1)  # its own name is taken, even empty
        except OSError as error:
            raise RecordingError(f"--record: {last} cannot be read: {error.strerror}; name another") from error

    def write(self, records: list[dict[str, Any]]) -> Path:
        """Writes the conversations of a session. Raises RecordingError when the disk refuses it."""
        while True:
            number = self._number
            try:
                path = self._write(number, records)
            except FileExistsError:  # of another gateway, since this one looked
                self._number = self._free()
            else:
                self._number = number + max(len(records), 1)  # its own name is taken, even empty
                return path

    def _write(self, number: int, records: list[dict[str, Any]]) -> Path:
        path = self.directory / f"conversations_{number:08d}.jsonl"
        lines = [json.dumps({"trial": number + k, **one}) + "\n" for k, one in enumerate(records)]
        aside = aside_of(path)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            aside.write_text("".join(lines), encoding="ascii")
            publish(aside, path)
        except OSError as error:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            if isinstance(error, FileExistsError):
                raise
            raise RecordingError(
                f"--record: {path} could not be written: {error.strerror}; free space there, or name another directory"
            ) from error
        return path


def _hash(before: bytes, value: Any) -> bytes:
    return hashlib.blake2b(before + json.dumps(value, sort_keys=True).encode(), digest_size=20).digest()
