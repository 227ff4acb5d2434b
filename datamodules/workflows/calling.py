"""Calls users' functions from the rollouts' event loop, whatever kind they are.

Promises: an asynchronous function is awaited; a plain one never runs in the event loop. In a worker process it can do
nothing to other episodes. On a thread of this process it must let go of the interpreter's lock now and then; one that
hangs there costs its thread (a daemon, which does not keep the process alive), of which there is a bounded number.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from app import checks
from datamodules.processes.calls import DeadlinePassed, ProcessCalls
from datamodules.processes.deadline import deadline


class Caller:
    """Calls functions by name.

    Args:
        functions: by name.
        isolated: plain ones run in worker processes, and see no environment variables that look like secrets; False
            runs them on threads of this process, where they share its state.
        workers: most processes or threads; further calls wait.
        memory_mb, keep_environment: of processes; see `ProcessCalls`.
        owner, option: whose option it is, and the name of `isolated` there, for errors.

    Raises:
        ValueError: an option out of range or without effect; isolated functions that processes cannot import.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        *,
        isolated: bool,
        workers: int,
        memory_mb: float | None = None,
        keep_environment: Sequence[str] | None = None,
        owner: str,
        option: str = "isolated",
    ) -> None:
        checks.at_least(1, {f"{owner}.workers": workers})
        checks.positive({f"{owner}.memory_mb": memory_mb})
        self._functions = dict(functions)
        plain = {name: function for name, function in functions.items() if not is_asynchronous(function)}
        self._processes: ProcessCalls | None = None
        if isolated and plain:
            try:
                self._processes = ProcessCalls(plain, workers, memory_mb, keep_environment)
            except ValueError as error:
                raise ValueError(
                    f"{owner}: {error}; define it at the top of a module, make it asynchronous, or set {option}: false"
                ) from error
        elif memory_mb is not None or keep_environment is not None:
            why = "without plain functions" if isolated else "with isolated: false"
            raise ValueError(f"{owner}: memory_mb and keep_environment have no effect {why}; remove them")
        self._threads = _Threads(workers)

    async def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], seconds: float | None) -> Any:
        """What the function returns. Raises what it raises, `CallFailed` in its place where it ran elsewhere.

        Args:
            name: of the function.
            args, kwargs: its arguments.
            seconds: it may run, time spent waiting for a process (but not for a thread) not counted; None for no
                deadline.

        Raises:
            DeadlinePassed: it ran too long.
        """
        function = self._functions[name]
        if is_asynchronous(function):
            return await within(seconds, function(*args, **kwargs))
        if self._processes is not None:
            return await self._processes.call(name, args, kwargs, seconds)
        return await self._threads.call(function, args, kwargs, seconds)

    def stop(self) -> None:
        """Ends the processes; the next call starts others."""
        if self._processes is not None:
            self._processes.stop()


def is_asynchronous(function: Callable[..., Any]) -> bool:
    """Of a callable object, its own method decides."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


async def within(seconds: float | None, result: Awaitable[Any], held: Callable[[], float] | None = None) -> Any:
    """What it gives. Raises DeadlinePassed when that takes longer, and what it raises.

    `held`: how many seconds were not counted so far; None where all are.
    """
    limit: asyncio.Timeout | None = None
    try:
        async with deadline(seconds, held) as limit:
            return await result
    except TimeoutError as error:
        if limit is not None and limit.expired():
            raise DeadlinePassed(seconds) from error
        raise


def in_a_thread(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The result of a coroutine, whether or not an event loop runs in this thread. Raises what it raises."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            found.append(asyncio.run(make()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="in-a-thread")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


class _Threads:
    """At most `most` threads at once, those included that nobody waits for any more."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seconds: float | None
    ) -> Any:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._free = loop, asyncio.Semaphore(self._most)
        free = self._free
        await within(seconds, free.acquire())  # what hangs on the others may never let go of them
        future: asyncio.Future[Any] = loop.create_future()

        def tell(result: Any, error: BaseException | None) -> None:
            free.release()
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
        result = await within(seconds, future)
        return await within(seconds, result) if inspect.isawaitable(result) else result
