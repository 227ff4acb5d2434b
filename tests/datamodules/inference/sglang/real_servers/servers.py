"""Real SGLang servers on CPU for tests, started seldom: a start takes 15 s and a server 1.6 GB.

`shared_server()` starts one for the whole test process, for every test that does not harm it; who harms servers starts
his own. With ARBORIST_SKIP_SGLANG=1 whoever asks for one is skipped; without the server environment it is an error.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from datamodules.inference.sglang.launcher import ServerOptions, ServerProcess
from datamodules.inference.weight_files import WeightFiles
from tests.datamodules.inference.engine_suite import CONTEXT, tiny_policy

START_S = 500.0  # 15 s on a quiet machine, minutes on one where many others run
KEY = "a-key-of-the-tests"  # the shared server wants it


def skip_unless_wanted() -> None:
    if os.environ.get("ARBORIST_SKIP_SGLANG") == "1":
        pytest.skip("ARBORIST_SKIP_SGLANG=1: no tests with a real SGLang server")


def options(model_path: str, **changes: object) -> ServerOptions:
    settings: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "context": CONTEXT,
        "max_running_requests": 64,
        "kv_cache_tokens": 32768,
        "num_threads": 1,
    }
    return ServerOptions(model_path, **(settings | changes))  # type: ignore[arg-type]


@functools.cache
def _shared() -> ServerProcess:
    directory = Path(tempfile.mkdtemp(prefix="arborist-test-server-"))
    path, _ = WeightFiles(directory).write(tiny_policy(seed=99), version=0)  # weights that no test expects
    process = ServerProcess(options(str(path)), directory / "server.log", KEY)
    asyncio.run(process.ready(START_S))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    atexit.register(process.stop, 0.0)
    return process


def shared_server() -> ServerProcess:
    """The server of this test process, of the model shape `tiny_policy`, whatever weights the last test left in it."""
    skip_unless_wanted()
    process = _shared()
    if not process.running:  # a test was harder on it than it should be: its error, not that of those after it
        process.stop(0.0)
        asyncio.run(process.ready(START_S))
    return process
