"""Threads for what would block the rollouts' event loop: what `asyncio.to_thread` runs on there.

Promises: calls that nobody awaits any more (their episode is over) take no place from others; what never returns keeps
neither the event loop nor the process from ending, and is named as they end without it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Call(Future[Any]):
    def __init__(self, function: partial[Any], give_up: Callable[[_Call], None]) -> None:
        super().__init__()
        self.function = function
        self._give_up = give_up

    @property
    def name(self) -> str:
        """Of what is called; `to_thread` puts a context around it."""
        given = self.function.args[:1]
        called = given[0] if given and callable(given[0]) else self.function.func
        return f"{getattr(called, '__module__', '')}.{getattr(called, '__qualname__', type(called).__name__)}"

    def cancel(self) -> bool:
        cancelled = super().cancel()
        self._give_up(self)
        return cancelled


class DaemonThreads(ThreadPoolExecutor):
    """An executor for event loops, which take this class of them alone; a thread for each call, and no other.

    An executor's own threads are joined as the process ends, and as an event loop does, for however long they take.

    Args:
        most: calls that are awaited and run at once; further ones wait.
        name: of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(1)  # of which none is ever started
        self._most = most
        self._name = name
        self._guard = threading.RLock()
        self._waiting: deque[_Call] = deque()
        self._running: set[_Call] = set()
        self._awaited: set[_Call] = set()  # of those that run
        self._closed = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        call = _Call(partial(fn, *args, **kwargs), self._give_up)
        with self._guard:
            if self._closed:
                raise RuntimeError("no new calls on threads: the event loop has ended")
            self._waiting.append(call)
            self._begin()
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more calls, and lets those go that wait; waits for none, whatever is asked."""
        with self._guard:
            closed, self._closed = self._closed, True
            waiting, self._waiting = self._waiting, deque()
            left = [call.name for call in self._running]
        for call in waiting:
            call.cancel()
        if left and not closed:
            _log.warning(
                "calls on threads (asyncio.to_thread) that have not returned are left behind: %d, of %s; give them"
                " deadlines of their own",
                len(left),
                ", ".join(sorted(set(left))),
            )

    def _begin(self) -> None:
        while self._waiting and len(self._awaited) < self._most:
            call = self._waiting.popleft()
            if not call.set_running_or_notify_cancel():
                continue
            self._running.add(call)
            self._awaited.add(call)
            try:
                threading.Thread(target=self._run, args=(call,), name=self._name, daemon=True).start()
            except RuntimeError as error:  # the system has no more of them
                self._end(call)
                call.set_exception(error)

    def _run(self, call: _Call) -> None:
        try:
            try:
                result = call.function()
            finally:
                self._end(call)
        except BaseException as error:  # it belongs to whoever awaits
            call.set_exception(error)
        else:
            call.set_result(result)

    def _end(self, call: _Call) -> None:
        with self._guard:
            self._running.discard(call)
            self._give_up(call)

    def _give_up(self, call: _Call) -> None:
        with self._guard:
            self._awaited.discard(call)
            self._begin()
