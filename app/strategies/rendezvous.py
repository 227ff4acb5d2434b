"""Where the ranks of a torchrun job meet, again after every restart; and how a process leaves them.

torchrun's agents keep one store over restarts, in which gloo would find the addresses of processes that are dead. Here
rank 0 opens a store of its own and only leaves its address with the agents' store. Promises: a rank never joins a
store whose process is gone: it tries the address until one answers with the number that was left beside it.
"""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import time
import weakref
from datetime import timedelta

import torch.distributed as dist

from app.strategies.collectives import Communicator

_KEY = "arborist/rank-0"
_TRY = timedelta(seconds=5)


def started_by_agent() -> bool:
    """Whether torchrun started this process and keeps a store for it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not dist.is_initialized()


def fresh_store(rank: int, timeout: timedelta) -> dist.Store:
    """Collective over the processes torchrun started together: a store that nobody used before.

    Raises:
        RuntimeError: rank 0 could not be reached within `timeout`.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    if rank == 0:
        number = secrets.token_hex(8)
        own = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        own.set("number", number)
        agents.set(_KEY, f"{own.port} {number}")
        return own
    end = time.monotonic() + timeout.total_seconds()
    said = "nothing"
    while time.monotonic() < end:
        said = agents.get(_KEY).decode()
        port_text, number = said.split()
        try:
            own = dist.TCPStore(host, int(port_text), is_master=False, timeout=_TRY)
            if own.check(["number"]) and own.get("number").decode() == number:
                own.set_timeout(timeout)
                return own
        except RuntimeError:  # the address of a process that is gone: the new rank 0 has not written its own yet
            pass
        time.sleep(0.2)
    raise RuntimeError(
        f"rank {rank}: rank 0 could not be reached at {host} within {timeout.total_seconds():.0f} s (last known port"
        f" and number: {said}): look for the first error in its output"
    )


def leave_at_exit(communicator: Communicator) -> None:
    """Joins the transport's threads before the interpreter ends: gloo threads that let go of their last tensor during
    that end abort the process, after everything was done."""
    reference = weakref.ref(communicator)  # the threads end with the last reference to their group

    def leave() -> None:
        known = reference()
        if known is not None:
            known.group = None
        if dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()

    atexit.register(leave)
