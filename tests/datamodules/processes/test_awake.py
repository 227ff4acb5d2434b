"""Deadlines of a process that was stopped for longer than they are."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from datamodules.inference.clock import PausedClock
from datamodules.processes import awake as awake_module
from datamodules.processes.deadline import deadline

_WAITS = """
import asyncio, time
from datamodules.processes.awake import awake
from datamodules.processes.deadline import deadline

async def waits(held):
    async with deadline(3.0, held):
        print("begun", flush=True)
        while not input_came.is_set():
            await asyncio.sleep(0.05)

async def main():
    reading = asyncio.get_running_loop().run_in_executor(None, input)
    reading.add_done_callback(lambda _: input_came.set())
    async with asyncio.TaskGroup() as group:
        group.create_task(waits(None))
        group.create_task(waits(lambda: 0.0))
    print("not counted", awake() - began < time.monotonic() - really - 5.0, flush=True)

input_came = asyncio.Event()
began, really = awake(), time.monotonic()
asyncio.run(main())
"""


def test_nothing_is_late_for_a_process_that_was_stopped() -> None:
    """As by Ctrl-Z, or by a scheduler that suspends a job."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "begun\n"
        time.sleep(1.0)  # it has looked at the time
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(8.0)
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and rest.split("\n")[-2] == "not counted True", rest


class Moved:
    """Time that a test need not live through."""

    def __init__(self) -> None:
        self.by_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.by_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def test_what_passes_unseen_is_not_counted_and_what_is_seen_is(monkeypatch: pytest.MonkeyPatch) -> None:
    moved, clock = Moved(), awake_module._Clock()
    monkeypatch.setattr(awake_module, "time", moved)
    monkeypatch.setattr(awake_module, "_clock", clock)
    paused = PausedClock()
    began, before = awake_module.awake(), paused.now()
    moved.by_s = 600.0
    assert awake_module.awake() - began < 60.0 and paused.now() - before < 60.0
    assert 600.0 <= awake_module.stopped_s() < 660.0
    for seconds in range(1, 101):  # a busy process: it looks
        moved.by_s = 600.0 + seconds
        awake_module.awake()
    assert awake_module.awake() - began >= 100.0 and awake_module.stopped_s() < 660.0


def test_a_deadline_still_passes() -> None:
    async def waits() -> None:
        async with deadline(0.05):
            await asyncio.sleep(60.0)

    with pytest.raises(TimeoutError):
        asyncio.run(waits())
