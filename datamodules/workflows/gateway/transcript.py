"""The calls of one session, and the token ids of its next prompt.

Promises: a prompt's text is what the model's chat template renders for the messages of that call, as a server would;
where that text shows an earlier reply of the session, whole or from some token on, the prompt holds the ids that were
sampled for it, and is tokenized anew only where it shows something else. Cost of a conversation that goes on: rendering
its messages, and tokenizing what is new.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from datamodules.conversations.chat_template import Chat, Message
from datamodules.inference.protocol import GenerationRequest, GenerationResponse

Drift = Literal["thoughts", "arguments", "stops", "edited"]
"""Why a later prompt shows a reply otherwise than it was sampled: its beginning is left out, its calls are written
otherwise, it ended at a stop text, which is not shown, or something else."""


@dataclass(frozen=True)
class Call:
    """One reply.

    Attributes:
        id: of the reply; unique in the session.
        request, response: as the engine had them.
        messages: number of those that the prompt was rendered from.
        prompt: text of the prompt.
        reply: text of the reply, special tokens included, without the one that ended it; up to the last whole token
            before a stop text.
        end: text of that; "" where the reply was cut off, or ended at a text.
        kept: number of the sampled tokens that say `reply` and `end`.
        message: the reply as the client was given it.
        stop: the text of the client's that ended it, "" for none.
        is_trained: sampled from the model as it is, so that it can be.
    """

    id: str
    request: GenerationRequest
    response: GenerationResponse
    messages: int
    prompt: str
    reply: str
    end: str
    kept: int
    message: Message
    stop: str = ""
    is_trained: bool = True

    @property
    def ids(self) -> list[int]:
        """The sampled tokens that later prompts may show."""
        return self.response.tokens[: self.kept]

    @property
    def logprobs(self) -> list[float]:
        """Theirs, in nats."""
        return self.response.logprobs[: self.kept]


@dataclass(frozen=True)
class Rendered:
    """A prompt: its text and token ids."""

    text: str
    tokens: list[int]


class Transcript:
    """Calls in the order in which they were answered.

    Args:
        chat: the model's template.
        decode: token ids to text, special tokens included.

    Attributes:
        calls: those answered.
        drift: how often a prompt showed an earlier reply otherwise than it was sampled, by cause.
    """

    def __init__(self, chat: Chat, decode: Callable[[Sequence[int]], str]) -> None:
        self.calls: list[Call] = []
        self.drift: Counter[Drift] = Counter()
        self._chat = chat
        self._decode = decode
        self._after: dict[int, list[Call]] = {}  # by the number of messages before the reply
        self._said: dict[str, Call] = {}  # by what identifies a reply in later messages

    def add(self, call: Call) -> None:
        """A reply that was given to the client."""
        self.calls.append(call)
        self._after.setdefault(call.messages, []).append(call)
        for name in _names(call.message):
            self._said[name] = call

    def remove(self, call: Call) -> None:
        """A reply that the client did not take after all; `add` it once it does."""
        self.calls.remove(call)
        self._after[call.messages].remove(call)

    def prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> Rendered:
        """What the model is sent for these messages. Raises ValueError when the template cannot render them."""
        text = self._chat.text([_for_template(one) for one in messages], tools)
        before = self._longest(text, len(messages))
        tokens: list[int] = []
        at = seen = 0
        if before is not None:
            tokens = [*before.request.tokens, *before.ids]
            if before.kept < len(before.response.tokens):
                self.drift["stops"] += 1
            at = len(before.prompt) + len(before.reply) + len(before.end)
            seen = before.messages + 1
        for start, end, shown in self._replies(text, messages[seen:], at):
            tokens += self._chat.encode(text[at:start]) if start > at else []
            tokens += shown
            at = end
        return Rendered(text, tokens + self._chat.encode(text[at:]))

    def count(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> int:
        """Tokens of that prompt, which nobody is sent. Raises ValueError as `prompt`."""
        drift = self.drift.copy()
        try:
            return len(self.prompt(messages, tools).tokens)
        finally:
            self.drift = drift

    def extended(self, text: str) -> Rendered:
        """A prompt that is this text, which may go on with an earlier prompt and its reply. Raises ValueError when the
        tokenizer has no tokens for it."""
        best: Call | None = None
        for call in self.calls:
            size = len(call.prompt) + len(call.reply)
            if best is not None and size <= len(best.prompt) + len(best.reply):
                continue
            if text.startswith(call.prompt) and text.startswith(call.reply, len(call.prompt)):
                best = call
        if best is None:
            return Rendered(text, self._chat.encode(text))
        said = best.ids[:-1] if best.end else best.ids  # what ended it is no text that clients see
        rest = text[len(best.prompt) + len(best.reply) :]
        return Rendered(text, [*best.request.tokens, *said, *self._chat.encode(rest)])

    def _longest(self, text: str, messages: int) -> Call | None:
        """The call whose prompt and reply are the longest beginning of `text`."""
        for count in range(messages - 1, -1, -1):
            for call in reversed(self._after.get(count, ())):
                shown = call.reply + call.end
                if text.startswith(shown, len(call.prompt)) and text.startswith(call.prompt):
                    return call
        return None

    def _replies(self, text: str, messages: Sequence[Message], at: int) -> Iterator[tuple[int, int, list[int]]]:
        """Where `text` shows replies of the session among `messages`, from `at` on: begin, end, sampled ids."""
        for message in messages:
            if message.get("role") != "assistant":
                continue
            begins = text.find(self._header, at) + len(self._header)
            if begins < at + len(self._header):
                return
            ends = text.find(self._header, begins)
            ends = len(text) if ends < 0 else ends
            at = begins
            call = next((self._said[name] for name in _names(message) if name in self._said), None)
            if call is None or not call.reply.strip():
                continue
            whole = call.reply + call.end
            if (start := text.find(whole, begins, ends)) >= 0:
                at = start + len(whole)
                if call.kept < len(call.response.tokens):
                    self.drift["stops"] += 1
                yield start, at, call.ids
                continue
            shown = self._from_some_token(call, text[begins:ends])
            if shown is None:
                self.drift["arguments" if message.get("tool_calls") else "edited"] += 1
                continue
            self.drift["thoughts"] += 1
            start, count = begins + shown[0], shown[1]
            tokens = call.response.tokens[-count:]
            at = start + len(self._decode(tokens))
            yield start, at, tokens

    def _from_some_token(self, call: Call, shown: str) -> tuple[int, int] | None:
        """Where `shown` begins with what the reply says from some token on, and the count of these tokens."""
        pieces = [self._decode([token]) for token in call.response.tokens]
        if "".join(pieces) != call.reply + call.end:  # characters of several tokens
            return None
        closed = shown.find(call.end) if call.end else -1
        if closed < 0:
            return None
        last = closed + len(call.end)
        count = size = 0
        for piece in reversed(pieces):
            if not piece or not shown.endswith(piece, 0, last - size):
                break
            count, size = count + 1, size + len(piece)
        begins_there = not shown[: last - size].strip()
        return (last - size, count) if count > 1 and begins_there else None

    @functools.cached_property
    def _header(self) -> str:
        """What the template puts before a reply, as far as it is the same before every one."""
        said = [{"role": "user", "content": "."}]
        ended, opened = self._chat.text(said, None, goes_on=False), self._chat.text(said, None)
        opening = opened[len(ended) :] if opened.startswith(ended) else ""
        return opening.split("\n")[0]


def _names(message: Message) -> list[str]:
    """What tells a reply from others once it comes back: the ids of its calls; its text, and its calls as such."""
    calls = message.get("tool_calls") or []
    ids = [f"id {one['id']}" for one in calls if isinstance(one.get("id"), str)]
    wanted = [(one["function"]["name"], _parsed(one["function"]["arguments"])) for one in calls]
    text = str(message.get("content") or "").strip()
    return [*ids, "text " + json.dumps([text, wanted], sort_keys=True, ensure_ascii=False)]


def _for_template(message: Message) -> Message:
    """Templates take the arguments of calls as objects; clients send them as text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for one in message["tool_calls"]:
        function = one["function"]
        calls.append({**one, "function": {**function, "arguments": _parsed(function["arguments"])}})
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _parsed(arguments: Any) -> Any:
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, Mapping) else arguments
