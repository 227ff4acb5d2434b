"""Agents on the machines of a Ray cluster: an engine that places them, and notices when a node dies.

Promises: what holds for agents on this machine holds there: deadlines, limits of memory, the environment they see, the
output of those that fail, and the end of everything they started. A wait for a node has a deadline, and says what it
waited for. An agent whose node dies is `Lost`; nothing is run again by Ray or here, the caller has to begin anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app import checks
from datamodules.processes.calls import CallFailed, Calls, DeadlinePassed, UnderWay, pickled_call, pickled_functions
from datamodules.processes.deadline import Held, deadline
from datamodules.processes.limits import looks_secret
from datamodules.prompts.extras import needs

if TYPE_CHECKING:
    from datamodules.processes.on_ray import RayCluster, RayTask

_log = logging.getLogger(__name__)
_START_S = 120.0  # of the agent's process on its node
_END_S = 20.0  # a relay's own bound is shorter
_LEAST_AMOUNT, _MOST_AMOUNT = 1e-4, 1e6  # of a resource: Ray counts in steps of the first


class RayExecutor:
    """Runs agents as tasks of a Ray cluster.

    Nodes need this checkout, its packages and the agent where they are on this machine (a shared file system, an
    image), or a `runtime_env` that brings them. The run's machine is a node too; agents are spread over all that have
    room for them.

    Args:
        address: of the cluster's head, as host:port; "auto" for the cluster that this machine is part of, or that
            RAY_ADDRESS names; None to start Ray on this machine alone, to try it.
        num_cpus: CPUs that an agent of training has for itself, at least 0; Ray counts them, and holds nobody to them.
            Those of validation ask for none: training's hold theirs until validation is over.
        num_gpus: GPUs, at least 0; parts of one may be shared, of several they may not.
        resources: others that it needs, by the names that nodes were started with; at least 0.0001 of each.
        max_retries: how often an episode is played again whose agent was lost with its node.
        wait_s: seconds an agent waits for a node that has room.
        runtime_env: of Ray: `working_dir`, `py_modules`, `pip`, `env_vars` and so on. Ray writes it to its logs.

    Raises:
        ValueError: an argument out of range, or one that has a place elsewhere.
        ImportError: without the extra `ray`.
    """

    def __init__(
        self,
        address: str | None = "auto",
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        resources: dict[str, float] | None = None,
        max_retries: int = 2,
        wait_s: float = 120.0,
        runtime_env: dict[str, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        needs("ray", "ray", name)
        amounts = {f"{name}.num_cpus": num_cpus, f"{name}.num_gpus": num_gpus}
        checks.at_least(0, amounts)
        checks.at_most(_MOST_AMOUNT, amounts)
        for key, value in amounts.items():
            if 0 < value < _LEAST_AMOUNT:
                raise ValueError(f"{key}: {value}, must be 0, or at least {_LEAST_AMOUNT}, below which Ray counts none")
        if num_gpus > 1 and num_gpus != int(num_gpus):
            raise ValueError(f"{name}.num_gpus: {num_gpus}, must be a whole number, or a part of one")
        checks.at_least(0, {f"{name}.max_retries": max_retries})
        checks.deadline({f"{name}.wait_s": wait_s})
        for key, value in (resources or {}).items():
            if key in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ValueError(f"{name}.resources: {key} has options of its own: num_cpus, num_gpus, memory_mb")
            checks.positive({f"{name}.resources.{key}": value})
            checks.at_least(_LEAST_AMOUNT, {f"{name}.resources.{key}": value})
        if address is not None and "://" in address:
            raise ValueError(
                f"{name}.address: {address!r} is Ray's client, which cannot follow tasks; run on a machine of the"
                " cluster and give the head's host:port, or auto"
            )
        variables = (runtime_env or {}).get("env_vars", {})
        if not isinstance(variables, dict):
            what = type(variables).__name__
            raise ValueError(f"{name}.runtime_env.env_vars: a {what}, must be texts by name; remove it for none")
        for key, value in variables.items():  # which may be a secret: it is not shown
            if not isinstance(key, str) or not isinstance(value, str):
                raise ValueError(f"{name}.runtime_env.env_vars.{key}: must be a text, write it in quotes")
        secrets = sorted(key for key, value in variables.items() if looks_secret(key, value))
        if secrets:
            raise ValueError(
                f"{name}.runtime_env.env_vars: {secrets[0]} looks like a secret, and Ray writes it to its logs; set it"
                " where `ray start` is called, and name it in keep_environment"
            )
        self.max_retries = max_retries
        self.wait_s = wait_s
        self.resources = {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}
        self._address = address
        self._runtime_env = dict(runtime_env or {})
        self._cluster: RayCluster | None = None
        self._host = ""
        self._calls: set[object] = set()

    @property
    def cluster(self) -> RayCluster:
        """Once it is open. Raises CallFailed before, and after `close`."""
        cluster = self._cluster
        if cluster is None:
            raise CallFailed("cannot be started: Ray has been left, or was never joined")
        return cluster

    @contextmanager
    def joined(self) -> Iterator[RayCluster]:
        """The cluster, which is not left meanwhile. Raises CallFailed, see `cluster`."""
        call = object()
        self._calls.add(call)  # before the cluster is looked for, see `close`
        try:
            yield self.cluster
        finally:
            self._calls.discard(call)

    @property
    def folder(self) -> str | None:
        """Where agents run: this process's folder, or what Ray has unpacked."""
        return None if "working_dir" in self._runtime_env else os.getcwd()

    def open(self, host: str) -> None:
        """Joins the cluster. Idempotent.

        Args:
            host: interface of this machine on which agents find their sessions.

        Raises:
            ValueError: no such cluster, or nodes of it that cannot reach `host`. TimeoutError: Ray does not answer.
        """
        from datamodules.processes.on_ray import RayCluster  # imports Ray, which takes seconds

        self._host = host
        if self._cluster is None:
            try:
                self._cluster = RayCluster(self._address, self._runtime_env)
            except ValueError as error:
                raise ValueError(f"{type(self).__name__}.{error}") from error
        try:
            self.check_reach()
        except BaseException:
            self.close()
            raise

    def check_reach(self) -> None:
        """Raises ValueError: there are nodes on other machines, where the host is another one."""
        if strangers := self.cluster.strangers(self._host):
            raise ValueError(
                f"AgentWorkflow.host: agents on {', '.join(strangers)} cannot reach this machine at {self._host};"
                " set it to this machine's address in the network of Ray's nodes"
            )

    def close(self) -> None:
        """Leaves the cluster. Idempotent. Where calls are under way, this process stays in it: Ray ends a process that
        asks for a task once it has been left, with exit code 1 and without a word."""
        cluster, self._cluster = self._cluster, None
        if cluster is None:
            return
        if self._calls:  # those that begin now find no cluster
            self._cluster = cluster
            _log.warning("Ray is left when this process ends: %d calls of agents are still under way", len(self._calls))
            return
        cluster.close()

    def calls(
        self,
        functions: Mapping[str, Callable[..., Any]],
        workers: int,
        memory_mb: float | None = None,
        keep_environment: Sequence[str] | None = None,
        held_out: bool = False,
    ) -> RayCalls:
        """As `ProcessCalls`, there. Every call has a process of its own.

        Args:
            functions, workers, memory_mb, keep_environment: see `ProcessCalls`.
            held_out: of validation, whose calls ask for no CPUs.

        Raises ValueError: a function that another process, or another machine, cannot import.
        """
        pickled = pickled_functions(functions)
        if b"__main__" in pickled:
            raise ValueError("it is defined in the script or notebook that was started, which nodes of Ray do not have")
        return RayCalls(self, pickled, workers, memory_mb, keep_environment or (), held_out)


class RayCalls(Calls):
    """Calls as tasks of Ray, each in a process of its own.

    Args:
        executor: where they run; open before the first call.
        functions: of `pickled_functions`.
        workers: most calls at a time.
        memory_mb: most memory of one with all it started, in 10^6 bytes, which a node must have free; None for what
            `ProcessCalls` takes of the node, and no condition.
        keep_environment: variables of the nodes' environments that they may see though their names look like secrets.
        held_out: of validation: they ask for no CPUs. Calls of training, which wait until these are over, hold theirs.
    """

    def __init__(
        self,
        executor: RayExecutor,
        functions: bytes,
        workers: int,
        memory_mb: float | None,
        keep_environment: Sequence[str],
        held_out: bool,
    ) -> None:
        self._executor = executor
        self._held_out = held_out
        self._workers = workers
        self._setup = {"functions": functions, "workers": workers, "memory_mb": memory_mb}
        self._setup |= {"keep_environment": list(keep_environment)}
        self._resources = executor.resources | ({"CPU": 0.0} if held_out else {})
        if memory_mb is not None:
            self._resources["memory"] = memory_mb * 1e6
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[RayTask] = set()
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
        """See `Calls.call`; of a call that is cancelled, nothing it has printed comes back.

        Raises Lost, too: its node died, or nothing is known of it any more.
        """
        job = pickled_call(name, args, kwargs)
        if self._loop is not asyncio.get_running_loop():
            self.stop()
            self._loop = asyncio.get_running_loop()
            self._free = asyncio.Semaphore(self._workers)
        setup = {**self._setup, "job": job, "seconds": seconds, "folder": self._executor.folder}
        setup["held"] = None if held is None else (held.url, held.key, held())
        async with self._under_way.call(), self._free:
            found = await self._found(setup, seconds, held)
        if found["status"] == "ok":
            return found["content"]
        if output is not None and self.logs is not None and found["printed"]:
            with suppress(OSError):  # a full disk, say, costs this only
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(found["printed"], "utf-8")
        if found["status"] == "deadline":
            raise DeadlinePassed(seconds)
        raise CallFailed(str(found["content"]))

    def stop(self) -> None:
        for task in list(self._running):
            with suppress(Exception):  # the cluster is gone
                task.interrupt(force=True)
        self._running.clear()
        self._under_way.stop()

    async def _found(self, setup: Mapping[str, Any], seconds: float | None, held: Held | None) -> dict[str, Any]:
        """What `relayed` says of the call, there."""
        with self._executor.joined() as cluster:
            task = cluster.start(setup, self._resources)
            self._running.add(task)
            found = None
            try:
                await self._placed(task)
                async with deadline(None if seconds is None else seconds + _START_S + _END_S, held):
                    found = await task.next()
                return found
            except TimeoutError as error:  # neither it nor its relay has kept the deadline
                raise DeadlinePassed(seconds) from error
            finally:
                if found is None:
                    await task.end(_END_S)
                self._running.discard(task)

    async def _placed(self, task: RayTask) -> None:
        """Waits until it runs."""
        executor = self._executor
        limit = asyncio.timeout(executor.wait_s)
        try:
            async with limit:
                await task.next()
        except TimeoutError as error:
            if not limit.expired():
                raise
            try:
                what = await asyncio.to_thread(executor.cluster.shortage, self._resources)
            except TimeoutError as silent:
                what = f"a node of Ray ({silent})"
            held = "; agents of training, held until validation is over, keep what they have" if self._held_out else ""
            raise CallFailed(
                f"has waited {executor.wait_s:g} s (executor.wait_s) for {what}{held}; add nodes, ask for less, or let"
                " fewer run at a time (workers)"
            ) from error
        try:  # a node that has joined meanwhile
            await asyncio.to_thread(executor.check_reach)
        except (ValueError, OSError) as error:  # TimeoutError included
            raise CallFailed(f"cannot ask anything: {error}") from error
