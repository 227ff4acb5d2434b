"""Calls on threads that never return cost nobody but themselves."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import pytest

from app.batch import Trajectory
from datamodules.pipeline.threads import DaemonThreads
from datamodules.prompts import Prompt
from datamodules.workflows import EpisodeEngine
from tests.datamodules.pipeline.producers import Build, Collecting, Flow, ids, skip, wait_until

_HANGS = """
import asyncio, threading
from datamodules.pipeline.threads import DaemonThreads

async def main():
    asyncio.get_running_loop().set_default_executor(DaemonThreads(2, "call"))
    try:
        async with asyncio.timeout(0.1):
            await asyncio.to_thread(threading.Event().wait)
    except TimeoutError:
        print("given up", flush=True)

asyncio.run(main())
print("over", flush=True)
"""


def test_a_process_ends_whatever_its_calls_do() -> None:
    done = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and done.stdout.split("\n")[:2] == ["given up", "over"], done.stderr
    assert "left behind: 1, of threading.Event.wait; give them deadlines of their own" in done.stderr


def test_a_run_ends_whatever_its_calls_do(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    class Stuck(Flow):
        async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
            if prompt.id == "p0":
                await asyncio.to_thread(release.wait)
            return await super().run(engine, prompt)

    try:
        producer = build(workflow=Stuck(), episode_deadline_s=60.0)
        trainer = Collecting(producer)
        wait_until(lambda: producer.stream.ready == 1)
        skip(producer, 60.0)
        trainer.done()
        assert ids(trainer.groups) == ["p1", "p2"]
        thread = producer.thread
        assert thread is not None
        producer.close()
        assert not thread.is_alive() and "did not end within" not in caplog.text
        assert "calls on threads (asyncio.to_thread) that have not returned are left behind: 3, of" in caplog.text
    finally:
        release.set()


def test_calls_that_were_given_up_take_no_place() -> None:
    threads, release = DaemonThreads(2, "call"), threading.Event()
    stuck = [threads.submit(release.wait) for _ in range(2)]
    later: Future[int] = threads.submit(lambda: 1)
    time.sleep(0.05)
    assert not later.running() and not later.done()
    assert not stuck[0].cancel()  # it runs
    assert later.result(60.0) == 1
    release.set()
    assert [one.result(60.0) for one in stuck] == [True, True]
    threads.shutdown()


def test_calls_give_back_what_they_return_and_raise() -> None:
    async def main() -> list[object]:
        asyncio.get_running_loop().set_default_executor(DaemonThreads(3, "call"))
        return await asyncio.gather(
            *(asyncio.to_thread(divmod, 7, k) for k in range(20)),
            asyncio.to_thread(lambda: threading.current_thread().daemon),
            return_exceptions=True,
        )

    found = asyncio.run(main())
    assert isinstance(found[0], ZeroDivisionError) and found[1:20] == [divmod(7, k) for k in range(1, 20)]
    assert found[20] is True
    wait_until(lambda: not any(one.name == "call" for one in threading.enumerate()))


def test_what_waits_is_cancelled_at_the_end() -> None:
    threads, release = DaemonThreads(1, "call"), threading.Event()
    first, second = threads.submit(release.wait), threads.submit(release.wait)
    threads.shutdown()
    assert second.cancelled() and not first.done()
    with pytest.raises(RuntimeError, match="no new calls on threads"):
        threads.submit(print)
    release.set()
    assert first.result(60.0)
