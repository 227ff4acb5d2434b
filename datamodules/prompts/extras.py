"""Libraries that only some sources need. Promise: one that is missing is named, with the command that installs it."""

from __future__ import annotations

from importlib.util import find_spec


def needs(module: str, extra: str, owner: str) -> None:
    """Raises ImportError when `module` is not installed. `extra`: of this project. `owner`: who needs it."""
    if find_spec(module) is None:
        raise ImportError(f"{owner} needs the library {module}, which is not installed: pip install -e '.[{extra}]'")
