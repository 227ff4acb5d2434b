"""Waits of a group that broadcasts weights, without a server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.weights import update_group
from datamodules.inference.sglang.weights.forms import Bucket
from datamodules.inference.sglang.weights.update_group import Deadline, UpdateGroup, new_name, on_thread
from datamodules.processes import deadline as deadline_module


@pytest.fixture
def group() -> Iterator[UpdateGroup]:
    group = UpdateGroup("http://127.0.0.1:1", new_name(), 2, torch.device("cpu"))
    yield group
    group.close()


def test_time_in_which_the_process_was_stopped_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that passes here is such time."""
    monkeypatch.setattr(deadline_module, "stopped_s", time.monotonic)
    monkeypatch.setattr(update_group, "awake", lambda: 0.0)
    deadline = Deadline(0.2)
    asyncio.run(on_thread(lambda left: time.sleep(0.5), deadline, "weights"))
    assert deadline.left("more of them") == 0.2 and not deadline.over


def test_what_hangs_costs_the_deadline() -> None:
    over = threading.Event()
    try:
        with pytest.raises(GenerationError, match=r"weights of /a/folder: not done within deadline_s = 0\.2 s"):
            asyncio.run(on_thread(lambda left: over.wait(60) and None, Deadline(0.2), "weights of /a/folder"))
        assert not over.is_set()
    finally:
        over.set()


def test_a_bucket_whose_file_is_gone_is_not_staged(group: UpdateGroup) -> None:
    bucket = Bucket(["a"], [[1]], "float32", None, files={"a": Path("/a/folder/model.safetensors")})
    with pytest.raises(GenerationError, match=r"^/a/folder/model\.safetensors cannot be read"):
        asyncio.run(group.stage(bucket, Deadline(30)))
