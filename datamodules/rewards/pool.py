"""Rewards in worker processes: bounded, with a deadline, killable.

Promises: a reward that raises, crashes, hangs, takes too much memory or returns no finite number costs the one call it
was asked for, after as many retries as configured: `RewardError` naming the prompt, or the configured score, logged and
counted. A reward is the answer to its own call and no other's, whatever forks. A worker that cannot be trusted any more
is killed with everything it started and replaced, and the calls waiting behind it go on elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from datamodules.processes.foreign import described
from datamodules.processes.guarded import OverMemory, end_all
from datamodules.processes.limits import memory_limit, tell_hidden
from datamodules.processes.process import Garbled, WorkerProcess
from datamodules.processes.worker import pickled
from datamodules.prompts.base import Prompt
from datamodules.rewards.functions import Reward
from datamodules.rewards.options import Judgement, RewardOptions
from datamodules.rewards.worker import RewardCalls

_log = logging.getLogger(__name__)
_MOST_AT_ONCE = (
    16  # calls sent to a worker in one message: fewer switches between processes for rewards of microseconds
)


class RewardError(RuntimeError):
    """A reward that could not be had; the message says for which prompt and why.

    Attributes:
        failure: what of `options.Failure` it is; "" when no reward was called at all.
    """

    def __init__(self, message: str, failure: str = "") -> None:
        super().__init__(message)
        self.failure = failure


class _Call:
    __slots__ = ("future", "payload", "prompt_id", "retries")

    def __init__(self, prompt: Prompt, completion: Any, retries: int) -> None:
        self.prompt_id = prompt.id
        self.retries = retries  # left
        try:
            self.payload = pickled(((replace(prompt, pictures=()), completion), {}))
        except Exception as error:
            raise RewardError(f"prompt '{prompt.id}' cannot be sent to a reward worker: {error}") from error
        self.future: asyncio.Future[Judgement] = asyncio.get_running_loop().create_future()

    def fail(self, why: str, failure: str = "") -> None:
        if not self.future.done():
            self.future.set_exception(RewardError(f"reward of prompt '{self.prompt_id}' {why}", failure))


class RewardPool:
    """Calls `reward(prompt, completion)` in worker processes.

    Args:
        reward: a function or callable object that other processes can import (not a lambda, not a local function);
            gives a number, or a number and what it is made of, by name (see `functions.Reward`).
        options: how many workers, deadline, retries, cache, limits and what a failed call means; see `RewardOptions`.
        start_deadline_s: seconds a worker may take to start, import the reward and `prepare` it (see
            `worker.RewardCalls`). What the reward imports when it is called counts for that call.

    Attributes:
        restarts: processes started in place of others, lost or replaced.
        failures: calls that failed for good. cache_hits: calls answered from the cache. retries: calls made again.

    Raises:
        ValueError: a reward that cannot be sent to another process.
    """

    def __init__(
        self,
        reward: Callable[[Prompt, str], Reward],
        options: RewardOptions | None = None,
        start_deadline_s: float = 120.0,
    ) -> None:
        try:
            self._pickled = pickled(RewardCalls(reward))
        except Exception as error:
            raise ValueError(
                f"reward: {reward!r} cannot be sent to a worker process ({error}); define it at the top of a module"
            ) from error
        self._options = options or RewardOptions()
        self._count = self._options.workers
        self._deadline_s = self._options.deadline_s
        self._start_deadline_s = start_deadline_s
        self._memory_bytes = memory_limit(self._options.memory_mb, self._count)
        self._logs: Path | None = None
        self._workers: list[WorkerProcess | None] = []
        self._servers: list[asyncio.Task[None]] = []
        self._waiting: deque[_Call] = deque()
        self._arrived = asyncio.Event()  # made anew by open(): it belongs to one loop
        self._cache: OrderedDict[bytes, Judgement] = OrderedDict()
        self.restarts = self.failures = self.cache_hits = self.retries = 0

    def start(self, logs: Path | None = None) -> None:
        """Starts the processes, and returns before they are ready.

        Args:
            logs: directory for what rewards print, a file a worker that keeps about the last megabyte; None for none.

        Raises:
            OSError: no process can be started.
        """
        if not self._workers:
            self._logs = logs
            kept = self._options.keep_environment or ()
            tell_hidden(_log, "rewards", "reward_options.keep_environment", kept)
            self._workers = [self._new_worker(slot) for slot in range(self._count)]

    async def open(self) -> None:
        """Waits until every worker is ready, and serves calls of this event loop from then on.

        Raises:
            ValueError: the reward cannot be imported in a worker, or a worker does not start.
        """
        self.start()
        self._arrived = asyncio.Event()
        for one in self._workers:
            assert one is not None
            try:
                await self._greet(one)
            except RewardError as error:
                raise ValueError(str(error)) from error
        self._servers = [asyncio.create_task(self._serve(slot)) for slot in range(self._count)]
        for server in self._servers:
            server.add_done_callback(self._served)

    async def score(self, prompt: Prompt, completion: str) -> float:
        """The reward of one completion, a finite number. Raises RewardError as `judge`."""
        return (await self.judge(prompt, completion)).value

    async def judge(self, prompt: Prompt, completion: Any) -> Judgement:
        """The reward of one completion and what it is made of.

        Raises:
            RewardError: there is none and no score is configured for that; or no worker is running.
        """
        if not self._servers:
            raise RewardError(f"reward of prompt '{prompt.id}' asked for, but the reward workers are not running")
        call = _Call(prompt, completion, self._options.retries)
        key = hashlib.sha256(call.payload).digest() if self._options.cache else b""
        if key in self._cache:
            self.cache_hits += 1
            self._cache.move_to_end(key)
            return self._cache[key]
        self._waiting.append(call)
        self._arrived.set()
        try:
            found = await call.future
        except RewardError as error:
            return self._failed(error)
        if self._options.cache:
            self._cache[key] = found
            while len(self._cache) > self._options.cache:
                self._cache.popitem(last=False)
        return found

    held_out = judge

    def of_group(self, samples: int) -> list[Callable[[Prompt, Any], Awaitable[Judgement]]]:
        """What each of a group's episodes asks for its reward."""
        return [self.judge] * samples

    def spent(self) -> dict[str, float]:
        """What rewards used, for the logs: nothing that costs."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of rewards: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`."""

    @property
    def exhausted(self) -> str:
        """Why no reward will be computed any more; never."""
        return ""

    def close(self) -> None:
        """Kills the workers; calls that are waiting or under way fail. Idempotent; after the loop ended, or in it."""
        for server in self._servers:
            if not server.get_loop().is_closed():
                server.cancel()
        self._servers = []
        end_all(one for one in self._workers if one is not None)
        self._workers = []
        self._fail(self._waiting)

    def _failed(self, error: RewardError) -> Judgement:
        """The configured score in place of a failed call's reward; raises `error` where groups are dropped instead."""
        if not error.failure:
            raise error
        self.failures += 1
        score = self._options.on_failure
        if score == "drop":
            raise error
        _log.warning("%s; scored %g (reward_options.on_failure)", error, score)
        return Judgement(float(score), failed=str(error))

    def _fail(self, calls: deque[_Call]) -> None:
        while calls:
            call = calls.popleft()
            if not call.future.get_loop().is_closed():
                call.fail("will not come: the reward workers were closed")

    def _new_worker(self, slot: int) -> WorkerProcess:
        log = None if self._logs is None else self._logs / f"{slot}.log"
        return WorkerProcess(self._pickled, self._memory_bytes, self._options.keep_environment or (), log)

    async def _greet(self, one: WorkerProcess) -> None:
        failure = "crash"
        try:
            await one.greet(self._start_deadline_s)
            return
        except TimeoutError:
            why = f"no sign of life within {self._start_deadline_s:g} s"
        except OverMemory as error:
            why, failure = (
                f"before its first call it holds {error} (reward_options.memory_mb); raise the limit",
                "memory",
            )
        except (EOFError, OSError):
            why = f"it {await one.end(is_gone=True)} before it was ready"
        except (ValueError, Garbled) as error:
            why = str(error)
        raise RewardError(f"reward: a worker process could not be started: {why}", failure)

    async def _serve(self, slot: int) -> None:
        """Keeps one worker busy, replacing it whenever it is lost."""
        while True:
            calls = await self._next_calls()
            try:
                one = await self._worker(slot)
                await self._exchange(one, slot, calls)
            except RewardError as error:  # it worked before: give up on one call, then try again
                self._give_up(calls.popleft(), error.failure, f"has nobody to compute it: {error}")
                self._give_back(calls)
            except BaseException:  # closed, or a fault of ours: nobody would come for what is given back
                self._fail(calls)
                raise

    def _served(self, server: asyncio.Task[None]) -> None:
        """A server that ended by itself is a fault of ours: nobody may wait for it in vain."""
        if not server.cancelled() and (error := server.exception()) is not None and server in self._servers:
            _log.error("the reward workers are given up", exc_info=error)
            self.close()

    async def _exchange(self, one: WorkerProcess, slot: int, calls: deque[_Call]) -> None:
        """Has the calls answered one by one; all of them are done, failed or given back unless it raises."""
        failure, why = "", ""
        try:
            await one.ask([call.payload for call in calls], self._deadline_s)
            while calls:
                status, content, over = await one.answer(self._deadline_s)
                judged = _judgement(status, content)
                call = calls.popleft()
                if judged is None:
                    self._give_up(call, status, content)
                elif not call.future.done():
                    call.future.set_result(judged)
                if over or one.answers == self._options.max_calls:
                    await self._replace(slot, one, calls, over or "reward_options.max_calls")
                    return
        except TimeoutError:
            failure, why = "timeout", f"did not return within {self._deadline_s:g} s; its worker {await one.end()}"
        except OverMemory as error:
            if one.answers > 0:  # what earlier calls left behind may be to blame: a fresh worker will tell
                await self._replace(slot, one, calls, error)
                return
            failure, why = "memory", f"took {error} (reward_options.memory_mb); its worker {await one.end()}"
        except (EOFError, OSError):
            failure, why = "crash", f"was lost: its worker {await one.end(is_gone=True)}"
        except Exception as error:  # Garbled, and whatever else a broken worker can bring about
            failure, why = "crash", f"was lost: {described(error)}; its worker {await one.end()}"
        if failure:
            self._workers[slot] = None
            if calls:
                self._give_up(calls.popleft(), failure, why)
            self._give_back(calls)

    async def _replace(self, slot: int, one: WorkerProcess, calls: deque[_Call], why: object) -> None:
        """Ends a worker through no fault of `calls`, which go on elsewhere."""
        _log.info("reward worker replaced after %d calls: %s", one.answers, why)
        await one.end()
        self._workers[slot] = None
        self._give_back(calls)

    def _give_up(self, call: _Call, failure: str, why: str) -> None:
        """On this attempt: the call waits for another one, or fails."""
        if call.retries > 0 and failure in self._options.retried and not call.future.done():
            call.retries -= 1
            self.retries += 1
            _log.info("reward of prompt '%s' %s; tried again", call.prompt_id, why)
            self._waiting.append(call)
            self._arrived.set()
        else:
            call.fail(why, failure)

    def _give_back(self, calls: deque[_Call]) -> None:
        self._waiting.extendleft(reversed(calls))
        if calls:
            self._arrived.set()

    async def _worker(self, slot: int) -> WorkerProcess:
        one = self._workers[slot]
        if one is not None and one.is_gone:  # between two calls, neither of which is to blame
            _log.info("reward worker replaced after %d calls: it %s", one.answers, await one.end())
            one = None
        if one is None:
            self.restarts += 1
            try:
                one = self._new_worker(slot)
            except OSError as error:
                raise RewardError(f"reward: a worker process could not be started: {error}", "crash") from error
            self._workers[slot] = one  # at once, so that close() finds it
            try:
                await self._greet(one)
            except RewardError:
                await one.end()
                self._workers[slot] = None
                raise
        return one

    async def _next_calls(self) -> deque[_Call]:
        while True:
            calls: deque[_Call] = deque()
            # A fair share, so that slow rewards spread over the workers.
            share = max(1, min(_MOST_AT_ONCE, len(self._waiting) // (2 * self._count)))
            while self._waiting and len(calls) < share:
                call = self._waiting.popleft()
                if not call.future.done():  # its group was given up meanwhile
                    calls.append(call)
            if calls:
                return calls
            self._arrived.clear()
            await self._arrived.wait()


def _judgement(status: str, content: Any) -> Judgement | None:
    """The reward in an answer, None where it says why there is none. Raises Garbled."""
    if status in ("exception", "nan") and isinstance(content, str):
        return None
    try:
        value, parts, unreadable, said = content
        if status == "ok" and math.isfinite(value):
            named = {str(name): float(part) for name, part in parts.items()}
            return Judgement(float(value), named, unreadable=bool(unreadable), feedback=str(said))
    except (TypeError, ValueError, AttributeError):
        pass
    raise Garbled(f"it sent {str(content)[:100]} as {status[:20]!r}")
