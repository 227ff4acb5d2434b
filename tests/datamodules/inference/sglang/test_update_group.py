"""Waits of a group that broadcasts weights, without a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.weights.update_group import Deadline, UpdateGroup


@pytest.fixture
def group() -> Iterator[UpdateGroup]:
    group = UpdateGroup("http://127.0.0.1:1", 2, torch.device("cpu"))
    yield group
    group.close()


def test_files_that_hang_cost_the_deadline(group: UpdateGroup) -> None:
    over = threading.Event()

    def hang() -> torch.Tensor:
        over.wait(60)
        return torch.zeros(1)

    try:
        with pytest.raises(GenerationError, match=r"weights of /a/folder: not done within deadline_s = 0\.2 s"):
            asyncio.run(group.read(hang, Deadline(0.2), "weights of /a/folder"))
        assert not over.is_set()
    finally:
        over.set()


def test_what_is_read_and_what_cannot_be(group: UpdateGroup) -> None:
    def fail() -> torch.Tensor:
        raise GenerationError("model.safetensors cannot be read")

    read = asyncio.run(group.read(lambda: torch.ones(2), Deadline(30), "weights"))
    assert read.tolist() == [1, 1]
    with pytest.raises(GenerationError, match=r"^model\.safetensors cannot be read"):
        asyncio.run(group.read(fail, Deadline(30), "weights"))
