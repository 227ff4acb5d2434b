"""Files that appear whole, under names that nobody else has taken.

Promises: of several processes that publish under one name, one succeeds and the others are told; nothing is
overwritten.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def aside_of(path: Path) -> Path:
    """Where to write it first; of this process alone."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")


def publish(aside: Path, path: Path) -> None:
    """Gives a whole file its name. Raises FileExistsError: another file has it. OSError: the disk refuses it."""
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: the name is taken first, then what it stands for
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.replace(aside, path)
    else:
        aside.unlink()
