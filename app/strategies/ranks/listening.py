"""Where ranks listen for each other, and nowhere else.

torch's stores and gloo listen on whatever the machine has and ask nobody who they are; whoever reaches them can
read, write and end a run. Promises: ranks that share one machine meet on loopback, whatever the machine calls itself;
ranks on several listen on the main address they were given, and a store that cannot (no address of this machine, as
behind a proxy) says that it listens everywhere.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_GLOO = "GLOO_SOCKET_IFNAME"
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def open_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """The store of rank 0, on `address` and a free port where `port` is 0. (Left alone, a `TCPStore` listens on all
    interfaces, whatever host it is told.)

    Raises:
        OSError: the port is taken.
    """
    listener = listen(address, port)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket of rank 0, on `address` and a free port where `port` is 0.

    Raises:
        OSError: the port is taken.
    """
    for family, *_, target in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        if _is_loopback(str(target[0])) and not is_local(address):
            continue  # Debian's 127.0.1.1 for the machine's own name: no other machine could come in
        try:
            return socket.create_server((target[0], port), family=family)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise OSError(
                    f"rank 0 cannot listen at {address}, port {port}: {error.strerror}; choose another MASTER_PORT"
                ) from error
    sys.stderr.write(
        f"warning: {address}, where the ranks meet, is no address of this machine: rank 0 listens on all interfaces;"
        " keep strangers out of this network, or give an address of this machine as MASTER_ADDR\n"
    )
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def is_local(address: str) -> bool:
    """Whether only this machine can be meant."""
    return address == "localhost" or _is_loopback(address)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:  # a name
        return False


@contextmanager
def gloo_on_loopback(wanted: bool) -> Iterator[None]:
    """Process groups made inside listen on loopback, when `wanted`; otherwise, or when GLOO_SOCKET_IFNAME is set, where
    that or the machine's name says, as gloo does. Processes started later do not inherit it."""
    interface = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if not wanted or interface is None or _GLOO in os.environ:
        yield
        return
    os.environ[_GLOO] = interface
    try:
        yield
    finally:
        del os.environ[_GLOO]
