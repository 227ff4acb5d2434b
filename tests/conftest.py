"""What every test may rely on: nothing left over from a run in this process, and ranks that are up already.

Lightning leaves a seed, a launcher's variables (LOCAL_RANK, MASTER_PORT), a process group and the rank that a place in
a cluster was last given behind. A later run would take another seed from them, believe that somebody else starts its
ranks and wait for them, or write nothing because it is not rank 0. In one process tests with whole runs come last all
the same; where several share the files, those that take longest come first, so that all end together.

Hypothesis draws few examples, the same on every run; `make test-all` draws more (HYPOTHESIS_PROFILE=ci), and
HYPOTHESIS_PROFILE=thorough many more, random ones.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if not Path("/dev/nvidiactl").exists():  # read when Triton is imported, which torch and others below may do
    os.environ.setdefault("TRITON_INTERPRET", "1")
if gc.isenabled():  # until all tests are collected: imports leave next to no garbage, and each search goes through all
    gc.disable()

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from tests.helpers.rank_pool import RankPool

MODULES = "tests/modules/"
WHOLE_RUNS = ("tests/app/cli/", "tests/docs/")
SLOW = 10  # times as long as another takes a test that is marked `slow`, as a rule

for _name, _count in (("quick", 30), ("ci", 40), ("thorough", 600)):
    settings.register_profile(
        _name,
        derandomize=_name != "thorough",
        deadline=None,
        max_examples=_count,
        print_blob=True,
        # Of time, on machines that others use, and of how much is drawn.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script; the ranks of tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _as_it_was() -> Iterator[None]:
    before = dict(os.environ)
    had_group = dist.is_initialized()
    rank = getattr(rank_zero_only, "rank", None)
    yield
    if rank is not None:
        rank_zero_only.rank = rank
    if dist.is_initialized() and not had_group:
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _a_clean_process() -> Iterator[None]:
    with _as_it_was():
        yield


@pytest.fixture(scope="module", autouse=True)
def _a_clean_module() -> Iterator[None]:
    """What a run that the tests of a file share leaves behind: it began before any of them."""
    with _as_it_was():
        yield


@pytest.fixture(scope="module", autouse=True)
def no_self_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of modules compare with loops of their own: the engine's self-check would be a third of each run in this
    process. Those of the self-check override this."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.nodeid.startswith(MODULES):
            patch.setattr("modules.ranks.RankWork.verify_together", lambda *unused: set())
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        effort: Counter[Path] = Counter()
        for item in items:
            effort[item.path] += SLOW if item.get_closest_marker("slow") else 1
        items.sort(key=lambda item: -effort[item.path])
    else:
        items.sort(key=lambda item: item.nodeid.startswith(WHOLE_RUNS))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()  # a million objects that stay: each full collection would look through them, half a second
    gc.enable()
    atexit.register(gc.unfreeze)  # Triton's would be reported as leaks


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test was run once more (`--reruns`): else nobody would ever see what failed at first."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"at first, {report.nodeid}")
        terminalreporter.line(report.longreprtext)


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """Pools of ranks live as long as the session: starting processes costs more than most tests."""
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture
def pool(request: pytest.FixtureRequest, two_ranks: RankPool, four_ranks: RankPool) -> RankPool:
    """Two ranks or four, by an indirect parameter."""
    return two_ranks if request.param == 2 else four_ranks
