"""Which machine this is, as far as process numbers go.

Promises: two processes that are told the same can ask the system for each other by number. Hostnames do not say that:
machines made of one image share them, and containers count processes of their own.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path


def this_machine() -> str:
    """The kernel's start and the namespace of process numbers; the host's name where a system tells neither."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
