"""Does a server run on this host, with the shared memory that this process has? The table of processes says.

An address does not: behind one of loopback may be a tunnel, or a container with a /dev/shm of its own. And it cannot be
tried, for SGLang 0.5.21 ends when it cannot open what it is told to read (`Scheduler.update_weights_from_tensor`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from datamodules.inference.sglang.weights.update_group import OwnFault

SHARED_MEMORY = Path("/dev/shm")
REMEDY = "set WeightSync.method: distributed (or disk)"
_SCHEDULER = "sglang::scheduler"  # SGLang calls its processes so; they load the weights
_EVERY = ("0.0.0.0", "::")


def find(url: str) -> psutil.Process:
    """The process that listens at `url`, of a server that can read what we put into shared memory.

    Raises:
        OwnFault: there is none, with what is in the way and the remedy.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = _own_addresses(parts.hostname or "", port)
    if not addresses:
        raise _refused(url, "it is on another host")
    for pid in sorted(_listeners(addresses, port)):
        try:
            process = psutil.Process(pid)
            if not any(_is_scheduler(child) for child in process.children()):  # a proxy may have servers below it
                continue
            if process.uids().effective not in (os.geteuid(), 0):
                raise _refused(url, "it is another user's, who may not read our memory")
            theirs, ours = os.stat(f"/proc/{pid}/root{SHARED_MEMORY}"), SHARED_MEMORY.stat()
            if (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino):
                raise _refused(url, f"it has another {SHARED_MEMORY}: it runs in another container")
            return process
        except (psutil.Error, OSError):
            continue  # it has just ended, or is not ours to look at
    raise _refused(
        url, "no SGLang server of this user listens there (a tunnel to another host, a proxy, or another container?)"
    )


def sees_our_gpus(server: psutil.Process) -> bool:
    """Whether it was started with the GPUs that this process was."""
    name = "CUDA_VISIBLE_DEVICES"
    try:
        return server.environ().get(name) == os.environ.get(name)
    except (psutil.Error, OSError):
        return False


def _own_addresses(host: str, port: int) -> set[str]:
    """Those of its addresses that are this host's."""
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)}
    except OSError as error:
        raise _refused(host, f"no address is known ({error})") from error
    own = {one.address.split("%")[0] for interface in psutil.net_if_addrs().values() for one in interface}
    return {one for one in found if one in own or ipaddress.ip_address(one.split("%")[0]).is_loopback}


def _listeners(addresses: set[str], port: int) -> set[int]:
    """Processes that a connection comes to: those that listen at the very address go before those at every one."""
    found = [
        one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    ]
    there = [one for one in found if one.laddr.ip in addresses] or [one for one in found if one.laddr.ip in _EVERY]
    return {one.pid for one in there if one.pid is not None}


def _is_scheduler(process: psutil.Process) -> bool:
    try:
        return "".join(process.cmdline()[:1]).startswith(_SCHEDULER)
    except psutil.Error:  # it has just ended
        return False


def _refused(url: str, reason: str) -> OwnFault:
    return OwnFault(
        f"WeightSync.method: tensor brings weights to servers on this host alone, and of {url} {reason}; {REMEDY}"
    )
