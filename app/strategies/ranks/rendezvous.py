"""Where ranks meet, under torchrun again after every restart; and how a process leaves them.

Rank 0 opens a store of its own, which listens where ranks need it and nowhere else (`listening.py`). torchrun's agents
keep one store over restarts, in which gloo would find the addresses of processes that are dead: with it rank 0 only
leaves the port of its own. Promises: a rank never joins a store whose process is gone: it tries the port until one
answers with the number that was left beside it.
"""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from app.strategies.ranks.collectives import Communicator
from app.strategies.ranks.listening import open_store
from app.strategies.ranks.watch import GRACE

_MEETING = timedelta(minutes=10)  # until every process of a job has started
_KEY = "arborist/rank-0"
_TRY = timedelta(seconds=5)


def join(
    cluster: ClusterEnvironment,
    address: str,
    backend: str,
    device: torch.device,
    timeout: timedelta,
    death_timeout: timedelta,
) -> None:
    """Collective over the processes of a job: makes the process group of all ranks.

    Args:
        address: where rank 0 is reached. timeout: of a collective. death_timeout: until a rank's death is known.

    Raises:
        RuntimeError: rank 0 could not be reached in time.
    """
    rank, size = cluster.global_rank(), cluster.world_size()
    # Nobody has to find a rank that is alone, and an earlier run of this process may still hold the port it had.
    store = meet(rank, address, cluster.main_port if size > 1 else 0, min(timeout, _MEETING))
    # NCCL's own watchdog aborts the process, with nothing said of who is missing: ours come first.
    later = timedelta() if backend == "gloo" else death_timeout + timedelta(seconds=3 * GRACE)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout + later,
        device_id=device if device.type != "cpu" else None,
    )


def meet(rank: int, address: str, port: int, timeout: timedelta) -> dist.Store:
    """Collective over the processes of a job: a store that nobody used before.

    Args:
        address: where rank 0 is reached. port: there, known to all; torchrun's agents use it themselves.

    Raises:
        RuntimeError: rank 0 could not be reached within `timeout`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _meet_beside_agents(rank, address, timeout)
    if rank == 0:
        return open_store(address, port, timeout)
    return dist.TCPStore(address, port, is_master=False, timeout=timeout)


def _meet_beside_agents(rank: int, address: str, timeout: timedelta) -> dist.Store:
    agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    if rank == 0:
        number = secrets.token_hex(8)
        own = open_store(address, 0, timeout)
        own.set("number", number)
        agents.set(_KEY, f"{own.port} {number}")
        return own
    end = time.monotonic() + timeout.total_seconds()
    said = "nothing"
    while time.monotonic() < end:
        said = agents.get(_KEY).decode()
        port_text, number = said.split()
        try:
            own = dist.TCPStore(address, int(port_text), is_master=False, timeout=_TRY)
            if own.check(["number"]) and own.get("number").decode() == number:
                own.set_timeout(timeout)
                return own
        except RuntimeError:  # the address of a process that is gone: the new rank 0 has not written its own yet
            pass
        time.sleep(0.2)
    raise RuntimeError(
        f"rank {rank}: rank 0 could not be reached at {address} within {timeout.total_seconds():.0f} s (last known port"
        f" and number: {said}): look for the first error in its output"
    )


def leave_at_exit(communicator: Communicator) -> None:
    """Joins the transport's threads before the interpreter ends: gloo threads that let go of their last tensor during
    that end abort the process, after everything was done."""
    reference = weakref.ref(communicator)  # the threads end with the last reference to their group

    def leave() -> None:
        known = reference()
        if known is not None:
            known.group = known.control = None
        if dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()

    atexit.register(leave)
