"""Ports for servers that are started later, or again: of those that the system gives to nobody by itself.

A port that was free a moment ago, as port 0 gives it, may be a connection's of another test by then.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Where nobody listens on loopback. Raises OSError when a hundred drawn ones are taken."""
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768
    for _ in range(100):
        port = random.SystemRandom().randrange(max(10_000, first - 20_000), first) if first > 11_000 else 0
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(listener.getsockname()[1])
    raise OSError("no free port was found")
