"""What a session keeps of what it was asked: each message once, of each prompt what no earlier one begins with, and the
last request as it came.

Promises: a session's memory grows with what is new in its calls, and not with the history that each of them shows
again; what is kept reads back as it came, to the token. Cost of a message that is known: looking it up; in a request
that goes on with the last one, to the byte, not even reading it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import orjson

from datamodules.conversations.chat_template import Message
from datamodules.conversations.messages import parsed, with_arguments

_MESSAGES = re.compile(rb'"messages"\s*:\s*\[')


class Shown(list[Any]):
    """The messages of a request, the first of which may have been in the last one, too.

    Attributes:
        read: what a protocol has made of the first of them, one of each.
    """

    read: Sequence[Message] = ()


class Bodies:
    """Reads requests whose `messages` go on with those of the one before."""

    def __init__(self) -> None:
        self._body, self._messages = b"", Shown()  # of the last request
        self._begin, self._end, self._whole = 0, 0, 0  # where its list begins, up to where that many of it are known
        self._mark = secrets.token_hex(16)  # that no client knows
        self._weight, self._weighed = 0, 0  # bytes of so many messages

    def read(self, body: bytes, parse: Callable[[bytes], dict[str, Any]]) -> dict[str, Any]:
        """What `parse` makes of the body, which raises what it likes; `messages` are `Shown`.

        Those of the last request are the same objects: nobody may change them.
        """
        found = self._gone_on(body, parse)
        if found is None:
            found = parse(body)
            if type(found.get("messages")) is not list:
                return found
            found["messages"] = Shown(found["messages"])
            begins = _MESSAGES.search(body)
            self._begin = self._end = begins.end() if begins is not None else len(body)
            self._whole = self._weight = self._weighed = 0
        self._body, self._messages = body, found["messages"]
        return found

    def _gone_on(self, body: bytes, parse: Callable[[bytes], dict[str, Any]]) -> dict[str, Any] | None:
        """None where it does not go on with the last one."""
        last, messages, size = self._body, self._messages, _alike(self._body, body)
        if size <= self._end or last[size : size + 1] != b"]" or body[size : size + 1] != b",":
            return None
        mark = f'"{self._mark}"'.encode()
        head = last[: self._begin] + mark  # with one mark for all the messages up to the bracket
        new = last[self._end : size]
        try:
            # Between where the list begins and the bracket there are all its messages, and nothing else; the bracket
            # closes it; and the request, where a name may come twice, means this list.
            if len(orjson.loads(b"[" + mark * (self._whole > 0) + new + b"]")) != (
                len(messages) - self._whole + (self._whole > 0)
            ) or orjson.loads(head + last[size:])["messages"] != [self._mark]:
                return None
            found = parse(head + body[size:])
        except Exception:  # said by reading the whole of it
            return None
        shown = found.get("messages")
        if type(shown) is not list or shown[:1] != [self._mark]:
            return None
        found["messages"] = now = Shown([*messages, *shown[1:]])
        now.read = messages.read
        self._end, self._whole = size, len(messages)
        return found

    @property
    def size(self) -> int:
        """Bytes of the last request, as it came and as Python's objects, which may be many times as much."""
        self._weight += _weight(self._messages[self._weighed :])
        self._weighed = len(self._messages)
        return len(self._body) + self._weight

    def forget(self) -> None:
        """The next request is read whole, as the first was."""
        self._body, self._messages = b"", Shown()
        self._begin, self._end, self._whole = 0, 0, 0
        self._weight, self._weighed = 0, 0


class Shelf:
    """The last requests of many sessions, together of at most so many bytes: beyond, those are forgotten that were read
    longest ago.

    Attributes:
        size: bytes of all.
    """

    def __init__(self, most_bytes: int) -> None:
        self.size = 0
        self._most_bytes = most_bytes
        self._sizes: OrderedDict[Bodies, int] = OrderedDict()

    def keep(self, bodies: Bodies) -> None:
        """A request was read."""
        size = bodies.size
        self.size += size - self._sizes.pop(bodies, 0)
        self._sizes[bodies] = size
        while self.size > self._most_bytes:
            self.drop(next(iter(self._sizes)))

    def drop(self, bodies: Bodies) -> None:
        """Forgets its last request, if it has one."""
        bodies.forget()
        self.size -= self._sizes.pop(bodies, 0)


class Said:
    """A message behind those before it.

    Args:
        before: the one before it; None for the first.
        message: as the client sent it.
        shown: as templates take it.
        prompt: the first that showed it.
    """

    def __init__(self, before: Said | None, message: Message, shown: Message, prompt: Kept) -> None:
        self.before, self.message, self.shown, self.prompt = before, message, shown, prompt

    @cached_property
    def names(self) -> list[bytes]:
        """See `names`."""
        return names(self.message)

    def conversation(self) -> list[Message]:
        """All messages up to this one."""
        found: list[Message] = []
        at: Said | None = self
        while at is not None:
            found.append(at.message)
            at = at.before
        return found[::-1]


class Messages:
    """Those of a session, as a tree: conversations that begin alike share their beginning.

    Args:
        shown: what templates take of a message.
    """

    def __init__(self, shown: Callable[[Message], Message]) -> None:
        self.shown = shown
        self._last: list[Said] = []
        self._last_messages: list[Message] = []
        self._said: dict[tuple[Said | None, Any, Any], list[Said]] = {}  # by the one before, role and content

    def known(self, messages: list[Message]) -> list[Said]:
        """As many of them as were kept."""
        found = self._last[: _alike(messages, self._last_messages)]  # which most go on with
        at = found[-1] if found else None
        for message in messages[len(found) :]:
            if (at := self._find(at, message)) is None:
                break
            found.append(at)
        return found

    def keep(self, messages: list[Message], known: list[Said], shown: list[Message], prompt: Kept) -> Said | None:
        """The last of them; None where there are none.

        Args:
            messages: all of which are kept.
            known: what `known` found of them before.
            shown: all of them, as templates take them.
            prompt: that showed them.
        """
        said = list(known)
        for message, taken in zip(messages[len(known) :], shown[len(known) :], strict=True):
            before = said[-1] if said else None
            one = self._find(before, message)  # may have been said since
            if one is None:
                one = Said(before, message, taken, prompt)
                self._said.setdefault((before, message["role"], message["content"]), []).append(one)
            said.append(one)
        self._last, self._last_messages = said, [one.message for one in said]
        return said[-1] if said else None

    def _find(self, before: Said | None, message: Message) -> Said | None:
        for one in self._said.get((before, message["role"], message["content"]), ()):
            if one.message == message:  # all that protocols leave in messages is text, or names pictures
                return one
        return None


class Kept:
    """A prompt.

    Args:
        text, tokens: of it, which read back from here.
        base: a prompt that may begin alike, None for none. What they share is not kept again.
        begins: whether all of the base is known to begin it; otherwise that is found out.

    Attributes:
        size: number of characters. count: of tokens.
    """

    def __init__(self, text: str, tokens: list[int], base: Kept | None, begins: bool = False) -> None:
        self.size, self.count = len(text), len(tokens)
        chars = ids = 0
        if base is not None and begins:
            chars, ids = base.size, base.count
        elif base is not None:
            chars, ids = _alike(text, base.text), _alike(tokens, base.tokens)
        self._chars, self._ids = chars, ids  # that it shares with the base
        while base is not None and chars <= base._chars and ids <= base._ids:
            base = base._base  # which has all that is shared
        self._base: Kept | None = base
        self._text, self._tokens = text[chars:], tokens[ids:]
        self._whole: tuple[str, list[int]] | None = (text, tokens)  # until another prompt goes on from here
        if self._base is not None:
            self._base._whole = None

    @property
    def text(self) -> str:
        if self._whole is not None:
            return self._whole[0]
        pieces = []
        at: Kept | None = self
        end = self.size
        while at is not None and end:
            if end > at._chars:
                pieces.append(at._text[: end - at._chars])
                end = at._chars
            at = at._base
        return "".join(reversed(pieces))

    @property
    def tokens(self) -> list[int]:
        """Not to be changed."""
        if self._whole is not None:
            return self._whole[1]
        pieces = []
        at: Kept | None = self
        end = self.count
        while at is not None and end:
            if end > at._ids:
                pieces.append(at._tokens[: end - at._ids])
                end = at._ids
            at = at._base
        found: list[int] = []
        for piece in reversed(pieces):
            found += piece
        return found

    def begins(self, text: str) -> bool:
        """Whether `text` begins with it."""
        if self._whole is not None or len(text) < self.size:
            return text.startswith(self.text)
        at: Kept | None = self
        end = self.size
        while at is not None and end:  # from its end, where texts differ first
            if end > at._chars:
                if not text.startswith(at._text[: end - at._chars], at._chars):
                    return False
                end = at._chars
            at = at._base
        return True


def _weight(values: list[Any]) -> int:
    """Bytes of JSON values, without names, which are shared."""
    size, left = 0, values
    while left:
        one = left.pop()
        size += sys.getsizeof(one)
        if isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, list):
            left += one
    return size


def _alike(one: Any, other: Any) -> int:
    """Length of the longest common beginning of two texts or lists."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # alike before `low`, and not before `high`
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def names(message: Message) -> list[bytes]:
    """What tells a reply from others once it comes back, the surest first: the ids of its calls; its text, its calls as
    such and its thought; these without the thought."""
    if message.get("role") != "assistant":
        return []
    calls = message.get("tool_calls") or []
    ids = [f"id {one['id']}" for one in calls if isinstance(one.get("id"), str)]
    wanted = [(one["function"]["name"], parsed(one["function"]["arguments"])) for one in calls]
    text = str(message.get("content") or "").strip()
    said = [*ids, "text " + json.dumps([text, wanted], sort_keys=True)]
    if thought := str(message.get("reasoning_content") or "").strip():
        said.insert(-1, "thought " + json.dumps([thought, text, wanted], sort_keys=True))
    return [hashlib.blake2b(one.encode("utf-8", "surrogatepass"), digest_size=16).digest() for one in said]


def in_parts(message: Message) -> Message:
    """The message with pictures, which are not text in a tuple of contents, as templates know them."""
    content = message.get("content")
    if type(content) is not tuple:
        return message
    parts = [{"type": "text", "text": one} if isinstance(one, str) else {"type": "image"} for one in content]
    return {**message, "content": parts}


def for_template(message: Message, arguments: Callable[[Any], Any]) -> Message:
    """The message of a client as templates know it: pictures as parts, and calls as `with_arguments` has them.

    Args:
        message: of a client.
        arguments: `Chat.arguments` of the template.
    """
    return with_arguments(in_parts(message), arguments)
