"""Functions as tools, for tests: some work, some misbehave. Cheap to import: worker processes do it."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from typing import Any


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the first
        b: the second
    """
    await asyncio.sleep(0)
    return a * b


def squared(a: int) -> Any:
    """Gives something to await, as a decorated asynchronous function does. Older releases describe no `Awaitable`.

    Args:
        a: the number
    """
    return multiply(a, a)


async def count() -> str:
    """Counts."""
    return "one more"


def stuck() -> None:
    """Never returns."""
    threading.Event().wait()


def stuck_in_c() -> bool:
    """Never returns and keeps the interpreter's lock."""
    return bool(re.match("(a+)+$", "a" * 60 + "b"))


def crash() -> None:
    """Ends its process."""
    os.abort()


def refuse(order: str) -> None:
    """Raises.

    Args:
        order: which
    """
    raise KeyError(f"no such order {order}")


def strange() -> object:
    """Returns what is no JSON."""
    return object()


def process() -> int:
    """Says where it runs."""
    return os.getpid()


def token() -> str | None:
    """Says what it knows."""
    return os.environ.get("ARBORIST_TEST_TOKEN")


def named(name: str, function: str) -> str:
    """Takes arguments of these names.

    Args:
        name: one
        function: two
    """
    return name + function


def undescribed(a: int) -> int:
    return a


def long(size: int) -> str:
    """A long text.

    Args:
        size: its characters.
    """
    return "x" * size
