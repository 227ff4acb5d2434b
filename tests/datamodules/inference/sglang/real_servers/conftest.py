"""Tests with real SGLang servers."""

from __future__ import annotations

import pytest

from datamodules.inference.sglang.launcher import ServerProcess
from tests.datamodules.inference.sglang.real_servers.servers import KEY, shared_server, skip_unless_wanted


@pytest.fixture(autouse=True)
def _wanted() -> None:
    skip_unless_wanted()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ServerProcess:
    """The shared server; its key is in the environment, where engines look for it."""
    monkeypatch.setenv("ARBORIST_SGLANG_API_KEY", KEY)
    return shared_server()
