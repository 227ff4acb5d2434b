"""Settings of the tree tests: one torch thread (the models are tiny), reproducible hypothesis examples.

The default profile draws few examples, the same on every run; `make test-all` draws more (HYPOTHESIS_PROFILE=ci), and
HYPOTHESIS_PROFILE=thorough many more, random ones.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from app.tree import TreeEngine

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
for _name, _count in (("quick", 30), ("ci", 60), ("thorough", 600)):
    settings.register_profile(
        _name,
        derandomize=_name != "thorough",
        deadline=None,
        max_examples=_count,
        print_blob=True,
        suppress_health_check=_CHECKS,
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="module", autouse=True)
def no_self_check() -> Iterator[None]:
    """Tests compare with oracles of their own; those of the self-check ask for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeEngine, "__init__", functools.partialmethod(TreeEngine.__init__, self_check=False))
        yield


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrix products only lose time to a thread pool."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def interpreted() -> None:
    """Triton's kernels run in its interpreter, on CPUs: slow, and the arithmetic of the compiled ones."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here; tests marked gpu run them")
    pytest.importorskip("triton", reason="needs the package triton (in the dev extra on Linux)")
