"""Calls users' functions from the rollouts' event loop, whatever kind they are.

Promises: a plain function runs on a thread of its own, so that it never holds up other episodes; one that hangs costs
that thread (a daemon, which does not keep the process alive) and nothing else.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function` returns, awaited if need be. Raises what it raises."""
    # A callable object's own method says whether it is asynchronous.
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
    if asynchronous:
        return await function(*args, **kwargs)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def work() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function(*args, **kwargs)
        except StopIteration as stop:  # a future takes no such exception
            error = RuntimeError(f"{type(stop).__name__}: {stop}")
        except BaseException as raised:
            error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=work, daemon=True, name=f"call-{getattr(function, '__name__', 'function')}").start()
    result = await future
    return await result if inspect.isawaitable(result) else result
