"""A thread with an event loop, blocking calls into it from other threads, and the end of tasks on it.

Promises: no call waits longer than its deadline, whatever became of the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from datamodules.inference.protocol import GenerationError

_T = TypeVar("_T")


class LoopThread:
    """Runs from its construction to `stop`; a daemon, so that a program that forgets `stop` can end."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, _T], deadline_s: float) -> _T:
        """Result of `work`, which runs on the loop; an interrupt here cancels it. Not to be called on the loop.

        Args:
            deadline_s: seconds, more than `work` takes by its own deadlines: only a loop that stands still passes it.

        Raises:
            GenerationError: the deadline passed. Besides, whatever `work` raises.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(deadline_s)
        except BaseException as error:
            if isinstance(error, TimeoutError) and not future.done():
                future.cancel()
                raise GenerationError(
                    f"the event loop of thread {self._thread.name} stands still: no answer within {deadline_s:g} s"
                ) from None
            future.cancel()
            raise

    def stop(self, deadline_s: float) -> None:
        """Cancels what runs on the loop and ends the thread. Raises TimeoutError when it does not end in time."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise TimeoutError(f"thread {self._thread.name} did not end within {deadline_s:g} s")

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self.loop.close()


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and returns when they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
