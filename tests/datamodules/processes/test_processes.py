"""Worker processes: they end with the trainer however it ends, and see and take what they may."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from datamodules.processes import guardian, process
from datamodules.processes.calls import ProcessCalls
from datamodules.processes.guarded import LOG_BYTES
from datamodules.processes.limits import environment, looks_secret, memory_limit, tell_hidden
from datamodules.processes.process import WorkerProcess
from datamodules.processes.worker import MOST_ANSWER_BYTES
from datamodules.rewards import RewardOptions

ROOT = Path(__file__).parents[3]
PLENTY = 10**9

# A trainer that is killed while one worker hangs in C, with the interpreter's lock, and another has left children in
# sessions of their own. The reward is defined in the script itself.
SCRIPT = """
import asyncio, os, re, signal, subprocess, time
import psutil
from datamodules.prompts.base import Prompt
from datamodules.rewards import RewardOptions, RewardPool

def reward(prompt, completion):
    if completion == "c":
        return bool(re.match("(a+)+$", "a" * 60 + "b"))
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    return 1.0

async def main():
    await pool.open()
    tasks = [asyncio.create_task(pool.score(Prompt(id="p"), one)) for one in ("c", "children")]
    await tasks[1]
    while len(found := psutil.Process().children(recursive=True)) < 2 * 2 + 3:
        await asyncio.sleep(0.01)
    print(*(one.pid for one in found), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    pool = RewardPool(reward, RewardOptions(workers=2))
    asyncio.run(main())
"""


def gone(pids: list[int], seconds: float = 60.0) -> list[int]:
    """Those that are still there after a while."""
    ends = time.monotonic() + seconds
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < ends:
        time.sleep(0.02)
    return left


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_outlives_a_trainer_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=given, capture_output=True, text=True, timeout=500)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(one) for one in done.stdout.split()]
    assert len(pids) == 7
    assert gone(pids) == []


def test_a_guardian_whose_trainer_died_before_it_ran_ends_its_worker() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        numbers = [os.dup(theirs.fileno()), os.dup(theirs.fileno())]
        given = [str(one) for one in (*numbers, 1, PLENTY, PLENTY)]  # process 1 is not its parent
        process = subprocess.Popen([sys.executable, guardian.__file__, *given], pass_fds=numbers)
        for one in numbers:
            os.close(one)
        assert process.wait(60.0) == 0


def kills_its_guardian(path: str) -> None:
    sleepers = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2)]
    Path(path).write_text(" ".join(str(one.pid) for one in sleepers))
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def test_nothing_outlives_a_guardian_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    with pytest.raises(EOFError):
        call(WorkerProcess(pickle.dumps(kills_its_guardian), PLENTY), str(path))
    pids = [int(one) for one in path.read_text().split()]
    assert len(pids) == 2
    assert gone(pids) == []


def call(one: WorkerProcess, *args: Any, seconds: float = 60.0) -> Any:
    async def run() -> Any:
        try:
            await one.greet(60.0)
            await one.ask([pickle.dumps((args, {}))], seconds)
            return await one.answer(seconds)
        finally:
            await one.end()

    return asyncio.run(run())


def test_a_worker_outlives_the_thread_that_started_it() -> None:
    made: list[WorkerProcess] = []
    thread = threading.Thread(target=lambda: made.append(WorkerProcess(pickle.dumps(abs), PLENTY)))
    thread.start()
    thread.join()
    assert call(made[0], -3.0) == ("ok", 3.0, "")


def test_a_script_that_starts_workers_when_it_is_imported_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"  # without `if __name__ == "__main__":`
    script.write_text(
        "from datamodules.processes.process import WorkerProcess\n"
        "def reward(prompt, completion): return 1.0\n"
        f"open({str(tmp_path / 'ran')!r}, 'a').write('.')\n"
        "WorkerProcess(b'c__main__\\nreward\\n.', 10**9).kill()\n"
    )
    monkeypatch.setattr(process, "_main_module", lambda: {"init_main_from_path": str(script)})
    one = WorkerProcess(b"c__main__\nreward\n.", PLENTY)
    try:
        with pytest.raises(ValueError, match="__name__ == '__main__'"):
            asyncio.run(one.greet(60))
    finally:
        one.kill()
    assert (tmp_path / "ran").read_text() == "."


def test_a_long_chain_of_processes_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = {f"/proc/{pid}/task/{pid}/children": f"{pid + 1} " for pid in range(1, 3000)}
    monkeypatch.setattr(guardian.os, "listdir", lambda path: [path.split("/")[2]])
    monkeypatch.setattr(guardian, "open", lambda path: io.StringIO(chain.get(path, "")), raising=False)
    assert list(guardian.descendants(1)) == list(range(2, 3001))


def test_what_is_printed_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "0.log"
    shell = pickle.dumps(subprocess.check_call)
    last = "for i in $(seq 20); do head -c 1000000 /dev/zero; sleep 0.05; done; seq 9999; echo the end; sleep 1"
    assert call(WorkerProcess(shell, PLENTY, log=log), ["sh", "-c", last]) == ("ok", 0, "")
    kept = log.read_bytes()
    assert len(kept) < 20 * LOG_BYTES and b"is left out" in kept
    assert b"\n".join(b"%d" % i for i in range(9000, 10000)) + b"\nthe end\n" in kept  # the end is never left out
    assert call(WorkerProcess(shell, PLENTY, log=Path("/proc/no/such.log")), "true") == ("ok", 0, "")


@pytest.mark.parametrize("can_collapse", [True, False])
def test_a_log_is_cut_while_others_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_collapse: bool) -> None:
    """What is kept is what was written last, in its order. Only what copies may lose a line."""
    if not can_collapse:
        monkeypatch.setattr(guardian, "_collapse", lambda log, count: False)
    path, cuts, most = tmp_path / "0.log", 0, 100_000
    with path.open("a+b", buffering=0) as log:
        lines_one_by_one = "import os\nfor k in range(200000): os.write(1, b'%d\\n' % k)"
        writer = subprocess.Popen([sys.executable, "-c", lines_one_by_one], stdout=log)
        while writer.poll() is None:
            cuts += os.fstat(log.fileno()).st_size > most
            guardian._bound_log(log.fileno(), most)
            assert not path.stat().st_size or b"\0" not in path.read_bytes()
        first, _, *lines = path.read_bytes().decode().splitlines()
    numbers = [int(line) for line in lines]
    assert writer.returncode == 0 and cuts > 1 and first == "(what was written before is left out)"
    assert numbers == sorted(numbers)
    if can_collapse and _collapses(tmp_path / "1.log"):
        assert numbers == list(range(numbers[0], 200_000))


def _collapses(path: Path) -> bool:
    path.write_bytes(bytes(1 << 20))
    with path.open("r+b") as file:
        return guardian._collapse(file.fileno(), 1 << 16)


def test_large_answers_are_refused_where_they_are_made() -> None:
    repeat = pickle.dumps(str.upper)
    status, said, _ = call(WorkerProcess(repeat, PLENTY), "x" * (2 * MOST_ANSWER_BYTES))
    assert (status, said) == ("exception", "returned 2.1 MB, more than 1 MB")


def test_calls_of_a_pool_that_is_stopped_end() -> None:
    calls = ProcessCalls({"f": time.sleep}, 1, 500.0)
    others = set(psutil.Process().children(recursive=True))  # servers and ranks that are shared by tests

    async def run() -> list[Any]:
        both = [asyncio.create_task(calls.call("f", (1000,), {}, None)) for _ in range(2)]  # one waits for the other
        async with asyncio.timeout(60):
            while set(psutil.Process().children(recursive=True)) <= others:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        calls.stop()
        async with asyncio.timeout(60):
            ended = await asyncio.gather(*both, return_exceptions=True)
            return [*ended, await calls.call("f", (0,), {}, None)]

    try:
        *ended, again = asyncio.run(run())
    finally:
        calls.stop()
    assert [str(one) for one in ended] == ["was stopped, as were all calls beside it"] * 2 and again is None


SECRETS = ("ARBORIST_SGLANG_API_KEY", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK")
MORE = ("db_password", "GITHUB_PAT", "MYSQL_PWD", "OPENAI_API_KEYS", "DATABASE_URL", "SENTRY_DSN")
MORE += ("AZURE_STORAGE_CONNECTION_STRING", "DB_PASS", "SMTP_PASS", "MYSQL_URL", "RABBITMQ_URL", "SLACK_WEBHOOK_URL")
MORE += ("PRIVATE_KEY_PEM", "JWT", "API_TOKEN_2", "HF_TOKEN_READ", "ACCESSTOKEN", "COOKIE", "DOCKER_AUTH_CONFIG")
MORE += ("PASS", "ADMIN_PASS", "SMTP_PASS_2", "STORAGE_KEY2", "SSH_KEY_2", "APP_PASS", "PYPI_TOKEN_PUBLISH")
MORE += (
    "API_TOKENS",
    "GITHUB_TOKENS",
    "MAX_API_TOKENS",
    "NOTEPAD_TOKEN",
    "PAD_TOKEN_SECRET",
    "TOKENS",
    "SECRET_MAX_TOKENS",
)


@pytest.mark.parametrize("name", [*SECRETS, *MORE])
def test_secrets_stay_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "secret")
    assert name not in environment() and environment([name])[name] == "secret"


@pytest.mark.parametrize(
    "value", ["postgresql+driver://me:word@host/x", "redis://:word@host", "http://h https://a:b@h"]
)
def test_a_url_with_a_password_stays_behind(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKEND", value)
    assert "BACKEND" not in environment() and environment(["BACKEND"])["BACKEND"] == value
    RewardOptions(keep_environment=["BACKEND"])


PLAIN = ("PATH", "HOME", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "HF_HOME", "KEYMAP")
USUAL = ("OPENAI_BASE_URL", "SSH_ASKPASS", "TOKEN_LIMIT", "MONKEY", "COMPASS", "PYTHONPATH", "AUTHOR", "SSL_CERT_FILE")
COUNTED = ("PAD_TOKEN_ID", "EOS_TOKEN_IDS", "MAX_TOKEN_LENGTH", "NEW_TOKEN_RATIO", "HF_TOKEN_PATH", "WEB_TOKEN_FILE")
COUNTED += (
    "MAX_TOKENS",
    "MAX_NEW_TOKENS",
    "APP_MAX_OUTPUT_TOKENS",
    "max_num_batched_tokens",
    "PAD_TOKEN",
    "LM_EOS_TOKEN",
)
PASSES = ("NUM_PASS", "SINGLE_PASS", "BYPASS", "HOT_KEY_2")


@pytest.mark.parametrize("name", [*PLAIN, *USUAL, *COUNTED, *PASSES])
@pytest.mark.parametrize("value", ["", "http://host:80/a@b", "ssh://git@host", "a:b@c", "C://d e:f@g"])
def test_what_is_no_secret_is_seen(name: str, value: str) -> None:
    assert not looks_secret(name, value)


def test_a_proxy_that_is_hidden_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in environment():
        if name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SOME_API_KEY", "k")
    with caplog.at_level(logging.INFO):
        tell_hidden(logging.getLogger("a"), "agents", "keep_environment")
        monkeypatch.setenv("https_proxy", "http://me:word@proxy:80")
        tell_hidden(logging.getLogger("a"), "agents", "keep_environment")
        tell_hidden(logging.getLogger("a"), "agents", "keep_environment", ["https_proxy"])
    assert [one.levelname for one in caplog.records] == ["INFO", "WARNING", "INFO"]
    assert "https_proxy" in caplog.messages[1] and "keep_environment" in caplog.messages[1]


def test_every_worker_has_a_share_of_the_memory() -> None:
    assert memory_limit(500.0, 4) == 500 * 10**6
    one, four = memory_limit(None, 1), memory_limit(None, 4)
    assert 10**9 <= four <= one <= psutil.virtual_memory().total
    assert memory_limit(None, 10**6) == 10**9
