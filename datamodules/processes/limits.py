"""What a worker process may see and take: its environment, and its share of the machine's memory."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

_SECRET = re.compile(
    r"(^|_)(KEYS?|KEY_ID|AUTH_SOCK|AUTH_CONFIG|PWD_FILE)$"
    r"|(^|_)(TOKENS?|AUTH|BEARER|PASSPHRASE|PASSWD|CREDS?|PAT|DSN|PEM|JWT|COOKIES?)(_?\d+)?$"
    # Of somebody or some service: others count passes, or are one of them.
    r"|(^|_)(ADMIN|AMQP|API|APP|AUTH|CERT|DATABASE|DB|DOCKER|E?MAIL|S?FTP|GIT|HTTPS?|IMAP|KEY|LDAP|LOGIN|MONGO(DB)?|MYSQL|PG"
    r"|POSTGRES|PROXY|RABBITMQ|REDIS|REGISTRY|ROOT|SERVICE|SMTP|SQL|SSH|SUDO|USER|VAULT|VPN|WIFI)_?PASS(_?\d+)?$|^PASS$"
    r"|(ACCESS|ACCOUNT|DEPLOY|ENCRYPTION|MASTER|SIGNING|SSH|STORAGE)_?KEY_?\d+$"
    r"|._PWD$|(DATABASE|DB|SQL|REDIS|MONGO|MONGODB|POSTGRES|AMQP|RABBITMQ|BROKER|WEBHOOK)_UR[IL]$"
    r"|._TOKEN_(?!(IDS?|LEN|LENGTH|LIMIT|RATIO|COUNT|BUDGET|FILE|PATH)$)"
    r"|ACCESS_?TOKEN|PRIVATE_?KEY|CONNECTION_?STRING|CREDENTIAL|SECRET|PASSWORD|API_?KEY",
    re.IGNORECASE,
)
_OF_TEXT = re.compile(
    r"(^|_)((MAX|MIN|NUM|N|TOTAL)(_(NUM|NEW|BATCHED|INPUT|OUTPUT|PROMPT|COMPLETION|CONTEXT|GENERATED|REASONING|RESPONSE"
    r"|THINKING|TOTAL))*_TOKENS|(PAD|BOS|EOS|UNK|SEP|CLS|MASK)_TOKEN)$",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # in a URL
_LEAST_BYTES = 10**9  # a reward that imports torch and a parser needs that much


def looks_secret(name: str, value: str = "") -> bool:
    """Whether an environment variable is one that workers do not get: by its name (keys, tokens, passwords, addresses
    of databases and the like), or since its value has a URL with a user's password in it. Counts of a text's tokens
    (`MAX_TOKENS`, `MAX_OUTPUT_TOKENS`) and a tokenizer's own (`PAD_TOKEN`) are none; whatever else ends so is."""
    return _SECRET.search(_OF_TEXT.sub("", name)) is not None or _LOGIN.search(value) is not None


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


def tell_hidden(log: logging.Logger, who: str, option: str, keep: Sequence[str] = ()) -> None:
    """Logs what `who` does not see; as a warning where a proxy is among it, without which the network may be gone.

    Args:
        option: by which variables are kept.
        keep: as in `environment`.
    """
    if hidden := hidden_variables(keep):
        proxies = any(name.upper().endswith("_PROXY") for name in hidden)
        told = "%s do not see %s, which look like secrets; %s names those that they need"
        log.log(logging.WARNING if proxies else logging.INFO, told, who, ", ".join(hidden), option)


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
