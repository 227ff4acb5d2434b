"""The asynchronous producer: rolls out groups ahead of the trainer, on a thread with an event loop of its own.

    admit (gate) -> deal a prompt -> play all its samples -> filter -> ready queue of whole groups -> collect (trainer)

Promises: groups stay whole: one failed sample drops its group, which is counted, logged with prompt id and reason,
and gives its place back; groups too old when the trainer comes are dropped as stale; every wait has a deadline and its
TimeoutError says what is pending; if the thread dies the trainer gets its error at once; `state_dict` taken at any
moment misses no prompt and holds none twice. With `max_staleness: 0` groups are submitted and collected in prompt
order, all of a version's at once (as far as `max_concurrent` lets them), and are never played beside validation.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from typing import Any

from app import interruption
from app.batch import Trajectory
from datamodules.filters import GroupFilter, decide
from datamodules.groups import Group, label, to_batch
from datamodules.pending import Pending
from datamodules.pipeline.diagnosis import one_line
from datamodules.pipeline.gate import StalenessGate
from datamodules.pipeline.limits import FailureLimits, Limits, RolloutsFailed
from datamodules.pipeline.player import EpisodePlayer, Pause, evaluate
from datamodules.pipeline.stream import Stream
from datamodules.pipeline.threads import DaemonThreads
from datamodules.processes import foreign
from datamodules.processes.awake import awake
from datamodules.processes.calls import DeadlinePassed
from datamodules.prompts.base import Prompt
from datamodules.prompts.dealer import PromptDealer
from datamodules.workflows.base import Misfit, PlaceholderSampled

_log = logging.getLogger(__name__)
_INTERRUPT_POLL_S = 1.0  # how often a waiting trainer looks up, so that it can be interrupted
_CLOSE_S = 30.0
_MOST_CALLS = 64  # on threads


class Producer:
    """Keeps groups coming for one trainer.

    Args:
        player: plays episodes.
        dealer: encoded prompts by stream index.
        gate: decides how far to run ahead.
        group_size: samples of each prompt.
        seed: of the sampling: sample s of prompt i uses (seed, i, s).
        limits: how many groups may fail, or be filtered out, before the run stops with the last one's reason.
        group_filter: names a reason for the groups that are not worth training on, which are dropped, and for single
            episodes.
        solved_at: an episode with at least this reward has solved its prompt (in the tally).
    """

    def __init__(
        self,
        player: EpisodePlayer,
        dealer: PromptDealer,
        gate: StalenessGate,
        *,
        group_size: int,
        seed: int,
        limits: Limits,
        group_filter: GroupFilter | None = None,
        solved_at: float = 1.0,
    ) -> None:
        self.gate = gate
        self.stream = Stream(gate, group_size, solved_at, limits.rest or 0)
        self.player = player
        self._dealer = dealer
        self._group_size = group_size
        self._seed = seed
        self._filter = group_filter
        self._failures = FailureLimits(limits)

        self._changed = self.stream.changed
        self._error: BaseException | None = None
        self._admitting = False
        self._closing = False
        self.trainer_waits = False

        self.thread: threading.Thread | None = None
        self._up = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[asyncio.Task[None], Pending] = {}
        self.evaluating: dict[Any, Pending] = {}

    # ---- called by the trainer's thread

    def start(self, version: int, state: dict[str, Any] | None = None) -> None:
        """Starts the thread, at policy `version`, with a stream that begins or goes on from `state`.

        Finished groups of other weights' future (newer than `version`) or of another group size are played again.
        Admission begins with the first `collect`. Raises what failed, when the reward workers do not start.
        """
        self.stream.restore(version, state or {})
        self.thread = threading.Thread(target=self._run, name="rollout-producer", daemon=True)
        self.thread.start()
        self._up.wait()  # bounded: reward workers have a deadline for their start
        if self._error is not None:
            raise self._error

    def collect(self, count: int, deadline_s: float) -> list[Group]:
        """Takes the `count` oldest of the finished groups, in prompt order, waiting for them if need be. Empty when
        the run is asked to end.

        Raises:
            TimeoutError: they are not there after `deadline_s` seconds; says what is pending, and for how long.
            RuntimeError: the producer failed.
        """
        ends = awake() + deadline_s
        with self._changed:
            self._admitting = True
            self._wake()
            try:
                while True:
                    self._raise_if_failed()
                    if interruption.pending() is not None:  # first: what is taken is recorded, and not trained on
                        return []
                    taken = self.stream.take(count)
                    if taken is not None:
                        return taken
                    self._wake()  # stale groups may have left places
                    left = ends - awake()
                    if left <= 0:
                        raise TimeoutError(
                            f"{self.stream.ready} of {count} groups are ready after {deadline_s:g} s"
                            f" (limits.collect_deadline_s); {self.describe()}"
                        )
                    self.trainer_waits = True
                    self._changed.wait(min(left, _INTERRUPT_POLL_S))
            finally:
                self.trainer_waits = False

    def evaluate(self, prompts: Sequence[Prompt], samples: int, temperature: float, deadline_s: float) -> list[Group]:
        """Plays `samples` episodes of every prompt at the version that serves now.

        Bypasses the gate. No training group is admitted meanwhile; those being played are held before their next
        request, or, with `max_staleness: 0`, finished first. Episodes that fail are left out, with one warning that
        counts them. Empty when the run is asked to end meanwhile.

        Raises:
            TimeoutError: not finished after `deadline_s` seconds; says what is pending.
            RuntimeError: every episode failed, the weights changed meanwhile, or the producer failed.
        """
        with self._changed:
            self._raise_if_failed()
        assert self.loop is not None
        version = self.player.engine.version
        future = asyncio.run_coroutine_threadsafe(self._evaluate(prompts, samples, temperature), self.loop)
        ends = awake() + deadline_s
        while not wait((future,), min(_INTERRUPT_POLL_S, max(0.0, ends - awake()))).done:
            with self._changed:
                self._raise_if_failed()
            if interruption.pending() is not None:
                future.cancel()
                return []
            if awake() >= ends:
                pending = self.describe()
                future.cancel()
                raise TimeoutError(
                    f"validation is not finished after {deadline_s:g} s (limits.collect_deadline_s); {pending}"
                )
        try:
            groups = future.result()
        except CancelledError:
            with self._changed:
                self._raise_if_failed()
            raise
        if self.player.engine.version != version:
            raise RuntimeError(
                f"validation began at version {version} and ended at {self.player.engine.version};"
                " update weights between validations, not during one"
            )
        return groups

    def publish(self, version: int) -> None:
        """New weights serve from now on: there may be room for more groups."""
        self.gate.publish(version)
        self._wake()

    def state_dict(self, in_training: Sequence[Group] = (), under_way: Sequence[Group] = ()) -> dict[str, Any]:
        """The stream; see `Stream.state_dict`."""
        return self.stream.state_dict(in_training, under_way)

    def close(self) -> None:
        """Ends the thread; episodes in progress are cancelled. Idempotent."""
        with self._changed:
            self._closing = True
            self._wake()
        if self.thread is not None:
            self.thread.join(_CLOSE_S)
            if self.thread.is_alive():
                _log.error("the rollout producer did not end within %g s; %s", _CLOSE_S, self.describe())
            self.thread = None

    # ---- called from any thread

    @property
    def is_validating(self) -> bool:
        return bool(self.evaluating)

    def pending(self) -> list[Pending]:
        """What is being played: validation's prompts while there are any, else training's."""
        return list(self.evaluating.values()) or self.stream.running()

    def describe(self) -> str:
        """One line: what is pending where, the gate's counters, the engine's health."""
        return one_line(self)

    def ping(self, pong: threading.Event) -> None:
        """Sets `pong` from the event loop, which shows that it is not stuck."""
        if self.loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(pong.set)

    def requeue_stalled(self, most: int) -> None:
        """Gives up every training group that is being played; their prompts are played again, before any new ones.

        Args:
            most: a prompt that stalled so often before fails instead, as a group that is dropped.
        """
        assert self.loop is not None
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._requeue_stalled, most)

    def fail(self, error: BaseException | None) -> None:
        """Stops, unless `error` is None: the trainer gets it at once."""
        if error is None:
            return
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._wake()

    # ---- shared

    def _wake(self) -> None:
        if self.loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._awake.set)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            reason = str(self._error) if isinstance(self._error, Exception) else ""
            raise RuntimeError(
                f"the rollout producer failed: {reason or foreign.described(self._error)}"
            ) from self._error
        if self.thread is None or not self.thread.is_alive():
            raise RuntimeError("the rollout producer is not running")

    # ---- the producer's own thread

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                loop = runner.get_loop()
                loop.set_default_executor(DaemonThreads(_MOST_CALLS, "rollout-call"))
                main = loop.create_task(self._main())
                while not main.done():
                    try:
                        loop.run_until_complete(main)
                    except (SystemExit, KeyboardInterrupt) as error:
                        # Of a task that a workflow made, whose awaiter gets it too: no reason for the loop to end.
                        _log.warning("a task of a workflow raised %s", foreign.described(error))
            main.result()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._up.set()

    async def _main(self) -> None:
        self._awake = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self.loop = asyncio.get_running_loop()
        if self.player.pool is not None:
            await self.player.pool.open()
        self._up.set()
        try:
            while not self._closing and self._error is None:
                self._awake.clear()
                self._admit()
                await self._awake.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _admit(self) -> None:
        while self._admitting and self._unpaused.is_set() and not self._closing and self._error is None:
            pending = self.stream.admit()
            if pending is None:
                return
            task = asyncio.create_task(self._group(pending), name=f"group {pending.index}")
            self._tasks[task] = pending
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        pending = self._tasks.pop(task, None)
        if task.cancelled():
            if pending is not None and not task.cancelling():  # nobody asked for that: its place must not be lost
                self._drop(pending, RuntimeError("its task was cancelled from inside"))
        elif (error := task.exception()) is not None:  # a fault of ours, not of an episode
            self.fail(error)
        self._awake.set()

    def _cancel(self, given_up: Sequence[Pending]) -> None:
        for task, pending in self._tasks.items():
            if pending in given_up:
                task.cancel()
        self._awake.set()

    def _requeue_stalled(self, most: int) -> None:
        running = self.stream.running()
        hopeless = [pending for pending in running if pending.stalls >= most]
        self.stream.requeue((pending for pending in running if pending not in hopeless), stalled=True)
        for pending in hopeless:
            self._drop(pending, RuntimeError(f"stalled again after being played {pending.stalls + 1} times"))
        self._cancel(running)

    async def _group(self, pending: Pending) -> None:
        try:
            prompt = self._dealer.deal(pending.index)
            if prompt is None:
                self.stream.skip(pending)
                self.fail(self._failures.skipped())
                return
            pending.prompt_id = prompt.id
            if self.stream.at_rest(pending, prompt.id):
                return
            group = await self._play(prompt, pending)
            reason = None if self._filter is None else decide(self._filter, group)
        except BaseException as error:  # sources of prompts and filters are users' code too
            if foreign.must_pass(error):
                raise
            self._drop(pending, _first(error))
            return
        if reason is None:
            self._failures.came_through()
            self._cancel(self.stream.finish(pending, group))
        elif self.stream.filter(pending, group):
            self.fail(self._failures.filtered(group.prompt_id, reason))

    async def _play(self, prompt: Prompt, pending: Pending) -> Group:
        again = f"~{pending.attempt}" if pending.attempt else ""  # an engine may still know the requests given up

        pool = self.player.pool
        scores = [None] * self._group_size if pool is None else pool.of_group(self._group_size)

        pause = Pause(self._unpaused) if self.gate.max_staleness > 0 else None

        async def sample(number: int) -> list[Trajectory]:
            trajectories = await self.player.play(
                prompt,
                name=f"{prompt.id}#{number}{again}",
                seed=f"{self._seed}/{pending.index}/{number}",
                sample=number,
                pause=pause,
                pending=pending,
                score=scores[number],
            )
            pending.done += 1
            return label(trajectories, pending.index, number, self._group_size)

        async with asyncio.TaskGroup() as tasks:  # the first failure cancels the others
            samples = [tasks.create_task(sample(number)) for number in range(self._group_size)]
        self.player.complete(prompt, [task.result() for task in samples])
        trajectories = [one for task in samples for one in task.result()]
        group = Group(pending.index, prompt.id, pending.admitted_at, trajectories)
        to_batch([group]).check_vocabulary(self.player.engine.vocab_size)  # what cannot be trained on fails here
        return group

    def _drop(self, pending: Pending, error: BaseException) -> None:
        if not self.stream.fail(pending, placeholder=isinstance(error, PlaceholderSampled)):
            return
        prompt_id = pending.prompt_id if pending.prompt_id != "?" else f"index {pending.index}"
        reason = foreign.described(error) + foreign.place(error)
        late = any(isinstance(one, TimeoutError | DeadlinePassed) for one in (error, error.__cause__))
        failure: RuntimeError | None = self._failures.failed(prompt_id, reason, late)
        if failure is None and isinstance(error, Misfit):
            failure = RolloutsFailed(f"prompt '{prompt_id}': {error}")
        if failure is None and not self.player.engine.health().get("alive", True):
            failure = RuntimeError(f"the inference engine has failed; prompt '{prompt_id}': {reason}")
        if failure is None and self.player.pool is not None and self.player.pool.exhausted:
            failure = RolloutsFailed(f"nothing can be rewarded any more: the judge {self.player.pool.exhausted}")
        if failure is not None:
            failure.__context__ = error  # for the traceback: a workflow's author wants to see the line
        self.fail(failure)

    async def _evaluate(self, prompts: Sequence[Prompt], samples: int, temperature: float) -> list[Group]:
        self._unpaused.clear()
        try:
            if self._tasks and self.gate.max_staleness == 0:
                # Requests computed beside others differ in rounding: finished first, both sides are reproducible.
                await asyncio.wait(list(self._tasks))
            return await evaluate(
                self.player,
                prompts,
                samples=samples,
                temperature=temperature,
                seed=f"{self._seed}/validation",
                pending=self.evaluating,
                arrivals=self.stream.arrivals,
            )
        finally:
            self._unpaused.set()
            self._awake.set()


def _first(error: BaseException) -> BaseException:
    """The first error inside what a task group raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
