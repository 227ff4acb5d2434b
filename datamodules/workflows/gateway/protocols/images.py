"""Pictures that clients send in messages: read once, told apart by content, and put where prompts show them.

Promises: what a message holds of pictures is small, hashable, and equal where their pixels are, so that histories
compare it as they compare text; a picture that cannot be shown is refused by the field it came in; nothing is fetched.
Kept prompts have one placeholder a picture; what engines are sent and what is trained has as many as it takes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from app.pictures import Picture
from datamodules.conversations.chat_template import Message
from datamodules.conversations.image_processor import ImageProcessor, distinct
from datamodules.files.picture_files import PictureError
from datamodules.workflows.gateway.errors import RequestError

_READERS = ThreadPoolExecutor(2, "pictures")  # of all sessions: a large picture takes a gigabyte while it is read
_MOST_BYTES = 1 << 29  # of pixels that a session keeps


class Sent(NamedTuple):
    """A picture as a client sent it: the field, and a data URL."""

    where: str
    url: str


class Held(NamedTuple):
    """A picture of the session: its key in hexadecimal digits."""

    key: str


def sent(where: str, url: Any) -> Sent:
    """A picture in the field `where`. Raises RequestError for anything but a data URL."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise RequestError(
            f"{where}: must be a data URL (data:image/png;base64,...): nothing is fetched; send the picture itself",
            param=where,
        )
    return Sent(where, url)


def content_of(parts: Sequence[str | Sent]) -> str | tuple[str | Sent, ...]:
    """A message's content: its text, or where it has pictures the parts; see `history.in_parts`."""
    return "".join(map(str, parts)) if all(isinstance(one, str) for one in parts) else tuple(parts)


class SessionImages:
    """Those of one session.

    Args:
        processor: the model's; None for one that sees no pictures.
    """

    def __init__(self, processor: ImageProcessor | None) -> None:
        self._processor = processor
        self._pictures: dict[str, Picture] = {}  # by their keys
        self._bytes = 0  # of their pixels
        self._known: dict[bytes, Held] = {}  # by hashes of what was sent: clients send it with every call

    async def read(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with pictures as `Held`, and without text that a model would take for one. Raises RequestError
        naming the field of one that cannot be shown."""
        if self._processor is None and not any(type(one["content"]) is tuple for one in messages):
            return list(messages)  # histories are long
        return [await self._message(one) for one in messages]

    def seen(self, messages: Sequence[Message]) -> tuple[Picture, ...]:
        """The pictures of messages that were read, one after another."""
        contents = [one["content"] for one in messages if type(one["content"]) is tuple]
        return tuple(self._pictures[part.key] for parts in contents for part in parts if isinstance(part, Held))

    def placed(self, tokens: Sequence[int], seen: Sequence[Picture]) -> dict[str, Any]:
        """What requests say of a prompt: `tokens` with as many placeholders as the pictures seen take, `images` and
        `pictures`. Raises PictureError where the tokens have other places than there are pictures."""
        if self._processor is None:
            return {"tokens": list(tokens)}
        ids, images = self._processor.expanded(tokens, seen, "the prompt")
        return {"tokens": list(ids), "images": list(images) if seen else None, "pictures": distinct(seen)}

    def quoted_tools(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """The tools, without text that a model would take for a picture."""
        return tools if self._processor is None else self._quoted(tools)

    async def _message(self, message: Message) -> Message:
        read: Message = {}
        for name, value in message.items():  # thoughts and the arguments of calls are shown, too
            is_parts = name == "content" and type(value) is tuple
            read[name] = tuple([await self._part(one) for one in value]) if is_parts else self._quoted(value)
        return message if read == message else read

    def _quoted(self, value: Any) -> Any:
        """JSON, all its texts quoted."""
        if self._processor is None:
            return value
        if isinstance(value, str):
            return self._processor.quoted(value)
        if isinstance(value, dict):
            return {self._quoted(name): self._quoted(one) for name, one in value.items()}
        if isinstance(value, list):
            return [self._quoted(one) for one in value]
        return value

    async def _part(self, part: str | Sent | Held) -> str | Held:
        if isinstance(part, Held):
            return part
        if isinstance(part, str):
            return part if self._processor is None else self._processor.quoted(part)
        if self._processor is None:
            raise RequestError(f"{part.where}: this model is shown no pictures; leave it out", param=part.where)
        name = hashlib.blake2b(part.url.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if name not in self._known:
            try:
                loop = asyncio.get_running_loop()
                picture = await loop.run_in_executor(_READERS, self._processor.picture, part.url, part.where)
            except PictureError as error:
                raise RequestError(str(error), param=part.where) from error
            if picture.key.hex() not in self._pictures:
                if self._bytes + picture.pixels.nbytes > _MOST_BYTES:
                    raise RequestError(
                        f"{part.where}: the session's pictures would be more than {_MOST_BYTES >> 20} MiB; end it and"
                        " begin another, or show smaller ones",
                        status=413,
                        param=part.where,
                    )
                self._bytes += picture.pixels.nbytes
                self._pictures[picture.key.hex()] = picture
            self._known[name] = Held(picture.key.hex())
        return self._known[name]
