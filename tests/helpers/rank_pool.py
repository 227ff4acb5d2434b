"""Processes that stay up for a test session and run functions together, as ranks of one gloo process group.

They see the environment torchrun would give them, so a real Lightning Trainer works in them too. Every job has a
deadline; after a death or a missed deadline all ranks are killed (the others may hang in a collective) and the next job
starts fresh ones. Ranks are forks of one process that has imported `IMPORTED`: an import takes seconds a rank.
A job leaves no group behind, and ranks that wait for one have none: gloo has threads for each that wake a hundred
times a second, which took most of both cores once a few hundred jobs had left theirs.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

DEADLINE = 240.0  # seconds a job may take, where many others run
IMPORTED = [
    *("torch", "torch.distributed.tensor", "torch.utils.flop_counter", "transformers", "peft", "lightning.pytorch"),
    *("app.cli", "modules", "tests.app.tree.parity", "tests.app.tree.states.hybrids"),  # two seconds a rank
]


class RankError(AssertionError):
    """A rank raised; `messages` holds what each failed rank said, by rank."""

    def __init__(self, messages: dict[int, str]) -> None:
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in messages.items()))
        self.messages = messages


def _serve(rank: int, size: int, store: str, connection: Connection, environment: dict[str, str]) -> None:
    environment.pop("PL_GLOBAL_SEED", None)  # of a run in the process that asks, which every later one would take
    os.environ.clear()
    os.environ.update(
        environment,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # never opened: the group below meets in a file
        TORCHELASTIC_RUN_ID="tests",
        CUDA_VISIBLE_DEVICES="",
    )
    import torch
    import torch.distributed as dist
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    rank_zero_only.rank = rank  # which the process this one is a fork of read from an environment without ranks
    torch.set_num_threads(1)
    own = dict(os.environ)
    for number in itertools.count():
        function, arguments = connection.recv()
        os.environ.clear()  # a job may have left a seed for all later runs
        os.environ.update(own)
        if number == 0:
            gc.freeze()  # what is imported by now: collections after jobs, a quarter of a second each, leave it out
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}{number}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=DEADLINE),
        )
        try:
            connection.send((True, function(**arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        gc.collect()  # the threads of a group end with the last reference to it
        if dist.is_initialized():
            dist.destroy_process_group()
        # It keeps meshes by their shape, with the names of groups that are gone or, by now, another's.
        _clear_sharding_prop_cache()


class RankPool:
    """`size` ranks. `run(function, **arguments)` calls a module-level function on every one and returns their"
    " results by rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(
        self, function: Callable[..., Any], deadline: float = DEADLINE, grace: float = 5.0, **arguments: Any
    ) -> list[Any]:
        if not all(process.is_alive() for process in self._processes):
            self.close()
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, arguments))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        pending = dict(enumerate(self._connections))
        end = time.monotonic() + deadline
        while pending and time.monotonic() < end:
            for ready in wait(list(pending.values()), timeout=max(0.0, end - time.monotonic())):
                rank = self._connections.index(ready)
                try:
                    succeeded, value = ready.recv()
                except EOFError:
                    succeeded, value = False, "the process died"
                (results if succeeded else errors)[rank] = value
                del pending[rank]
            if errors:  # what the other ranks have to say comes soon, or never
                end = min(end, time.monotonic() + grace)
        if errors or pending:
            if pending or "the process died" in errors.values():
                self.close()
            raise RankError(errors or dict.fromkeys(pending, f"no answer from {function.__name__} in {deadline:.0f} s"))
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10.0)
        self._processes, self._connections = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        store = str(Path(tempfile.mkdtemp(prefix="ranks-")) / "store")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, store, theirs, dict(os.environ)), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
