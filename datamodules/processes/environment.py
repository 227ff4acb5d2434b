"""Functions that look for what they need in environment variables. Cheap to import: worker processes do it."""

from __future__ import annotations

import inspect
import numbers
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from datamodules.processes import worker
from datamodules.processes.worker import NotAnAnswer


class InEnvironment:
    """Calls `function` with environment variables of this call, in a worker process of its own (`once`): what an
    earlier call has made of them, clients or threads, would speak with its key or in this one's name. There its module
    is imported after they are set: clients that it makes as it is imported, as modules of graphs do, find them too.

    It answers text, a number of any library, or None. Raises NotAnAnswer for anything else.
    """

    is_for_people = True  # what it raises

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function: Callable[..., Any] | None = function
        self._pickled = b""

    def __getstate__(self) -> bytes:
        return worker.pickled(self._function)

    def __setstate__(self, pickled: bytes) -> None:
        self._function, self._pickled = None, pickled

    def __call__(self, variables: Mapping[str, str], *args: Any) -> Any:
        os.environ.update(variables)
        function = worker.unpickled(self._pickled) if self._function is None else self._function
        result = function(*args)
        return _awaited(result) if inspect.isawaitable(result) else _answer(result)


async def _awaited(result: Awaitable[Any]) -> Any:
    return _answer(await result)


def _answer(value: Any) -> str | float | None:
    if value is None or (isinstance(value, str | int | float) and not isinstance(value, bool)):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise NotAnAnswer(
            f"returned a value of type {type(value).__name__}; it must return text or a number, or None, and its last"
            " reply is judged",
            "exception",
        )
    return float(value)
