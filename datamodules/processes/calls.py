"""Plain functions in worker processes, for an event loop that must go on whatever they do.

Promises: a function that holds the interpreter's lock, crashes or hangs costs its own call and process; a caller that
stops waiting ends the process with all it started; there are never more than `workers` of them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from datamodules.processes.deadline import Held
from datamodules.processes.foreign import described, print_traceback
from datamodules.processes.forks import Forks
from datamodules.processes.guarded import OverMemory, end_all, size_of, written_since
from datamodules.processes.limits import memory_limit, tell_hidden
from datamodules.processes.process import Garbled, WorkerProcess
from datamodules.processes.worker import NotAnAnswer, pickled

_log = logging.getLogger(__name__)
_START_S = 120.0


class CallFailed(RuntimeError):
    """A call without a result: what the function raised there, or what became of its process."""


class Lost(CallFailed):
    """A call whose machine went away, which says nothing about the call."""


class DeadlinePassed(RuntimeError):
    """A call that ran for too long."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(f"not over after {seconds:g} s" if seconds is not None else "not over in time")


class Calls(ABC):
    """Calls functions by name, away from this process.

    Attributes:
        logs: directory for what the functions print; None for nowhere.
    """

    logs: Path | None = None

    @abstractmethod
    async def call(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        seconds: float | None,
        output: Path | None = None,
        held: Held | None = None,
    ) -> Any:
        """What the function returns (awaited there if need be), as JSON has it. Cancelled, it ends what runs there.

        Args:
            name: of the function.
            args, kwargs: its arguments.
            seconds: it may run, time spent waiting for a place to run not counted; None for a caller that sees to that.
            output: file for what it has printed, where it comes to nothing (cancelled included) and there are `logs`.
            held: how many of the seconds were not counted so far; None where all are.

        Raises:
            CallFailed: the function raised, returned what JSON cannot have or more than 1 MB, or lost its process.
            DeadlinePassed: it ran too long and was killed.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ends all that runs; calls under way and those that wait raise CallFailed. The next call begins anew."""


class UnderWay:
    """Calls that can be stopped together, by any thread."""

    def __init__(self) -> None:
        self._limits: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = {}

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """`async with under_way.call():` cancels what is inside where it is stopped, and raises CallFailed then."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits[limit] = asyncio.get_running_loop()
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise CallFailed("was stopped, as were all calls beside it") from error
        finally:
            self._limits.pop(limit, None)

    def stop(self) -> None:
        """Returns at once; calls end as soon as their event loops go on."""
        for limit, loop in list(self._limits.items()):
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(_expire, limit)


def _expire(limit: asyncio.Timeout) -> None:
    with suppress(RuntimeError):  # over meanwhile
        limit.reschedule(asyncio.get_running_loop().time())


def pickled_functions(functions: Mapping[str, Callable[..., Any]]) -> bytes:
    """For `ProcessCalls`. Raises ValueError: a function that others cannot import, or that keeps state in here."""
    for name, function in functions.items():
        if inspect.ismethod(function) and not inspect.isclass(function.__self__):
            raise ValueError(f"{name} is a method: what it keeps in its object would be kept in another process")
        try:
            pickled(function)
        except Exception as error:
            raise ValueError(f"{name} cannot be sent to a worker process ({error})") from error
    return pickled(_Functions(dict(functions)))


def pickled_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """For `ProcessCalls.call_pickled`. Raises CallFailed."""
    try:
        return pickled(((name, *args), dict(kwargs)))
    except Exception as error:
        raise CallFailed(f"its arguments cannot be sent to a worker process: {error}") from error


class ProcessCalls(Calls):
    """Calls functions in processes that are started when they are needed, one call of a process at a time.

    Args:
        functions: by name, plain functions that other processes can import; or what `pickled_functions` made of them.
        workers: most processes.
        memory_mb: most memory of one with all it started, in 10^6 bytes; None for its share of a quarter of the
            machine's, at least 1000.
        keep_environment: environment variables they may see though their names look like secrets.
        once: a process answers one call, and ends with all that it has left running.
        forks: start the processes; None for programs of their own.

    Attributes:
        logs: directory for what the functions print, a file a process that keeps about the last megabyte; None for
            nowhere. Processes that run already go on as they began.

    Raises:
        ValueError: a function that another process cannot import, or one that keeps state in this one.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]] | bytes,
        workers: int,
        memory_mb: float | None = None,
        keep_environment: Sequence[str] | None = None,
        once: bool = False,
        forks: Forks | None = None,
    ) -> None:
        self._pickled = functions if isinstance(functions, bytes) else pickled_functions(functions)
        self._names = [] if isinstance(functions, bytes) else list(functions)
        self._workers = workers
        self._memory_bytes = memory_limit(memory_mb, workers)
        self._keep = tuple(keep_environment or ())
        self._once = once
        self._forks = forks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        self._under_way = UnderWay()

    async def call(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        seconds: float | None,
        output: Path | None = None,
        held: Held | None = None,
    ) -> Any:
        return await self.call_pickled(pickled_call(name, args, kwargs), seconds, output, held)

    async def call_pickled(
        self, job: bytes, seconds: float | None, output: Path | None = None, held: Callable[[], float] | None = None
    ) -> Any:
        """As `call`, of what `pickled_call` made."""
        if self._loop is not asyncio.get_running_loop():  # the first call, or rollouts begin again
            self.stop()
            self._loop = asyncio.get_running_loop()
            self._free = asyncio.Semaphore(self._workers)
            tell_hidden(_log, ", ".join(self._names), "keep_environment", self._keep)
        async with self._under_way.call(), self._free:
            one = await self._process()
            begin = size_of(one.log)
            try:
                await one.ask([job], seconds, held)
                status, content, over = await one.answer(seconds, held)
            except BaseException as error:  # a cancellation too: what runs there is not to go on
                try:
                    ended = await one.end(is_gone=isinstance(error, EOFError | ConnectionError))
                    _copy(one.log, begin, output)
                finally:
                    self._all.discard(one)
                if isinstance(error, TimeoutError):
                    raise DeadlinePassed(seconds) from error
                if isinstance(error, EOFError | OSError):
                    raise CallFailed(f"its process {ended}") from error
                if isinstance(error, OverMemory | Garbled):
                    raise CallFailed(f"{error}; its process {ended}") from error
                raise
            if status != "ok":
                _copy(one.log, begin, output)
            if over or self._once:
                try:
                    await one.end()
                finally:
                    self._all.discard(one)
            else:
                self._idle.append(one)
        if status != "ok":
            raise CallFailed(str(content))
        return content

    def stop(self) -> None:
        """Ends all processes; calls under way and those that wait raise CallFailed. The next call starts others."""
        nursery = self._forks.leave() if self._forks is not None else None
        end_all(self._all if nursery is None else [*self._all, nursery])
        self._under_way.stop()
        self._all.clear()
        self._idle.clear()

    async def _process(self) -> WorkerProcess:
        while self._idle:
            one = self._idle.pop()
            if not one.is_gone:
                return one
            self._all.discard(one)
            await one.end()
        one = await self._started()
        self._all.add(one)
        try:
            await one.greet(_START_S)
        except BaseException as error:
            self._all.discard(one)
            ended = await one.end()
            if isinstance(error, Exception):
                why = str(error) or type(error).__name__
                raise CallFailed(f"its process {ended} before it was ready: {why}") from error
            raise
        return one

    async def _started(self) -> WorkerProcess:
        while True:
            starter = None
            try:
                if self._forks is not None:
                    starter = await self._forks.starter(self._keep, self.logs and self.logs / "imports.log")
                return WorkerProcess(self._pickled, self._memory_bytes, self._keep, self._log(), starter)
            except OSError as error:
                if starter is None or self._forks is None:
                    raise CallFailed(f"no process can be started: {error}") from error
                await self._forks.lose(starter, described(error))

    def _log(self) -> Path | None:
        """A file that no process writes."""
        taken = {one.log for one in self._all}
        return self.logs and next(path for k in range(len(taken) + 1) if (path := self.logs / f"{k}.log") not in taken)


def _copy(log: Path | None, begin: int, to: Path | None) -> None:
    """What has been written to `log` behind `begin`."""
    if log is None or to is None:
        return
    with suppress(OSError):  # a full disk, say, costs this only
        if printed := written_since(log, begin):
            to.write_bytes(printed)


class _Functions:
    """Attributes: is_for_people, whether what they raise is read by people, for whom the log has the traceback too."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self._functions = functions
        self.is_for_people = all(getattr(one, "is_for_people", False) is True for one in functions.values())

    def __call__(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self._functions[name](*args, **kwargs)
            return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
        except NotAnAnswer:
            raise
        except BaseException as error:
            if self.is_for_people:
                print_traceback(error)
            raise


async def _awaited(result: Awaitable[Any]) -> Any:
    """Of a plain function that gives something to await: a decorated asynchronous one, say."""
    return await result
