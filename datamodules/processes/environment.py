"""Functions that look for what they need in environment variables. Cheap to import: worker processes do it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any


class InEnvironment:
    """Calls `function` with environment variables of this call, in a worker process of its own (`once`): what an
    earlier call has made of them, clients or threads, would speak with its key or in this one's name."""

    is_for_people = True  # what it raises

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, variables: Mapping[str, str], *args: Any) -> Any:
        os.environ.update(variables)
        return self._function(*args)
