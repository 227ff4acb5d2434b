"""What ranks run in the tests of the watch (importable, hence not in a test file)."""

from __future__ import annotations

import contextlib
import io
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from app.strategies.collectives import Communicator
from app.strategies.watch import RankWatch


def watched(timeout: float, death_timeout: float) -> Communicator:
    dist.barrier()  # nobody is late because it only just started
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    ranks = Communicator(group, torch.device("cpu"))
    watch = RankWatch(ranks.rank, ranks.size, "127.0.0.1", ranks.progress, timeout, death_timeout)
    port = torch.tensor([watch.open_store() if ranks.rank == 0 else 0])
    watch.start(int(ranks.broadcast_(port, "the port")))
    ranks.watch = watch
    return ranks


def lost_in_thought(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)


def die_while_the_other_waits() -> None:
    ranks = watched(timeout=50.0, death_timeout=20.0)
    ranks.sum(torch.ones(1))
    if ranks.rank == 1:
        os._exit(3)
    ranks.sum(torch.ones(1))


def die_while_the_other_computes(report: Path) -> None:
    """Rank 0 writes down what interrupted it and what was printed."""
    ranks = watched(timeout=50.0, death_timeout=3.0)
    ranks.sum(torch.ones(1))
    if ranks.rank == 1:
        lost_in_thought(1.0)
        os._exit(3)
    report.write_text(" ".join(_interrupted(ranks)))


def fail_while_the_other_computes() -> tuple[str, str]:
    ranks = watched(timeout=50.0, death_timeout=3.0)
    ranks.sum(torch.ones(1))
    if ranks.rank == 0:
        return _interrupted(ranks)
    assert ranks.watch is not None
    ranks.watch.fail(ValueError("the reward of prompt-7 is NaN"))
    lost_in_thought(6.0)
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


def one_is_missing() -> tuple[str, str]:
    """Rank 0's error, and what it printed while it waited."""
    ranks = watched(timeout=6.0, death_timeout=20.0)
    ranks.sum(torch.ones(1))
    said, message = io.StringIO(), ""
    if ranks.rank == 1:
        lost_in_thought(10.0)
    else:
        with contextlib.redirect_stderr(said):
            try:
                ranks.sum(torch.ones(1))
            except RuntimeError as error:
                message = str(error)
    assert ranks.watch is not None
    ranks.watch.close()
    return message, said.getvalue()


def slow_but_alive() -> str:
    """Rank 1 lets rank 0 wait for longer than the death timeout."""
    ranks = watched(timeout=30.0, death_timeout=1.0)
    if ranks.rank == 1:
        lost_in_thought(4.0)
    total = ranks.sum(torch.ones(1))
    assert ranks.watch is not None
    ranks.watch.close()
    return str(total.item())
