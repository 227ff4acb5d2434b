"""Fixtures of several test files here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.datamodules.pipeline.producers import Build, Factory


@pytest.fixture
def build() -> Iterator[Build]:
    """Makes started producers; everything is closed at the end."""
    factory = Factory()
    yield factory
    factory.close()
