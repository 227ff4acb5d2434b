"""What ranks run over a group whose work is done later than it is waited for (importable, hence not in a test file)."""

from __future__ import annotations

import contextlib
import io
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from app.strategies.ranks.collectives import CollectiveError, Communicator
from app.strategies.ranks.watch import RankWatch
from tests.app.strategies import toy_module
from tests.app.strategies.ranks.late import LateGroup, as_default, late_group
from tests.app.strategies.ranks.watch_jobs import becomes, lost_in_thought


def miss_a_gradient_exchange(over: Path) -> tuple[list[str | None], str, str]:
    """Rank 1 stays away from the second of two buckets. On rank 0: what its beats said it was in (before, while it is
    only enqueued, after), its error, and what it printed meanwhile."""
    dist.barrier()
    group = late_group(timeout=30.0)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    ranks = Communicator(group, torch.device("cpu"), control, timeout=6.0)
    ranks.watch = RankWatch(ranks.rank, ranks.size, "127.0.0.1", ranks.progress, 6.0, 20.0)
    ranks.watch.start(ranks.broadcast_(ranks.watch.invitation(), "the store"))
    flat = torch.full((4,), ranks.rank + 1.0)
    ranks.start_sum_(flat, "gradients (bucket 0)").wait()
    mine = ranks.slice_of(flat)
    ranks.settle()
    assert mine.tolist() == [3.0, 3.0]
    places, message, said = [_place(ranks)], "", io.StringIO()
    if ranks.rank == 1:
        lost_in_thought(60.0, over)
    else:
        with contextlib.redirect_stderr(said):
            ranks.start_sum_(flat, "gradients (bucket 1)").wait()  # returns at once
            ranks.all_gather_(flat, "parameters (bucket 0)")
            places.append(_place(ranks))
            try:
                ranks.sum_float(mine.sum(), "gradient norm")
            except CollectiveError as error:
                message = str(error)
        over.touch()
    ranks.watch.close()
    return places, message, said.getvalue()


def _place(ranks: Communicator) -> str | None:
    current = ranks.progress.current
    return None if current is None else f"{current.number}: {current.what}"


def hang_in_the_device(over: Path) -> str:
    """Rank 0's thread is kept by its device and never asks; what is printed before it is interrupted."""
    dist.barrier()
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    ranks = Communicator(late_group(timeout=40.0), torch.device("cpu"), control)
    ranks.watch = RankWatch(ranks.rank, ranks.size, "127.0.0.1", ranks.progress, 1.0, 20.0)
    ranks.watch.start(ranks.broadcast_(ranks.watch.invitation(), "the store"))
    said = io.StringIO()
    if ranks.rank == 0:
        ranks.start_sum_(torch.zeros(4), "gradients").wait()
        with contextlib.redirect_stderr(said):
            becomes(lambda: "rank 0 has waited" in said.getvalue())
        over.touch()
    else:
        lost_in_thought(120.0, over)
    ranks.watch.close()
    return said.getvalue()


def fit(directory: Path, module: str) -> tuple[dict[str, Any], list[str]]:
    """The toy module's, or a policy's, over such a group; what was asked of the group."""
    group: LateGroup = late_group(timeout=60.0, prompt=True)
    with as_default(group):
        if module == "toy":
            result: Any = toy_module.fit(directory, devices=2, steps=3, data_steps=3, limit_val_batches=1)
            return result["parameters"], group.operations
        from tests.modules.ranks.training_jobs import train

        parameters, _, validation = train(devices=2, kind="two", minibatches=2)
        return {**parameters, **validation}, group.operations
