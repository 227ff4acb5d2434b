"""Agents for nodes of Ray, with Python's standard library alone. They and their tests speak through files."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from datamodules.prompts.base import Prompt


def ask(text: str) -> str:
    """What the model says to that."""
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def tell(folder: str, name: str, **said: Any) -> None:
    """Writes a file that is there as a whole or not at all."""
    Path(folder, f"{name}.part").write_text(json.dumps(said))
    Path(folder, f"{name}.part").rename(Path(folder, name))


def wait_for(*paths: Path) -> None:
    ends = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        if time.monotonic() > ends:
            raise TimeoutError(f"{paths} did not appear")
        time.sleep(0.05)


def held(prompt: Prompt) -> str:
    """Asks, says where it is, and goes on once it may; answers with its node and its last reply."""
    folder, node = prompt.metadata["folder"], os.environ["NODE"]
    first = ask(f"{prompt.id} first")
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    tell(folder, f"{prompt.id} on {node}", pids=[os.getpid(), child.pid], first=first)
    wait_for(Path(folder, f"go {node}"))
    child.kill()
    return f"{node}: {ask(f'{prompt.id} second')}"


def quick(prompt: Prompt) -> str:
    return ask(prompt.text)


def slow(prompt: Prompt) -> str:
    """Takes longer than its deadline before it asks."""
    time.sleep(4)
    return ask(prompt.text)


def sees(prompt: Prompt) -> str:
    """The variables of its environment that look like keys, and whether it is bound in memory."""
    ask(prompt.text)
    return " ".join(sorted(name for name in os.environ if name.startswith("SOME_")))


def greedy(prompt: Prompt) -> int:
    ask(prompt.text)
    return len(bytearray(700_000_000).replace(b"\0", b"\1"))


def hangs(prompt: Prompt) -> None:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("I hang", flush=True)
    tell(prompt.metadata["folder"], "hanging", pids=[os.getpid(), child.pid])
    time.sleep(1000)
