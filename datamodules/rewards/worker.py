"""What runs in a reward worker process: one reward function, called in the process's main thread.

Promises: the worker is the head of a process group of its own (killing the group takes along whatever the reward
started), is deaf to Ctrl-C in the terminal, and ends when the process that started it does.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

from datamodules.prompts.base import Prompt
from datamodules.rewards.functions import Reward


def main(connection: Connection, pickled_reward: bytes) -> None:
    """Says ("ready", "") or ("error", why); then answers lists of pickled (prompt, completion), one by one.

    An answer is ("ok", (reward, parts)), ("exception", why) or ("nan", why).
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        reward = pickle.loads(pickled_reward)
    except BaseException as error:
        connection.send(("error", _describe(error)))
        return
    connection.send(("ready", ""))
    while True:
        try:
            jobs = connection.recv()
        except EOFError:
            return
        for job in jobs:
            connection.send(_answer(reward, job))


def _answer(reward: Callable[[Prompt, str], Reward], job: bytes) -> tuple[str, Any]:
    try:
        prompt, completion = pickle.loads(job)
        result = reward(prompt, completion)
        value, parts = result if isinstance(result, tuple) else (result, {})
        value, parts = float(value), {str(name): float(part) for name, part in parts.items()}
    except BaseException as error:  # SystemExit and time-outs that are no Exception included
        return "exception", f"raised {_describe(error)}"
    if not math.isfinite(value):
        return "nan", f"returned {value}"
    bad = next((name for name, part in parts.items() if not math.isfinite(part)), None)
    if bad is not None:
        return "nan", f"returned {parts[bad]} for its part '{bad}'"
    return "ok", (value, parts)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
