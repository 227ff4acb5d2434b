"""A gateway as a process of its own, and who speaks to it: the `openai` package, and whoever posts rewards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from app.cli import gateway

ROOT = Path(__file__).parents[4]
KEY = "k" * 20
_WAIT_S = 60.0


@contextmanager
def running(*options: str, key: str | None = KEY) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and where its sessions are."""
    environment = {name: value for name, value in os.environ.items() if name != gateway.KEY_VARIABLE}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | ({gateway.KEY_VARIABLE: key} if key else {})
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "gateway", "--port", "0", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line.endswith("/r/<session>/v1"), process.communicate(timeout=20)
        yield process, line.removesuffix("/<session>/v1")
    finally:
        process.kill()
        process.wait(20)


def client(at: str, session: str, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{at}/{session}/v1", api_key=key, max_retries=0)


def post(at: str, session: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{at}/{session}{path}", json.dumps(body).encode(), {"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=_WAIT_S) as answer:
        return json.load(answer)
