"""Functions that look for what they need in environment variables. Cheap to import: worker processes do it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any


class InEnvironment:
    """Calls `function` in a worker process, one call at a time, with environment variables of this call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, variables: Mapping[str, str], *args: Any) -> Any:
        os.environ.update(variables)
        return self._function(*args)
