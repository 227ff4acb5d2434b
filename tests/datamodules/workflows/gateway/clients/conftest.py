"""What tests of frameworks share: nothing of theirs leaves the machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def nothing_leaves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their telemetry is off, and a connection to anywhere else fails the test."""
    for name, value in {
        "LANGSMITH_TRACING": "false",
        "LANGCHAIN_TRACING_V2": "false",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
    }.items():
        monkeypatch.setenv(name, value)
    elsewhere: list[Any] = []
    found, real = socket.getaddrinfo, socket.socket.connect

    def look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in ("127.0.0.1", "::1", "localhost", None):
            elsewhere.append(host)
            raise OSError(f"the test may not reach {host}")
        return found(host, *args, **kwargs)

    def connect(self: socket.socket, address: Any) -> Any:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1"):
            elsewhere.append(address)
            raise OSError(f"the test may not reach {address}")
        return real(self, address)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket.socket, "connect", connect)
    yield
    assert elsewhere == []
