"""Every fault of the soak once, at a random moment of a real run: nothing lost, nothing trained twice, nothing left."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.servers import Servers
from modules import ModelSource, build_model
from tests.datamodules.inference.sglang.real_servers.servers import skip_unless_wanted
from tests.faults.faults import FAULTS, WITH_SERVERS, WITHOUT_SERVERS
from tests.faults.fit import CONTEXT, MODEL, accounts
from tests.faults.outcome import Place

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    skip_unless_wanted()
    directory: Path = tmp_path_factory.mktemp("soak")
    build_model(ModelSource(config=MODEL)).save_pretrained(directory / "model")
    servers = Servers(directory / "model", CONTEXT, directory).start()
    yield Place(directory, servers)
    servers.close()


@pytest.mark.parametrize("fault", list(WITH_SERVERS))
def test_with_servers(fault: str, place: Place, request: pytest.FixtureRequest) -> None:
    check(fault, place)


@pytest.mark.parametrize("fault", list(WITHOUT_SERVERS))
def test_rewards(fault: str, tmp_path: Path) -> None:
    check(fault, Place(tmp_path))


def check(fault: str, place: Place) -> None:
    try:
        outcome = FAULTS[fault](place, random.Random())
    except PermissionError as error:
        pytest.skip(str(error))
    print(outcome)
    assert outcome.wrong == []
    counts = outcome.accounts
    assert outcome.steps > outcome.after_steps >= 1 and counts["trained"] == 2 * outcome.steps
    assert counts["admitted"] == sum(
        counts[name]
        for name in (
            "trained",
            "dropped_stale",
            "dropped_filtered",
            "failed",
            "skipped",
            "requeued",
            "running",
            "ready",
        )
    )


STATE = {
    "position": 6,
    "unfinished": [4, 5],
    "ready": {"groups": [(3, "1+1", 0, 4)]},
    "counters": {
        "admitted": 6,
        "trained": 2,
        "queued": 1,
        "running": 2,
        "dropped_stale": 0,
        "dropped_filtered": 0,
        "failed": 1,
        "skipped": 0,
        "requeued": 0,
    },
}


def test_accounts_that_balance() -> None:
    assert accounts([0, 1], STATE)["wrong"] == []


@pytest.mark.parametrize(
    ("trained", "change", "words"),
    [
        ([0, 1, 1], {}, "trained twice: [1]"),
        ([0, 4], {}, "still in the stream: [4]"),
        ([0], {}, "1 of 6 prompts are lost"),
        ([0, 1], {"unfinished": [4, 4]}, "twice in the stream"),
        ([0, 1], {"counters": STATE["counters"] | {"failed": 0}}, "1 groups admitted are unaccounted for"),
    ],
)
def test_accounts_that_do_not(trained: list[int], change: dict, words: str) -> None:
    assert any(words in one for one in accounts(trained, STATE | change)["wrong"])
