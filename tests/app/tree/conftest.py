"""Settings of the tree tests: one torch thread (the models are tiny), and no self-check but where it is tested."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from app.tree import TreeEngine


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
    from tests.helpers.interpreter import lack

    if said := lack():
        pytest.skip(said)
