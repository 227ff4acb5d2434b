"""A Ray cluster, and calls as tasks of it. The one file that imports Ray.

Promises: this process's signal handlers, loggers and standard streams stay as they are; every wait has a deadline. A
task is a call behind a relay, so that whatever it started ends on its node however the task ends. What a call is given
travels as the task's argument: it stands in no name, command line, environment or runtime environment of Ray's, and so
in none of its logs. Ray repeats no task by itself: a second run would be given the first one's session.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray import exceptions

from datamodules.processes.calls import CallFailed, Lost
from datamodules.processes.foreign import described
from datamodules.processes.relay import relayed

_T = TypeVar("_T")
_CONNECT_S = 60.0
_ASK_S = 10.0
_STORE_BYTES = 80_000_000  # of a cluster of our own; Ray takes a third of the memory otherwise
_MOST_SHOWN = 500  # characters of an error of Ray's
_LOST = (
    exceptions.WorkerCrashedError,  # nothing foreign runs in a worker of Ray's: its node ended it
    exceptions.NodeDiedError,
    exceptions.LocalRayletDiedError,
    exceptions.OutOfMemoryError,  # of the node: the call has a limit of its own
    exceptions.ObjectLostError,  # the result, with the node that had it
)


class RayCluster:
    """This process's connection, until `close`.

    Args:
        address: of the cluster's head, as host:port; "auto" for the one that this machine is part of, or that
            RAY_ADDRESS names; None to start one on this machine alone, which ends with the connection.
        runtime_env: of Ray, for the tasks of this connection.

    To be made in the main thread, which alone can give SIGTERM back to Python, and by which runs are told to end.

    Raises:
        ValueError: there is no such cluster, or this process has joined one already.
    """

    def __init__(self, address: str | None, runtime_env: Mapping[str, Any] | None = None) -> None:
        self._is_ours = not ray.is_initialized()
        self._task = ray.remote(
            on_node
        )  # once: Ray keeps what each of them says of the function until the cluster ends
        if not self._is_ours:
            if runtime_env:
                raise ValueError("runtime_env has no effect where Ray runs in this process already; remove it")
            return
        options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
        options["runtime_env"] = dict(runtime_env or {})
        with _own_sigterm():
            try:
                if address is None:
                    options |= {"address": "local", "include_dashboard": False, "object_store_memory": _STORE_BYTES}
                    ray.init(**options)  # here: Ray's processes end with the thread that has started them
                    return
                if address != "auto":  # Ray would look for a minute for what is not there
                    host, _, port = address.rpartition(":")
                    socket.create_connection((host.strip("[]"), int(port)), _ASK_S).close()
                _beside(lambda: ray.init(**options), _CONNECT_S, "joining it")
            except Exception as error:
                raise ValueError(
                    f"address: {address!r} is no Ray cluster that can be joined ({described(error)[:_MOST_SHOWN]});"
                    " start one with `ray start --head`, and join it on the other machines with `ray start --address`"
                ) from error

    def close(self) -> None:
        """Leaves the cluster; what still runs for this process ends."""
        if self._is_ours:
            _beside(ray.shutdown, _CONNECT_S, "leaving Ray")

    def strangers(self, host: str) -> list[str]:
        """Addresses of nodes on other machines, where these cannot reach `host`, an interface of this one."""
        found = {str(one[4][0]).partition("%")[0] for one in socket.getaddrinfo(host, None)}
        if not any((one := ipaddress.ip_address(each)).is_loopback or one.is_unspecified for each in found):
            return []
        return sorted({node["NodeManagerAddress"] for node in self._nodes()} - {self._here()})

    def start(self, setup: Mapping[str, Any], resources: Mapping[str, float]) -> RayTask:
        """Asks for a task.

        Args:
            setup: of `relayed`.
            resources: that it has for itself: "CPU", "GPU", "memory" (bytes), and those that nodes were given by name.
        """
        named = {name: value for name, value in resources.items() if name not in ("CPU", "GPU", "memory")}
        task = self._task.options(
            num_cpus=resources.get("CPU", 0.0),
            num_gpus=resources.get("GPU", 0.0),
            memory=int(resources["memory"]) if "memory" in resources else None,
            resources=named,
            max_retries=0,
            name="arborist agent",
            scheduling_strategy="SPREAD",  # Ray would fill this machine first, which trains
        )
        return RayTask(task.remote(dict(setup)))

    def shortage(self, resources: Mapping[str, float]) -> str:
        """What is wanted of a node, and what nodes have."""
        nodes = self._nodes()
        fit = [node for node in nodes if all(node["Resources"].get(name, 0) >= resources[name] for name in resources)]
        free = _beside(ray.available_resources, _ASK_S, "asking Ray for its resources")
        wanted = ", ".join(f"{name} {value:g}" for name, value in resources.items() if value) or "nothing"
        has = [
            ", ".join(f"{name} {node['Resources'].get(name, 0):g}" for name in resources if resources[name])
            for node in nodes
        ]
        left = ", ".join(f"{name} {free.get(name, 0):g}" for name in resources if resources[name])
        where = "no node has so much" if not fit else f"free in all: {left}"
        if fit and all(free.get(name, 0) >= resources[name] for name in resources):
            where += "; where none of it is used, nodes and this machine have different tokens: `ray get-auth-token`"
        return f"a node with {wanted} ({where}; nodes: {'; '.join(has)})"

    def _nodes(self) -> list[dict[str, Any]]:
        found = _beside(ray.nodes, _ASK_S, "asking Ray for its nodes")
        return [node for node in found if node["Alive"]]

    def _here(self) -> str:
        mine = ray.get_runtime_context().get_node_id()
        return next((str(node["NodeManagerAddress"]) for node in self._nodes() if node["NodeID"] == mine), "")


class RayTask:
    """A call that waits for a node, runs, or has run: what `on_node` says, one after the other."""

    def __init__(self, said: Any) -> None:
        self._said = said

    async def next(self) -> dict[str, Any]:
        """What it says next: its place, then its result. Raises Lost: with its node. CallFailed: it was cancelled, or
        Ray cannot run it."""
        if not ray.is_initialized():  # Ray's C++ would end this process
            raise CallFailed("was cancelled: Ray has been left")
        try:
            found: dict[str, Any] = await (await anext(self._said))
        except _LOST as error:
            raise Lost(f"was lost with its node ({_in_short(error)})") from error
        except StopAsyncIteration:
            raise Lost("was lost: Ray has nothing of it") from None
        except exceptions.TaskCancelledError as error:
            raise CallFailed("was cancelled") from error
        except exceptions.RayError as error:
            raise CallFailed(
                f"cannot be run by Ray: {_in_short(error)}; its nodes need this checkout and the agent where they are"
                " here, or a runtime_env with a working_dir"
            ) from error
        if found.get("status") == "lost":  # its worker was quicker to say so than to end
            raise Lost(f"was lost with its node ({found['content']})")
        return found

    async def end(self, seconds: float) -> None:
        """Ends it and what it started, within so many seconds; kills its worker where that has not ended it."""
        self.interrupt()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await self.next()
        except CallFailed:  # cancelled, or over before
            return
        except TimeoutError:
            self.interrupt(force=True)

    def interrupt(self, force: bool = False) -> None:
        """Has it end, and does not wait for that. Forced, its worker ends at once, and the relay ends the rest.
        Where Ray has been left it has ended already."""
        if ray.is_initialized():  # Ray would start a cluster to cancel it in
            ray.cancel(self._said, force=force)


def on_node(setup: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The task: says where it runs once it does, then what became of the call. Runs in a worker of Ray's."""
    yield {"address": ray.util.get_node_ip_address()}
    yield relayed(setup)  # which Ray does not take of a task that was cancelled


def _beside(work: Callable[[], _T], seconds: float, what: str) -> _T:
    """In a thread of its own, with a deadline that Ray does not have."""
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="ray").start()
    try:
        return done.result(seconds)
    except TimeoutError:
        if done.done():
            raise
        raise TimeoutError(f"{what}: not over after {seconds:g} s") from None


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Gives SIGTERM back to Python. Ray's C++ would hear it first, and abort the process three seconds later."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _in_short(error: BaseException) -> str:
    if isinstance(error, exceptions.RayTaskError) and isinstance(error.cause, Exception):
        return described(error.cause)[:_MOST_SHOWN]  # without the traceback
    return " ".join(described(error).split())[:_MOST_SHOWN]
