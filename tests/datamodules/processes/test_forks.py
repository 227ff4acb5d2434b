"""Processes that are forked: as those that begin by themselves, and quicker."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from datamodules.processes import nursery
from datamodules.processes.calls import CallFailed, ProcessCalls
from datamodules.processes.forks import Forks
from datamodules.processes.nursery import Nursery
from datamodules.workflows.gateway.agents import PACKAGES, VARIABLES, Door
from tests.datamodules.processes.forked import drawn, leaves_sleepers_and_kills, loaded, seen, takes, terminates_a_child
from tests.datamodules.processes.test_processes import ROOT, gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")
SECONDS = 60.0


def forked(function: Any, forks: Forks | None = None, workers: int = 2, **options: Any) -> ProcessCalls:
    return ProcessCalls({"f": function}, workers, once=True, forks=forks or Forks({}, ()), **options)


async def call(calls: ProcessCalls, *args: Any) -> Any:
    return await calls.call("f", args, {}, SECONDS)


def test_a_fork_is_what_a_program_of_its_own_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAKEN_AWAY", "1")

    async def run() -> list[dict[str, Any]]:
        forks = Forks({"wave": ["wave"]}, ("MADE_UP",), ours=("datamodules.prompts",))
        calls = [ProcessCalls({"f": seen}, 2, once=True), forked(seen, forks)]
        try:
            await call(calls[1])  # from here on there is a nursery
            monkeypatch.delenv("TAKEN_AWAY")
            monkeypatch.setenv("COME_LATE", "1")
            monkeypatch.chdir(tmp_path)
            return [await call(one, "wave", "datamodules.prompts") for one in (*calls, calls[1])]
        finally:
            for one in calls:
                one.stop()

    alone, first, second = asyncio.run(run())
    assert (alone.pop("loaded"), first.pop("loaded"), second.pop("loaded")) == ([False] * 2, [True] * 2, [True] * 2)
    assert first.pop("inherited") == second.pop("inherited") == []
    del alone["inherited"]
    assert alone == first == second
    assert alone["environment"]["COME_LATE"] == "1" and "TAKEN_AWAY" not in alone["environment"]


def test_forks_draw_numbers_of_their_own() -> None:
    async def run() -> list[list[float]]:
        calls = forked(drawn, Forks({"numpy": ["numpy.random"]}, ()))
        try:
            return [await call(calls) for _ in range(3)]
        finally:
            calls.stop()

    found = asyncio.run(run())
    assert len({one for one, _ in found}) == len({other for _, other in found}) == 3


@pytest.mark.parametrize("forks", [None, Forks({}, ())], ids=["alone", "forked"])
def test_children_of_a_function_end_at_a_signal(forks: Forks | None) -> None:
    async def run() -> int:
        calls = ProcessCalls({"f": terminates_a_child}, 2, once=True, forks=forks)
        try:
            return await call(calls)
        finally:
            calls.stop()

    assert asyncio.run(run()) == signal.SIGTERM


MANY = """
import asyncio, os, resource
from datamodules.processes.calls import ProcessCalls
from datamodules.processes.forks import Forks

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(2000, hard), hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]

async def main():
    for forks in (None, Forks({}, ())):
        calls = ProcessCalls({"f": abs}, 2, once=True, forks=forks)
        print(await calls.call("f", (-1,), {}, 60.0))
        calls.stop()

asyncio.run(main())
"""


def test_a_trainer_may_hold_thousands_of_descriptors() -> None:
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", MANY], env=given, capture_output=True, text=True, timeout=500)
    assert (done.stdout, done.stderr) == ("1\n1\n", "")


def test_what_forks_print_is_their_own(tmp_path: Path) -> None:
    async def run() -> None:
        calls = forked(print)
        calls.logs = tmp_path
        try:
            await asyncio.gather(*(call(calls, f"number {k}") for k in range(4)))
        finally:
            calls.stop()

    asyncio.run(run())
    printed = "".join(path.read_text() for path in tmp_path.glob("?.log"))
    assert sorted(printed.splitlines()) == [f"number {k}" for k in range(4)]
    assert (tmp_path / "imports.log").read_text() == ""


UNFIT = {
    "threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n",
    "processes": "import subprocess\nleft = subprocess.Popen(['sleep', '1000'])\n",
    "open": "import socket\nleft = socket.socketpair()\n",
    "MADE_UP": "import os\nvalue = os.environ.get('MADE_UP')\n",
    "all environment": "import os\nvalue = dict(os.environ)\n",
    "a_module_of_users": "import a_module_of_users\n",
}


@pytest.fixture
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of this content."""
    name, folder = "a_package_of_tests", tmp_path / "site-packages"
    folder.mkdir()
    (folder / f"{name}.py").write_text(request.param)
    (tmp_path / "a_module_of_users.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(folder)
    return name


@pytest.mark.parametrize(("package", "why"), [(text, why) for why, text in UNFIT.items()], indirect=["package"])
def test_a_package_that_cannot_be_shared_is_left_to_the_forks(
    package: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> list[bool]:
        calls = forked(loaded, Forks({"wave": ["wave"], package: [package]}, ("MADE_UP",)))
        try:
            return await call(calls, package, "wave")
        finally:
            calls.stop()

    with caplog.at_level(logging.INFO, "datamodules.processes.forks"):
        assert asyncio.run(run()) == [False, True]  # forked all the same
    assert package in caplog.text and why in caplog.text and "programs of their own" not in caplog.text


@pytest.mark.parametrize(
    ("package", "is_there"),
    [("import a_module_of_users\n", True), ("import os\nos.environ.get('MADE_UP')\n", False)],
    indirect=["package"],
)
def test_what_is_asked_for_is_imported_though_it_is_the_users(
    package: str, is_there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> list[bool]:
        calls = forked(loaded, Forks({"wave": ["wave"]}, ("MADE_UP",), (package, "a_module_of_users")))
        try:
            return await call(calls, package, "a_module_of_users", "wave")
        finally:
            calls.stop()

    assert asyncio.run(run()) == [is_there, True, True]
    assert (f"import {package} each for itself" in caplog.text) == (not is_there)  # a warning, where it was asked for


def test_a_users_module_of_a_packages_name_is_imported_by_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "camel.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    async def run() -> list[bool]:
        calls = forked(loaded, Forks({"camel": ["camel"], "wave": ["wave"]}, ()))
        try:
            return await call(calls, "camel", "wave")
        finally:
            calls.stop()

    assert asyncio.run(run()) == [False, True]


def test_sessions_set_no_variable_that_imports_may_look_at() -> None:
    door = Door("http://host/session", "key", asyncio.Event(), lambda: 0.0)
    assert door.variables.keys() <= set(VARIABLES)


@pytest.mark.parametrize("package", ["raise RuntimeError('no key')\n"], indirect=True)
def test_a_package_that_cannot_be_imported_is_met_by_the_forks(package: str) -> None:
    async def run() -> Any:
        calls = forked(importlib.import_module, Forks({"wave": ["wave"], package: [package]}, ()))
        try:
            with pytest.raises(CallFailed, match="no key"):
                await call(calls, package)
        finally:
            calls.stop()

    asyncio.run(run())


USERS = {
    "solver_of_tests": "import httpx\nimport os.path\nfrom agents import Answer\nimport camel.inner_of_tests\n"
    "class Lazy:\n    def __getattribute__(self, name): raise RuntimeError('no key')\n"
    "client = Lazy()\n"
    "def solve(task): from anthropic import Anthropic\n"
    "class Solver:\n    def __call__(self, task): pass\n",
    "agents": "from pydantic import BaseModel\nfrom tests.datamodules.processes import forked\n"
    "class Answer(BaseModel): pass\n",
    "camel/inner_of_tests": "from openai import OpenAI\n",
}
"""A user's modules, two of them called like packages that agents are written with."""


def test_what_an_agent_is_written_with_is_found_by_its_modules(tmp_path: Path) -> None:
    (tmp_path / "camel").mkdir()
    for name, text in USERS.items():
        (tmp_path / f"{name}.py").write_text(text)
    look = (
        "import functools, json, solver_of_tests as s\n"
        "from datamodules.processes.forks import modules_of\n"
        "given = (s.solve, s.Solver(), functools.partial(s.solve, 1), functools.wraps(s.solve)(lambda task: None))\n"
        "names = ('agents', 'anthropic', 'camel', 'httpx', 'openai', 'pydantic')\n"
        "print(json.dumps([modules_of(one, names) for one in given]))"
    )
    given = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", look], env=given, capture_output=True, text=True, timeout=SECONDS)
    found = json.loads(done.stdout or done.stderr)
    for one in found:
        assert one.keys() == {"httpx", "openai", "pydantic"}
        assert {"httpx", "httpx._client"} <= set(one["httpx"])
        assert all(name.split(".")[0] == package for package, names in one.items() for name in names)


INSTALLED = sorted(one for one in PACKAGES if importlib.util.find_spec(one.partition(".")[0]) is not None)


@pytest.mark.parametrize("package", INSTALLED)
def test_packages_that_agents_are_written_with_can_be_shared(package: str) -> None:
    async def run() -> None:
        one = Nursery([package, *PACKAGES[package]], VARIABLES)
        try:
            await one.ready(SECONDS)
        finally:
            one.kill()

    asyncio.run(run())


@pytest.mark.parametrize(
    "what, lived_s, told",
    [("guardian", 600.0, ""), ("nursery", 600.0, "programs of their own"), ("nursery", 0.0, "another takes its place")],
)
def test_nothing_outlives_what_is_killed(
    tmp_path: Path, what: str, lived_s: float, told: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    path = tmp_path / "pids"
    monkeypatch.setattr("datamodules.processes.forks._LIVED_S", lived_s)

    async def run() -> None:
        forks = Forks({}, ())
        calls = ProcessCalls({"f": leaves_sleepers_and_kills, "g": abs}, 2, once=True, forks=forks)
        try:
            with pytest.raises(CallFailed, match="its process"):
                await call(calls, str(path), what)
            assert gone(json.loads(path.read_text())) == []
            assert await calls.call("g", (-3,), {}, SECONDS) == 3
            assert (await forks.starter((), None) is None) == (told == "programs of their own")
        finally:
            calls.stop()

    asyncio.run(run())
    assert [told] * bool(told) == [
        one for one in ("programs of their own", "another takes its place") if one in caplog.text
    ]
    assert _left() == []


def _left() -> list[psutil.Process]:
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended, and its parent has yet to take leave of it
            if "guardian.py" in " ".join(one.cmdline()):
                found.append(one)
    return found


def test_forks_that_are_stopped_end_and_begin_anew() -> None:
    async def run() -> None:
        calls = forked(time.sleep)
        waiting = asyncio.create_task(call(calls, 1000))
        while len(_left()) < 3:
            await asyncio.sleep(0.01)
        calls.stop()
        with pytest.raises(CallFailed, match=r"stopped|its process"):
            await waiting
        assert _left() == []
        assert await call(calls, 0) is None
        calls.stop()

    asyncio.run(run())
    assert _left() == []


def test_a_caller_that_waits_no_longer_does_not_end_the_imports() -> None:
    async def run() -> None:
        calls = forked(abs, Forks({"torch": ["torch"]}, ()))
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await call(calls, -1)
            begun = _left()
            assert await call(calls, -1) == 1
            assert begun and set(begun) <= set(_left())
        finally:
            calls.stop()

    asyncio.run(run())
    assert _left() == []


def test_stopping_while_the_nursery_imports_ends_it() -> None:
    async def run() -> None:
        calls = forked(time.sleep, Forks({"torch": ["torch"]}, ()))
        waiting = [asyncio.create_task(call(calls, 0)) for _ in range(2)]
        while not _left():
            await asyncio.sleep(0.01)
        calls.stop()
        with pytest.raises(CallFailed):
            await waiting[0]
        await asyncio.gather(*waiting, return_exceptions=True)
        calls.stop()

    asyncio.run(run())
    assert _left() == []


def test_many_threads_may_end_one_process() -> None:
    for _ in range(5):
        one = Nursery([], ())
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: one.kill(), range(8)))  # noqa: B023
    assert _left() == []


def test_a_fork_has_its_own_limit_of_memory() -> None:
    async def run() -> None:
        calls = forked(takes, memory_mb=200.0)
        try:
            assert await call(calls, 10) == 10**7
            with pytest.raises(CallFailed, match="MB of 200 MB"):
                await call(calls, 1000)
            assert await call(calls, 10) == 10**7
        finally:
            calls.stop()

    asyncio.run(run())


SCRIPT = """
import asyncio, os, signal, time
import psutil
from datamodules.processes.calls import ProcessCalls
from datamodules.processes.forks import Forks

async def main():
    calls = ProcessCalls({"f": time.sleep}, 2, once=True, forks=Forks({}, ()))
    tasks = [asyncio.create_task(calls.call("f", (1000,), {}, None)) for _ in range(2)]
    while len(found := psutil.Process().children(recursive=True)) < 2 + 2 * 2:
        await asyncio.sleep(0.01)
    print(*(one.pid for one in found), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_no_fork_outlives_a_trainer_that_is_killed() -> None:
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=given, capture_output=True, text=True, timeout=500)
    pids = [int(one) for one in done.stdout.split()]
    assert len(pids) == 6, done.stderr
    assert gone(pids) == []


def test_where_nothing_can_be_forked_processes_begin_by_themselves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> None:
        raise BlockingIOError("no more processes")

    async def run() -> None:
        calls = forked(abs)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(nursery.GuardedProcess, "__init__", refused)
                with pytest.raises(CallFailed, match="no process can be started"):
                    await call(calls, -1)
            assert [await call(calls, -k) for k in range(2)] == [0, 1]
        finally:
            calls.stop()

    asyncio.run(run())
    assert caplog.text.count("programs of their own") == 1
