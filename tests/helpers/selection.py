"""Which tests run: those that the installed packages can, beyond the lowest versions that pyproject.toml declares; and
of many cases some of each kind in `make test`, all in `make test-all`.

Promises: only what is older than the version that is named skips, with a reason that says so; where the version is
installed, what it is said to bring has to be there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import transformers
from packaging.version import Version

SEES = "5.18"
"""The first whose models take features of pictures that were made before, and that reads processors with PIL alone."""

EXACT_ROUTERS = "5.24"
"""The first whose GLM-4-MoE says that the weights of its routers stay in float32."""


def lack(since: str) -> str:
    """What the installed transformers lacks to be that version; "" for nothing."""
    have = transformers.__version__
    return "" if Version(have) >= Version(since) else f"needs transformers {since} or newer, and this is {have}"


def needs_transformers(since: str) -> pytest.MarkDecorator:
    """A mark: skipped with an older one."""
    return pytest.mark.skipif(bool(lack(since)), reason=lack(since) or "installed")


def skip_without(since: str) -> None:
    """Ends the test that asks, skipped, with an older transformers."""
    if said := lack(since):
        pytest.skip(said)


def some(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters of a test (of several arguments: tuples), those that are not among `quick` marked slow."""
    values = list(values)
    strange = [one for one in quick if one not in values]
    assert not strange, f"{strange} are no cases of this test: nothing of them would run"
    marks = {True: [], False: pytest.mark.slow}
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=marks[one in quick]) for one in values]
