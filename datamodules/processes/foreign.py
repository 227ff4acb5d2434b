"""What code that is not ours raises and hands over: workflows, tools, rewards.

Promises: an error is told in a text that is short and that any file can hold; a cancellation that was asked for is told
from one that such code raised by itself; metadata that come through here can be written as JSON. Cheap to import:
reward workers do it.
"""

from __future__ import annotations

import asyncio
import sysconfig
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from app.text import well_formed

MOST_SAID = 2000  # characters of an error's text that are kept
_MOST_NESTED = 50
_NOT_USERS = (
    *(Path(__file__).resolve().parents[2] / name for name in ("app", "callbacks", "datamodules", "modules")),
    # No more of Python's: users' code may be below its prefix, in /usr/src/app say.
    *(Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib")),
)


def described(error: BaseException) -> str:
    """Type and text of an error, at most `MOST_SAID` characters and well-formed."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException:  # an error's own __str__ is not ours either
        text = ""
    said = f"{name}: {text[: MOST_SAID + 1]}" if text else name
    return well_formed(said if len(said) <= MOST_SAID else f"{said[: MOST_SAID - 3]}...")


def place(error: BaseException) -> str:
    """Where users' code raised `error`, as " at FILE:LINE"; "" where none of it is in the traceback."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):  # which reads no files
        if _is_users(frame):
            found = f" at {Path(frame.f_code.co_filename).name}:{line}"
    return well_formed(found)


def inside(frame: FrameType | None) -> str:
    """What of users' code a thread is inside of whose innermost frame this is: "NAME (FILE:LINE)" of what was called
    first, and behind " > " of what was called last; "" where none of it runs."""
    if frame is None:  # the thread has ended
        return ""
    stack = [(one, line) for one, line in traceback.walk_stack(frame) if _is_users(one)]
    said = [f"{one.f_code.co_qualname} ({one.f_code.co_filename}:{line})" for one, line in stack]
    return well_formed(" > ".join(dict.fromkeys([*said[-1:], *said[:1]])))


def _is_users(frame: FrameType) -> bool:
    file = Path(frame.f_code.co_filename)
    return file.is_absolute() and not any(file.is_relative_to(ours) for ours in _NOT_USERS)


def print_traceback(error: BaseException) -> None:
    """To standard error, from the first frame on that is not ours."""
    trace = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parent):
        trace = trace.tb_next
    with suppress(Exception):  # whose text, a foreign one, may not be had
        traceback.print_exception(type(error), error, trace or error.__traceback__)


def must_pass(error: BaseException) -> bool:
    """Whether `error` has to go on up: somebody asked this task to end, or its coroutine is being closed.

    Everything else that users' code raises is a failure of that code: SystemExit, KeyboardInterrupt (Ctrl-C reaches the
    main thread only) and a CancelledError that nobody asked for included.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, GeneratorExit)


def metadata(given: Any) -> dict[str, Any]:
    """A copy of a trajectory's metadata that JSON can hold, its texts well-formed.

    Values of types that JSON does not know stay as they are; they are written as text later.

    Raises:
        ValueError: no dictionary, a key that JSON cannot have, or more than 50 levels (a list that holds itself, say).
    """
    if not isinstance(given, dict):
        raise ValueError(f"metadata: must be a dictionary, this is a {type(given).__name__}")
    copied: dict[str, Any] = _plain(given, "metadata", 0)
    return copied


def _plain(value: Any, where: str, depth: int) -> Any:
    if isinstance(value, str):
        return well_formed(value)
    if depth > _MOST_NESTED:
        raise ValueError(f"{where[:200]}: nested more than {_MOST_NESTED} levels deep")
    if isinstance(value, dict):
        found = {}
        for key, one in value.items():
            if not isinstance(key, str | int | float | bool | None):
                said = well_formed(repr(key))[:200]
                raise ValueError(
                    f"{where}: its key {said} is a {type(key).__name__}, which JSON cannot have as a key; use text"
                )
            found[well_formed(key) if isinstance(key, str) else key] = _plain(one, f"{where}[{key!r}]", depth + 1)
        return found
    if isinstance(value, list | tuple):
        return [_plain(one, where, depth + 1) for one in value]
    return value
