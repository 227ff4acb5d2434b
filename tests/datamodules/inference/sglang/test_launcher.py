"""Starting and ending server processes, with small programs in the server's place: errors, deadlines, leftovers."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from app.cli import serve
from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang import Launch, SGLangEngine
from datamodules.inference.sglang.client import ServerClient, ServerLost
from datamodules.inference.sglang.launcher import (
    NoServerEnvironment,
    ServerDidNotStart,
    ServerOptions,
    ServerProcess,
    server_python,
)
from datamodules.inference.sglang.loop_thread import LoopThread
from datamodules.inference.sglang.roster import given_servers
from datamodules.inference.sglang.server import leftovers
from tests.datamodules.inference.engine_suite import tiny_policy


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes an 'interpreter' that runs a shell script whatever it is asked to run."""

    def make(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("ARBORIST_SGLANG_PYTHON", str(path))

    return make


def a_process(tmp_path: Path, key: str | None = None) -> ServerProcess:
    return ServerProcess(ServerOptions("/a/model"), tmp_path / "logs" / "server.log", key)


def test_one_that_ends_is_an_error_with_the_end_of_its_log(interpreter, tmp_path: Path) -> None:
    interpreter("echo 'no such thing as a model'; exit 3")
    process = a_process(tmp_path)
    with pytest.raises(ServerDidNotStart, match=r"ended with code 3.*server\.log:\n.*no such thing as a model"):
        asyncio.run(process.ready(20))
    assert process.pid is None


@pytest.mark.parametrize(
    ("script", "said"),
    [("exit 3", "its process ended with code 3"), ("kill -9 $$", "its process was killed (SIGKILL)")],
)
def test_how_one_ended_is_said(interpreter, tmp_path: Path, script: str, said: str) -> None:
    """A kill by the machine, short of memory, is no exit: the log of such a server holds no word of it."""
    interpreter(script)
    process = a_process(tmp_path)
    process.start()
    ends = time.monotonic() + 20
    while process.running and time.monotonic() < ends:
        time.sleep(0.02)
    assert process.ended and process.ending == said
    process.stop(0.0)


def test_one_that_does_not_come_up_is_an_error_in_time_and_ended(interpreter, tmp_path: Path) -> None:
    interpreter("echo loading; trap '' TERM; sleep 600 & wait")
    process = a_process(tmp_path)
    process.start()
    group, scratch = process.pid, Path(process._scratch)
    assert scratch.exists()
    with pytest.raises(ServerDidNotStart, match=r"not healthy within 0\.5 s.*\n.*loading"):
        asyncio.run(process.ready(0.5))
    assert leftovers.members(group) == [] and not scratch.exists()


def test_of_a_long_log_the_end_alone_is_read(tmp_path: Path) -> None:
    process = a_process(tmp_path)
    process.log_file.parent.mkdir()
    with process.log_file.open("wb") as log:
        log.truncate(50_000_000)
        log.seek(0, os.SEEK_END)
        log.write("".join(f"line {k}\n" for k in range(40)).encode())
    tracemalloc.start()
    try:
        text = process.tail()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [line.strip() for line in text.splitlines()[1:]] == [f"line {k}" for k in range(15, 40)]
    assert peak < 1_000_000


def test_stop_ends_the_whole_group_and_can_be_repeated(interpreter, tmp_path: Path) -> None:
    interpreter("trap '' TERM; sleep 600 & sleep 600 & echo all-three; wait")
    process = a_process(tmp_path)
    process.start()
    group = process.pid
    while "all-three" not in process.tail():
        time.sleep(0.02)
    assert len(leftovers.members(group)) == 3
    process.stop(grace_s=0.2)
    process.stop()
    assert leftovers.members(group) == []


def test_one_that_kills_itself_as_it_starts_leaves_nothing_in_shared_memory(
    interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SGLang does whose warm-up fails: then no process is left that has its files open. Here after one look."""
    file, looked, look = Path(f"/dev/shm/sglang_test_start_{os.getpid()}"), tmp_path / "looked", leftovers.shared_memory

    def noted(group: int) -> set[Path]:
        found = look(group)
        if file in found:
            looked.touch()
        return found

    monkeypatch.setattr(leftovers, "shared_memory", noted)
    interpreter(f"exec 9>{file}; until [ -e {looked} ]; do sleep 0.1; done; kill -9 $$")
    with pytest.raises(ServerDidNotStart, match="ended with code -9"):
        asyncio.run(a_process(tmp_path).ready(60))
    left = file.exists()
    leftovers.remove({file})
    assert not left


def test_the_key_is_in_the_environment_only(interpreter, tmp_path: Path) -> None:
    interpreter('echo "key: $ARBORIST_SGLANG_API_KEY"; echo "arguments: $*"; echo "rank: $RANK"; sleep 600')
    process = a_process(tmp_path, key="k3y")
    os.environ["RANK"] = "1"
    try:
        process.start()
        while "rank:" not in process.tail():
            time.sleep(0.02)
        text = process.tail()
    finally:
        process.stop(0.0)
        del os.environ["RANK"]
    assert "key: k3y" in text and "rank: \n" in f"{text}\n"  # the trainer's place in its group is not the server's
    assert "k3y" not in text.partition("arguments:")[2] and "k3y" not in repr(process.client())


_STAND_IN = """
import logging, os, subprocess, sys, time
file = open(f"/dev/shm/sglang_test_{os.getpid()}", "w")
child = subprocess.Popen(["sleep", "600"])
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
logging.info("arguments=%s", sys.argv)
print("printed:", sys.argv, flush=True)
try:
    raise ValueError(f"raised: {sys.argv}")
except ValueError:
    import traceback; traceback.print_exc()
    logging.exception("logged")
logging.info("up: %s", file.name)
time.sleep(600)
"""

_LAUNCHER = """
import sys, time
from pathlib import Path
from datamodules.inference.sglang.launcher import ServerOptions, ServerProcess
directory = Path(sys.argv[1])
process = ServerProcess(ServerOptions("/a/model", device="cuda"), directory / "log", "k3y-k3y", directory / "weights")
process.start()
print(process.pid, process._scratch, flush=True)
time.sleep(600)
"""


def test_a_launcher_that_is_killed_takes_everything_with_it(tmp_path: Path) -> None:
    """The real entry point of the server's side, with a stand-in for SGLang."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(_STAND_IN)
    (tmp_path / "weights").mkdir()
    paths = os.pathsep.join([str(tmp_path), os.getcwd()])
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "ARBORIST_SGLANG_PYTHON": sys.executable},
    )
    try:
        assert launcher.stdout is not None
        pid, scratch = launcher.stdout.readline().split()
        ends = time.monotonic() + 60
        while "up: " not in (text := (tmp_path / "log").read_text()):
            assert time.monotonic() < ends, text
            time.sleep(0.02)
        assert "--api-key" in text and "k3y-k3y" not in text
        assert all(word in text for word in ("arguments=", "printed:", "raised: ", "logged"))
        assert text.count("***") >= 4
        files = leftovers.shared_memory(int(pid))
        assert len(files) == 1 and len(leftovers.members(int(pid))) == 2 and Path(scratch).exists()
        launcher.kill()
        while leftovers.members(int(pid)) or Path(scratch).exists() or (tmp_path / "weights").exists():
            assert time.monotonic() < ends, leftovers.members(int(pid))
            time.sleep(0.02)
        assert not any(file.exists() for file in files)
    finally:
        launcher.kill()
        launcher.wait(10)


def test_no_environment_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARBORIST_SGLANG_PYTHON", str(tmp_path / "nothing"))
    with pytest.raises(NoServerEnvironment, match=r"ARBORIST_SGLANG_PYTHON: '.*nothing' is no interpreter"):
        server_python()
    monkeypatch.delenv("ARBORIST_SGLANG_PYTHON")
    monkeypatch.setattr("datamodules.inference.sglang.launcher._ENVIRONMENT", tmp_path)
    with pytest.raises(NoServerEnvironment, match="make sglang"):
        server_python()
    engine = SGLangEngine(launch=Launch(device="cpu"), start_timeout_s=20)
    with pytest.raises(NoServerEnvironment, match="make sglang"):
        engine.start(tiny_policy(), 0, 0)


def test_servers_on_gpus_are_none_of_the_environment_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARBORIST_SGLANG_PYTHON", raising=False)
    with pytest.raises(NoServerEnvironment, match="set ARBORIST_SGLANG_PYTHON to the python of one with"):
        SGLangEngine(launch=Launch(device="cuda"), start_timeout_s=20).start(tiny_policy(), 0, 0)


def test_servers_are_not_put_on_gpus_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    Launch(device="cuda", first_gpu=4)
    Launch(device="cpu")
    with pytest.raises(ValueError, match=r"launch\.first_gpu: 2, and .* 4 ranks .* train on its GPUs 0 to 3"):
        Launch(device="cuda", first_gpu=2)


def test_servers_in_turns_are_on_gpus_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"launch\.in_turns: .* on GPUs 1 to 1, .* 1 ranks train on 0 to 0"):
        Launch(device="cuda", first_gpu=1, in_turns=True)
    (command,) = (
        one.command(1) for one in Launch(device="cuda", in_turns=True).options("/m", 100, "v7-0123abcd", 3, 32)
    )
    assert {"--enable-memory-saver", "--enable-weights-cpu-backup"} <= set(command)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    options = Launch(replicas=2, tensor_parallel=2, device="cuda", in_turns=True).options(
        "/m", 100, "v7-0123abcd", 3, 32
    )
    assert [one.gpu for one in options] == [0, 2]
    (command,) = (
        one.command(1) for one in Launch(device="cpu", in_turns=True).options("/m", 100, "v7-0123abcd", 3, 32)
    )
    assert "--enable-memory-saver" not in command  # it is of CUDA


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "http://", "ftp://x", "http://user:hush@host:1", "http://h?key=1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="must look like") as error:
        SGLangEngine([url])
    assert "hush" not in str(error.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:30000/v1", "https://host/proxied/v1/"])
def test_an_address_of_the_api_that_clients_use_is_none_of_a_server(url: str) -> None:
    with pytest.raises(ValueError, match=f"urls: '{url}', leave /v1 out"):
        SGLangEngine([url])
    SGLangEngine([url.replace("/v1", "")])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either urls"),
        ({"urls": ["http://a:1"], "launch": Launch()}, "either urls"),
        ({"urls": ["http://a:1", "http://a:1/"]}, "there twice"),
        ({"urls": ["http://a:1"], "silence_s": 0}, "silence_s: 0"),
    ],
)
def test_settings_that_cannot_be(settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SGLangEngine(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 0}, "launch.replicas: 0"),
        ({"device": "tpu"}, "launch.device: 'tpu'"),
        ({"device": "cpu", "tensor_parallel": 2}, "no effect with launch.device: cpu"),
        ({"max_restarts": -1}, "launch.max_restarts: -1"),
        ({"arguments": ("--tp-size", "1", "--host", "0.0.0.0")}, r"launch.arguments: --host \(--host\) would change"),
        ({"arguments": ("--ho=0.0.0.0",)}, r"launch.arguments: --ho \(--host\)"),
        ({"arguments": ["--port", "80"]}, r"launch.arguments: --port .* the key comes from ARBORIST_SGLANG_API_KEY"),
        ({"arguments": ("--api_key=k",)}, r"launch.arguments: --api-key"),
        ({"arguments": ("--config", "file.yaml")}, r"launch.arguments: --config"),
    ],
)
def test_launches_that_cannot_be(settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Launch(**settings)


@pytest.mark.parametrize("opening", [["--host", "0.0.0.0"], ["--hos=::"], ["--port=80"], ["--api-key", "K"]])
def test_serve_is_not_opened_behind_its_own_options(
    opening: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ARBORIST_SGLANG_API_KEY", raising=False)
    (tmp_path / "config.json").write_text("{}")
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    given = ["--model", str(tmp_path), "--", "--mem-fraction-static", "0.5"]
    (process,) = serve._processes(parser.parse_args(given))
    assert process.options.command(1)[-2:] == ["--mem-fraction-static", "0.5"]
    with pytest.raises(serve.CannotServe, match=rf"^-- {opening[0].partition('=')[0]} .*would change where"):
        serve._processes(parser.parse_args([*given, *opening]))
    with pytest.raises(serve.CannotServe, match=r"--host: 0\.0\.0\.0 opens the servers to the network"):
        serve._processes(parser.parse_args(["--host", "0.0.0.0", *given]))


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("http://10.1.2.3:30000", True),
        ("http://a-server:30000", True),
        ("https://a-server:30000", False),
        ("http://127.0.0.9:30000", False),
        ("http://localhost:30000", False),
        ("http://[::1]:30000", False),
    ],
)
def test_a_key_that_goes_over_a_network_in_clear_text_is_warned_of(
    url: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given_servers([url], None, 4)
    assert not caplog.records
    given_servers([url], "k3y-k3y", 4)
    assert [f"the API key, prompts and replies go to {url} in clear text" in one for one in caplog.messages] == (
        [True] if warned else []
    )
    assert "k3y" not in caplog.text


def test_a_loop_that_stands_still_is_an_error_in_time() -> None:
    thread = LoopThread("a-loop")
    stuck = threading.Event()

    async def work() -> int:
        return 3

    async def late() -> None:
        raise TimeoutError("of its own")

    try:
        assert thread.call(work(), 30.0) == 3
        with pytest.raises(TimeoutError, match="of its own"):
            thread.call(late(), 30.0)
        thread.loop.call_soon_threadsafe(stuck.wait, 60.0)
        with pytest.raises(GenerationError, match=r"the event loop of thread a-loop stands still: .* within 0\.2 s"):
            thread.call(work(), 0.2)
    finally:
        stuck.set()
        thread.stop(30.0)


def test_gpus_seeds_and_limits_of_several_servers() -> None:
    one, two = Launch(replicas=2, device="cuda", first_gpu=4, tensor_parallel=2).options(
        "/m", 100, "v7-0123abcd", 3, 32
    )
    assert (one.gpu, two.gpu) == (4, 6) and one.seed != two.seed
    command = two.command(30001)
    for flag, value in {
        "--base-gpu-id": "6",
        "--tp-size": "2",
        "--weight-version": "v7-0123abcd",
        "--context-length": "106",
    }.items():
        assert command[command.index(flag) + 1] == value
    assert "--attention-backend" not in command


@pytest.mark.parametrize(
    ("saved", "asked", "device", "served"),
    [
        ({"dtype": "float32"}, "auto", "cpu", "float32"),  # SGLang's own "auto" would be float16
        ({"torch_dtype": "bfloat16"}, "auto", "cpu", "bfloat16"),
        ({"dtype": "float64"}, "auto", "cpu", "float32"),
        ({"dtype": "float32"}, "bfloat16", "cpu", "bfloat16"),
        ({"dtype": "float32"}, "auto", "cuda", "auto"),
        ({}, "auto", "cpu", "auto"),
    ],
)
def test_auto_is_the_dtype_that_the_model_was_saved_in(
    tmp_path: Path, saved: dict[str, str], asked: str, device: str, served: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(saved))
    (command,) = (one.command(1) for one in Launch(device=device, dtype=asked).options(str(tmp_path), 100, 7, 3, 32))
    assert command[command.index("--dtype") + 1] == served


def test_a_call_to_one_that_accepts_and_never_answers_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"

        async def call() -> None:
            client = ServerClient(url, "k3y")
            try:
                with pytest.raises(ServerLost, match=rf"{url}/model_info: no answer within 0\.2 s"):
                    await client.get("/model_info", 0.2)
            finally:
                await client.close()

        asyncio.run(call())
