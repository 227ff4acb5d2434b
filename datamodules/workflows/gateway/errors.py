"""What a client is told when a request is not served. Each protocol gives it its own shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RequestError(Exception):
    """A request that is refused; the message names the field and the remedy.

    Args:
        message: for whoever wrote the agent.
        status: of HTTP. Clients try again by themselves after 408, 409, 429 and from 500 on.
        param: the field.
        code: the provider's word for it, by which clients tell errors apart.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


@contextmanager
def refused() -> Iterator[None]:
    """Raises RequestError for messages that cannot be rendered or tokenized."""
    try:
        yield
    except ValueError as error:
        raise RequestError(f"messages: {error}", param="messages") from error
