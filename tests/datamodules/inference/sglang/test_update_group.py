"""Waits of a group that broadcasts weights, without a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.weights.forms import Bucket
from datamodules.inference.sglang.weights.update_group import Deadline, UpdateGroup, new_name, on_thread


@pytest.fixture
def group() -> Iterator[UpdateGroup]:
    group = UpdateGroup("http://127.0.0.1:1", new_name(), 2, torch.device("cpu"))
    yield group
    group.close()


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
