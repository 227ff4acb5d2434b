"""Calls behind a relay: what they give, and what is left of them when their caller ends, however it does."""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from datamodules.processes import relay
from datamodules.processes.calls import pickled_call, pickled_functions
from datamodules.processes.relay import relayed

ROOT = Path(__file__).resolve().parents[3]


def greet(name: str) -> str:
    print("hello")
    return f"{name} in {os.getcwd()}"


def seen(name: str) -> str | None:
    return os.environ.get(name)


def fail(name: str) -> None:
    print("half way")
    raise KeyError(name)


def hang(folder: str) -> None:
    """With something in a session of its own, which no signal to a group reaches."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(folder, "pids.part").write_text(f"{os.getpid()} {child.pid}")
    Path(folder, "pids.part").rename(Path(folder, "pids"))
    print("I hang", flush=True)
    time.sleep(1000)


def setup(function: Callable[[str], Any], argument: str, **options: Any) -> dict[str, Any]:
    given = {"functions": pickled_functions({"f": function}), "job": pickled_call("f", (argument,), {})}
    given |= {"seconds": 60.0, "memory_mb": 500.0, "workers": 1, "keep_environment": [], "folder": None}
    return given | options


def eventually(what: Callable[[], bool]) -> bool:
    ends = time.monotonic() + 60
    while not what():
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def gone(folder: Path) -> bool:
    """Whether all that `hang` has started has ended."""
    pids = [int(one) for one in (folder / "pids").read_text().split()]
    return len(pids) == 2 and eventually(lambda: not any(map(psutil.pid_exists, pids)))


def test_a_call_runs_in_its_folder(tmp_path: Path) -> None:
    found = relayed(setup(greet, "Ada", folder=str(tmp_path)))
    assert found == {"status": "ok", "content": f"Ada in {tmp_path}", "printed": ""}


def test_what_looks_like_a_secret_is_not_seen_unless_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "k")
    assert relayed(setup(seen, "SOME_API_KEY"))["content"] is None
    assert relayed(setup(seen, "SOME_API_KEY", keep_environment=["SOME_API_KEY"]))["content"] == "k"


def test_a_call_that_fails_says_why_and_what_it_printed() -> None:
    found = relayed(setup(fail, "fruit"))
    assert found == {"status": "failed", "content": "KeyError: 'fruit'", "printed": "half way\n"}
    found = relayed(setup(greet, "Ada", folder="/no/such/folder"))
    assert found["status"] == "failed" and "/no/such/folder" in found["content"]


def test_a_deadline_ends_all_it_started(tmp_path: Path) -> None:
    found = relayed(setup(hang, str(tmp_path), seconds=2.0))
    assert found["status"] == "deadline" and "not over after 2 s" in found["content"]
    assert found["printed"] == "I hang\n" and gone(tmp_path)


class Garbled(BaseHTTPRequestHandler):
    """Cuts an answer short, then answers no HTTP, then fails, and says at last how long calls were held long ago."""

    count = 0

    def do_GET(self) -> None:
        Garbled.count += 1
        answers = {
            1: b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{",
            2: b"nothing of the kind\r\n\r\n",
            3: b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
        }
        said = b'{"held_s": 3600.0}'
        whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said)
        self.wfile.write(answers.get(Garbled.count, whole))
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


def test_whoever_answers_badly_holds_no_deadline_up(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Garbled) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            held = (f"http://127.0.0.1:{server.server_port}/held", "key", 3600.0)
            found = relayed(setup(hang, str(tmp_path), seconds=2.0, held=held))
        finally:
            server.shutdown()
            thread.join(60)
    assert Garbled.count >= 3
    assert found["status"] == "deadline" and found["printed"] == "I hang\n" and gone(tmp_path)


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # relays that are killed leave a folder


def test_an_interrupt_ends_all_it_started(tmp_path: Path) -> None:
    def interrupt() -> None:
        if eventually((tmp_path / "pids").exists):
            _thread.interrupt_main()  # as Ray does it

    thread = threading.Thread(target=interrupt)
    thread.start()
    found = relayed(setup(hang, str(tmp_path)))
    thread.join(60)
    assert found == {"status": "cancelled", "content": "was cancelled", "printed": "I hang\n"} and gone(tmp_path)


def killed(folder: Path, before: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """What a call says whose relay is killed while it hangs, after something else."""
    others = set(psutil.Process().children())  # this process has servers and ranks that are shared by tests

    def kill() -> None:
        if eventually((folder / "pids").exists):
            relays = set(psutil.Process().children()) - others
            before()
            for child in relays:
                child.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    found = relayed(setup(hang, str(folder)))
    thread.join(60)
    return found


def test_a_relay_that_is_killed_is_no_failure_of_the_call(tmp_path: Path) -> None:
    assert killed(tmp_path) == {"status": "lost", "content": "has lost its relay, which was killed", "printed": ""}
    assert gone(tmp_path)


def test_what_a_killed_relay_leaves_is_removed_by_the_next_but_for_one_that_runs(tmp_path: Path) -> None:
    there: list[bool] = []

    def begin_another() -> None:
        """Whether the folder, as that of a call of long ago, is left by it."""
        (folder,) = tmp_path.glob("arborist_*")
        os.utime(folder, (0, 0))
        relayed(setup(greet, "Ada"))
        there.append(folder.exists())

    killed(tmp_path, before=begin_another)
    assert gone(tmp_path)
    begin_another()
    assert there == [True, False] and list(tmp_path.glob("arborist_*")) == []


def test_half_an_answer_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "relay.py"
    program.write_text(
        "import os, signal, sys\n"
        'print(\'{"status": "ok", "cont\', end=\'\', flush=True)\n'
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setattr(relay, "__file__", str(program))
    found = relayed(setup(greet, "Ada"))
    assert found == {"status": "lost", "content": "has lost its relay, which was killed", "printed": ""}


@pytest.mark.parametrize("how", ["killed", "children first"])
def test_the_end_of_the_caller_ends_all_it_started(how: str, tmp_path: Path) -> None:
    program = (
        "import sys; from tests.datamodules.processes import test_relay as t;"
        f"t.relayed(t.setup(t.hang, {str(tmp_path)!r}))"
    )
    caller = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        assert eventually((tmp_path / "pids").exists)
        if how == "children first":  # as a worker of Ray's does when it has to end
            for child in psutil.Process(caller.pid).children():
                child.kill()
    finally:
        caller.kill()
        caller.wait(10)
    assert gone(tmp_path)
