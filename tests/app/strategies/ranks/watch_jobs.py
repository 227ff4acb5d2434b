"""What ranks run in the tests of the watch (importable, hence not in a test file)."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from app.strategies.ranks.collectives import Communicator
from app.strategies.ranks.groups import GroupRanks
from app.strategies.ranks.watch import Progress, RankWatch
from app.strategies.shards import shard_models
from app.strategies.zero1 import ShardedOptimizer
from app.tree import PrefixTree, TreeEngine
from tests.app.tree import models


def watched(timeout: float, death_timeout: float) -> Communicator:
    dist.barrier()  # nobody is late because it only just started
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    ranks = Communicator(group, torch.device("cpu"))
    watch = RankWatch(ranks.rank, ranks.size, "127.0.0.1", ranks.progress, timeout, death_timeout)
    watch.start(ranks.broadcast_(watch.invitation(), "the store"))
    ranks.watch = watch
    return ranks


def lost_in_thought(seconds: float, over: Path | None = None) -> None:
    """For so long, or until the file `over` is there: until another rank has seen what it is to see, however long that
    takes it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not (over is not None and over.exists()):
        time.sleep(0.05)


def die_while_the_other_waits() -> None:
    ranks = watched(timeout=50.0, death_timeout=20.0)
    ranks.sum(torch.ones(1))
    if ranks.rank == 1:
        os._exit(3)
    ranks.sum(torch.ones(1))


def die_before_its_sums() -> None:
    """While the other rank has begun the first of them, in its backward."""
    ranks = watched(timeout=50.0, death_timeout=20.0)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    sharded = ShardedOptimizer(torch.optim.SGD(layers.parameters()), layers, ranks, bucket_elements=8)
    if ranks.rank == 1:
        os._exit(3)
    total = layers(torch.ones(2, 3)).sum()
    sharded.sums.completing(layers.parameters(), [total])
    total.backward()
    assert ranks.progress.unfinished is not None
    sharded.reduce()


def die_between_two_layers() -> None:
    """Of a model in shards, in the middle of a pass."""
    ranks = watched(timeout=50.0, death_timeout=20.0)
    group = GroupRanks(ranks, 2, timedelta(seconds=50))
    model = models.make("qwen3")
    shard_models(model, group, lambda tensor, name: None)
    if ranks.rank == 1:
        model.model.layers[0].register_forward_hook(lambda *_: os._exit(3))
    TreeEngine(model, group=group, self_check=False).forward(PrefixTree.build([[1, 2, 3, 4]]))


def die_while_the_other_computes(report: Path) -> None:
    """Rank 0 writes down what interrupted it and what was printed."""
    ranks = watched(timeout=50.0, death_timeout=3.0)
    ranks.sum(torch.ones(1))
    if ranks.rank == 1:
        lost_in_thought(1.0)
        os._exit(3)
    report.write_text(" ".join(_interrupted(ranks)))


def fail_while_the_other_computes(over: Path) -> tuple[str, str]:
    ranks = watched(timeout=50.0, death_timeout=3.0)
    ranks.sum(torch.ones(1))
    if ranks.rank == 0:
        found = _interrupted(ranks)
        over.touch()
        return found
    assert ranks.watch is not None
    ranks.watch.fail(ValueError("the reward of prompt-7 is NaN"))
    lost_in_thought(60.0, over)
    return "", ""


def _interrupted(ranks: Communicator) -> tuple[str, str]:
    said, name = io.StringIO(), "nothing"
    with contextlib.redirect_stderr(said):
        try:
            lost_in_thought(40.0)
        except KeyboardInterrupt as error:
            name = type(error).__name__
    assert ranks.watch is not None
    ranks.watch.close()
    return name, said.getvalue()


def one_is_missing(over: Path) -> tuple[str, str]:
    """Rank 0's error, and what it printed while it waited."""
    ranks = watched(timeout=6.0, death_timeout=20.0)
    ranks.sum(torch.ones(1))
    said, message = io.StringIO(), ""
    if ranks.rank == 1:
        lost_in_thought(60.0, over)
    else:
        with contextlib.redirect_stderr(said):
            try:
                ranks.sum(torch.ones(1))
            except RuntimeError as error:
                message = str(error)
        over.touch()
    assert ranks.watch is not None
    ranks.watch.close()
    return message, said.getvalue()


def slow_but_alive() -> str:
    """Rank 1 lets rank 0 wait for longer than the death timeout."""
    ranks = watched(timeout=60.0, death_timeout=4.0)
    if ranks.rank == 1:
        lost_in_thought(5.0)
    total = ranks.sum(torch.ones(1))
    assert ranks.watch is not None
    ranks.watch.close()
    return str(total.item())


def two_watches(second: Progress | None = None) -> tuple[RankWatch, RankWatch]:
    """Of two ranks, both in this process. `second`: the progress of rank 1."""
    progress = (Progress(), second or Progress())
    first, other = (RankWatch(rank, 2, "127.0.0.1", progress[rank], 60.0, 60.0) for rank in range(2))
    first._interval = other._interval = 0.2  # they beat often, but a busy machine kills nobody
    return first, other


def heard(watch: RankWatch) -> int:
    """The number of rank 1's last beat that was heard."""
    return watch._seen[1][0].number if 1 in watch._seen else 0


@contextlib.contextmanager
def watching(*watches: RankWatch) -> Iterator[int]:
    """They run; the port of their store."""
    invitations = [watch.invitation() for watch in watches]
    with contextlib.ExitStack() as ends:  # one that is left open ends this process once it misses the other
        for watch in watches:
            watch.start(invitations[0])
            ends.callback(watch.close)
        yield int(invitations[0][0])


APART = ["unshare", "-Urpf", "--mount-proc"]
"""Before a command: it runs under this host's name, and numbers its processes anew."""


def beside_a_container() -> None:
    """Rank 0, whose rank 1 is in a container that numbers its own processes; says whether it heard ten beats of it. To
    be run in a process of its own: a verdict would end it."""
    first = two_watches()[0]
    invitation = first.invitation()
    told = ",".join(map(str, invitation.tolist()))
    code = f"from tests.app.strategies.ranks.watch_jobs import in_a_container; in_a_container([{told}])"
    with subprocess.Popen([*APART, sys.executable, "-c", code], stdin=subprocess.PIPE, text=True) as other:
        first.start(invitation)
        try:
            print("goes on" if becomes(lambda: heard(first) > 10) else "heard nothing", first._seen[1][0].pid)
        finally:
            first.close()
            other.communicate("enough")


def in_a_container(invitation: list[int]) -> None:
    """Rank 1, until its standard input ends. Its number, which means nothing outside, is one that nobody has there."""
    second = two_watches()[1]
    second._beat.pid = 2**22 + 1  # more than Linux gives
    second.start(torch.tensor(invitation))
    sys.stdin.read()
    second.close()


class Stumbling(Progress):
    """The first beat of the thread that watches it fails."""

    looks = 0

    @property
    def current(self) -> tuple[str, float] | None:
        self.looks += 1
        if self.looks == 2:
            raise OSError("no space left on the moon")
        return None

    @current.setter
    def current(self, value: tuple[str, float] | None) -> None:
        pass


def becomes(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def wait_for(capture: pytest.CaptureFixture[str], text: str, meanwhile: Callable[[], None] = lambda: None) -> str:
    """What was printed to stderr until this was; `meanwhile` is called again and again."""
    found: list[str] = []

    def complete() -> bool:
        meanwhile()
        found.append(capture.readouterr().err)
        return text in "".join(found)

    assert becomes(complete), "".join(found)
    return "".join(found)
