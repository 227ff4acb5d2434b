"""What a worker process may see and take: its environment, and its share of the machine's memory."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

_SECRET = re.compile(
    r"(^|_)(KEYS?|KEY_ID|TOKENS?|AUTH|AUTH_SOCK|AUTH_CONFIG|BEARER|PASS|PASSPHRASE|PASSWD|PWD_FILE|CREDS?|PAT|DSN|PEM|JWT"
    r"|COOKIES?)(_?\d+)?$"
    r"|._PWD$|(DATABASE|DB|SQL|REDIS|MONGO|MONGODB|POSTGRES|AMQP|RABBITMQ|BROKER|WEBHOOK)_UR[IL]$"
    r"|._TOKEN_|ACCESS_?TOKEN|PRIVATE_?KEY|CONNECTION_?STRING|CREDENTIAL|SECRET|PASSWORD|API_?KEY",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # in a URL
_LEAST_BYTES = 10**9  # a reward that imports torch and a parser needs that much


def looks_secret(name: str, value: str = "") -> bool:
    """Whether an environment variable is one that workers do not get: by its name (keys, tokens, passwords, addresses
    of databases and the like), or since its value has a URL with a user's password in it."""
    return _SECRET.search(name) is not None or _LOGIN.search(value) is not None


def environment(keep: Sequence[str] = ()) -> dict[str, str]:
    """This process's environment without what looks like a secret.

    Args:
        keep: names of variables that stay all the same.
    """
    hidden = hidden_variables(keep)
    return {name: value for name, value in os.environ.items() if name not in hidden}


def hidden_variables(keep: Sequence[str] = ()) -> list[str]:
    """Names of this process's environment variables that `environment` leaves out."""
    return sorted(name for name, value in os.environ.items() if looks_secret(name, value) and name not in keep)


def memory_limit(memory_mb: float | None, workers: int) -> int:
    """Bytes that one of `workers` may hold: as given, in 10^6 bytes; else its share of a quarter of the machine's (or
    container's) memory, at least 10^9."""
    if memory_mb is not None:
        return int(memory_mb * 1e6)
    return max(_LEAST_BYTES, _memory() // 4 // workers)


def _memory() -> int:
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups, version 2 and 1
        try:
            found.append(int(Path("/sys/fs/cgroup", name).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(found)
