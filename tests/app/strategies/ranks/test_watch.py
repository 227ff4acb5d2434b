"""Dead, failed and missing ranks are named, and end the run where they have to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from app.strategies.ranks import watch as watch_module
from app.strategies.ranks.watch import Beat
from tests.app.strategies.ranks import watch_jobs as jobs
from tests.helpers.rank_pool import RankError, RankPool


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks of their own: some die."""
    pool = RankPool(2)
    yield pool
    pool.close()


def test_a_hung_collective_is_named_with_who_is_missing(pair: RankPool, tmp_path: Path) -> None:
    message, printed = pair.run(jobs.one_is_missing, over=tmp_path / "over")[0]
    for text in (message, printed):
        assert "sum over ranks" in text and "collective 3" in text
        assert "missing: rank 1 (host " in text and "lost_in_thought" in text
    assert message.startswith("rank 0 of 2: sum over ranks failed (collective 3)")
    assert "rank 0 has waited" in printed


def test_a_slow_rank_is_left_alone(pair: RankPool) -> None:
    assert pair.run(jobs.slow_but_alive) == ["2.0", "2.0"]


def test_a_failed_rank_ends_the_others_in_its_own_words(pair: RankPool, tmp_path: Path) -> None:
    name, printed = pair.run(jobs.fail_while_the_other_computes, over=tmp_path / "over")[0]
    assert name == "KeyboardInterrupt"
    assert "rank 0: this run ends, because rank 1" in printed and "ValueError: the reward of prompt-7 is NaN" in printed


def test_a_dead_rank_is_named_in_the_collective_it_left(pair: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pair.run(jobs.die_while_the_other_waits)
    assert "sum over ranks failed (collective 3)" in caught.value.messages[0]
    assert "rank 1 (host" in caught.value.messages[0] and "when it died" in caught.value.messages[0]


def test_a_dead_rank_is_named_in_a_sum_that_began_early(pair: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pair.run(jobs.die_before_its_sums)
    said = caught.value.messages[0]
    assert re.search(r"reduce-scatter of gradients \(0\.bias\) failed \(collective 3\)", said), said
    assert "rank 1 (host" in said and "when it died" in said


def test_a_dead_rank_is_named_in_the_layer_that_waits_for_it(pair: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pair.run(jobs.die_between_two_layers)
    assert "gather of the parameters of 'layers.1' in group 0 failed" in caught.value.messages[0]
    assert "rank 1 (host" in caught.value.messages[0] and "when it died" in caught.value.messages[0]


def test_a_dead_rank_ends_a_rank_that_computes(pair: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the process died"):
        pair.run(jobs.die_while_the_other_computes, report=tmp_path / "report", grace=40.0)
    said = (tmp_path / "report").read_text()
    assert said.startswith("KeyboardInterrupt rank 0: this run ends, because rank 1 (host ")
    assert "lost_in_thought) when it died" in said


@pytest.mark.slow
def test_a_rank_in_a_container_of_the_same_host_name_is_left_alone() -> None:
    if subprocess.run([*jobs.APART, "true"], capture_output=True).returncode != 0:
        pytest.skip("this system makes no namespaces for its users")
    code = "from tests.app.strategies.ranks.watch_jobs import beside_a_container; beside_a_container()"
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=300, capture_output=True, text=True)
    assert done.stdout.startswith("goes on") and done.returncode == 0, done.stderr
    assert "this run ends" not in done.stderr


def test_a_process_number_counts_on_its_own_machine_alone() -> None:
    """Of a rank that beat a moment ago, and whose number no process has here."""
    watch = jobs.two_watches()[0]
    dead = Beat(1, watch._beat.host, 2**22 + 1, machine=watch._beat.machine)
    watch._seen[1] = (dead, time.monotonic())
    assert watch._beat.machine and watch._is_gone(dead)
    assert not watch._is_gone(replace(dead, machine="another"))
    assert not watch._is_gone(replace(dead, pid=os.getpid()))
    assert watch._is_gone(replace(dead, host="renamed"))


def test_a_rank_that_was_stopped_takes_nobody_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a scheduler that suspends the job on all its machines; then the others have as long as ever."""
    watch, passed_s = jobs.two_watches()[0], 0.0
    other = Beat(1, "elsewhere", 1, machine="another")

    class Clock:
        def monotonic(self) -> float:
            return 1000.0 + passed_s

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal passed_s
            passed_s += 600.0
            return self.is_set()

    monkeypatch.setattr(watch_module, "time", Clock())
    watch._seen[1], watch._closed = (other, 1000.0), Stopped()
    gone: list[bool] = []

    def look() -> None:
        nonlocal passed_s
        gone.append(watch._is_gone(other))
        passed_s += 2 * watch._death_timeout
        gone.append(watch._is_gone(other))
        watch._closed.set()

    monkeypatch.setattr(watch, "_look", look)
    watch._run()
    assert gone == [False, True]


def test_what_a_stranger_writes_is_reported_and_ignored(capfd: pytest.CaptureFixture[str]) -> None:
    """Two ranks in this process; a verdict would interrupt it."""
    watches = jobs.two_watches()
    with jobs.watching(*watches) as port:
        stranger = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
        for key in ("verdict", "1"):
            stranger.set(key, "an intruder said so\x1b[2J")
        said = jobs.wait_for(
            capfd, "rank 1: 'verdict' in the store at 127.0.0.1 is ignored: no rank of this run wrote it"
        )
        assert "an intruder" not in said and "\x1b" not in said
        before = jobs.heard(watches[0])
        assert jobs.becomes(lambda: jobs.heard(watches[0]) > before)


def test_what_is_no_beat_is_reported_and_ignored(capfd: pytest.CaptureFixture[str]) -> None:
    watches = jobs.two_watches()
    with jobs.watching(*watches):
        for text, error in (("no JSON", "JSONDecodeError"), ('{"rank": 1, "colour": "blue"}', "TypeError")):
            line = f"rank 0: what rank 1 says of itself is ignored, it is no beat ({error}"
            jobs.wait_for(capfd, line, meanwhile=lambda text=text: watches[1]._set("1", text))
        before = jobs.heard(watches[0])
        assert jobs.becomes(lambda: jobs.heard(watches[0]) > before)


def test_a_watch_outlives_its_errors(capfd: pytest.CaptureFixture[str]) -> None:
    watches = jobs.two_watches(jobs.Stumbling())
    with jobs.watching(*watches):
        jobs.wait_for(capfd, "rank 1: its watch of the other ranks goes on after OSError: no space left on the moon")
        assert jobs.becomes(lambda: jobs.heard(watches[0]) > 1)  # its first beat is of the start


def test_nothing_is_printed_that_a_terminal_obeys() -> None:
    beat = Beat(1, "host\x1b]0;owned\x07", 7, failed="Error: a\u202eb\r\n\tnext")
    assert str(beat) == "rank 1 (host host\\x1b]0;owned\\x07, process 7) failed: Error: a\\u202eb\\r\n\tnext"
