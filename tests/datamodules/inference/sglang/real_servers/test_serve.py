"""`arborist serve` with a real server: what it prints can be used, and nothing of it stays, however it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from datamodules.inference.protocol import GenerationRequest, WeightUpdate
from datamodules.inference.sglang import SGLangEngine
from datamodules.inference.sglang.server import leftovers
from datamodules.inference.weight_files import WeightFiles
from tests.datamodules.inference.engine_suite import CONTEXT, assert_parity, prompts_of, tiny_policy
from tests.datamodules.inference.sglang.real_servers.servers import START_S

pytestmark = pytest.mark.slow


class Serving:
    """The command, running; `lines` is what it has printed."""

    def __init__(self, model: Path, logs: Path) -> None:
        command = [sys.executable, "-m", "app", "serve", "--model", str(model), "--device", "cpu"]
        command += ["--kv_cache_tokens", "8192", "--num_threads", "1", "--log_dir", str(logs)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def until(self, pattern: str, seconds: float) -> str:
        ends = time.monotonic() + seconds
        while not re.search(pattern, text := "".join(list(self.lines))):
            assert time.monotonic() < ends and self.process.poll() is None, text
            time.sleep(0.05)
        return text


def server_of(serving: Serving) -> int:
    """The server's process group."""
    found = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _parent(entry) == serving.process.pid and _mentions(entry, b"serve_main.py")
    ]
    assert len(found) == 1
    return found[0]


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _mentions(process: Path, what: bytes) -> bool:
    return what in (process / "cmdline").read_bytes()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    path, _ = WeightFiles(tmp_path / "weights").write(tiny_policy(), version=0)
    one = Serving(path, tmp_path / "logs")
    yield one
    one.process.kill()
    one.process.wait(30)


def wait_gone(group: int, files: set[Path], scratch: Path) -> None:
    ends = time.monotonic() + 60
    while leftovers.members(group) or any(file.exists() for file in files) or scratch.exists():
        assert time.monotonic() < ends, (leftovers.members(group), files, scratch)
        time.sleep(0.05)


def scratch_of(group: int) -> Path:
    variables = Path(f"/proc/{group}/environ").read_bytes().split(b"\0")
    return next(Path(one.decode().partition("=")[2]) for one in variables if one.startswith(b"TMPDIR="))


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_serves_and_leaves_nothing_behind(serving: Serving, tmp_path: Path, end: signal.Signals) -> None:
    text = serving.until(r"urls: \[.*\]", START_S)
    options = yaml.safe_load(text[text.index("engine:") :])["engine"]["init_args"]
    group = server_of(serving)
    files, scratch = leftovers.shared_memory(group), scratch_of(group)
    assert files and scratch.exists()
    if end == signal.SIGINT:
        engine = SGLangEngine(**options)
        engine.start(tiny_policy(), version=0, seed=0)
        try:
            assert engine.max_context == CONTEXT
            engine.update_weights(WeightUpdate(0, path=str(WeightFiles(tmp_path / "weights").path(0))))
            request = GenerationRequest(prompts_of([20])[0], CONTEXT - 20)
            assert_parity({0: tiny_policy()}, request, asyncio.run(engine.generate(request)), 1e-5)
        finally:
            engine.close()
    serving.process.send_signal(end)
    assert serving.process.wait(60) == (0 if end == signal.SIGINT else -signal.SIGKILL)
    wait_gone(group, files, scratch)
