"""A file system without hard links."""

from __future__ import annotations

import errno
from typing import Any


def without_links(*_: Any) -> None:
    """In place of `os.link`: refuses, as vfat does."""
    raise PermissionError(errno.EPERM, "Operation not permitted")
