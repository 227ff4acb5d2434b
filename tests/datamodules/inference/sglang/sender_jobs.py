"""What ranks do in the tests of weights that several of them send."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

from app.strategies import DTAStrategy
from app.strategies.ranks.listening import LOOPBACK, listen
from callbacks import WeightSync
from datamodules.inference.export import checkpoint_weights
from datamodules.inference.protocol import WeightUpdate
from datamodules.inference.sglang import SGLangEngine
from datamodules.inference.sglang.launcher import API_KEY_VARIABLE
from datamodules.inference.weight_files import WeightFiles
from modules import PolicyModule
from tests.app.strategies.shard_jobs import Layout, Served, adamw, adapted
from tests.datamodules.inference.engine_suite import tiny_policy
from tests.helpers.tiny_policy import make_batch, parameters, trainer

DEADLINE_S = 60.0


def send_versions(
    urls: list[str],
    versions: int,
    leaves: int = 0,
    other: int = 0,
    breaks: int = 0,
    home: str = ".",
    files: str = "",
    blind: int = 0,
    elsewhere: str = "/",
    most: int = 0,
    key: str = "",
) -> list[dict[str, Any]]:
    """Brings servers to versions 1, 2, ... of `tiny_policy(seed=version)`; on rank 0 its report of the others.

    Args:
        leaves: this rank goes after the first version.
        other: this rank has another model. breaks: this one cannot make its weights.
        home: the working directory of all ranks but `blind`, which is `elsewhere`.
        files: a folder of `home` that has the weights.
        most: ranks that send; 0: all.
        key: of the servers.
    """
    rank = dist.get_rank()
    os.environ[API_KEY_VARIABLE] = key
    engine = SGLangEngine(urls=urls)
    word: list[Any] = [None]
    if rank == 0:
        engine.start(tiny_policy(), 0, seed=0)
        ranks = dist.get_world_size()
        word = [engine.senders.invite(ranks, ranks, most or None, LOOPBACK, partial(listen, LOOPBACK))]
    dist.broadcast_object_list(word)
    before = os.getcwd()
    try:
        os.chdir(elsewhere if rank and rank == blind else home)
        if rank == 0:
            report = _lead(engine, versions, files)
            dist.barrier()
            return report
        asked = word[0] is not None and engine.senders.join(word[0], rank)
        for version in range(1, versions + 1) if asked else ():
            policy = None if rank == breaks else tiny_policy(seed=version)
            if rank == other:
                policy.resize_token_embeddings(7)
            engine.senders.lend(version, None if files else partial(checkpoint_weights, policy), DEADLINE_S)
            if rank == leaves:
                engine.senders.leave()
                break
        dist.barrier()  # none goes before rank 0 has said what it sees
        return []
    finally:
        os.chdir(before)
        engine.senders.leave()
        engine.close()
        del os.environ[API_KEY_VARIABLE]


def _lead(engine: SGLangEngine, versions: int, files: str) -> list[dict[str, Any]]:
    for version in range(1, versions + 1):
        policy = tiny_policy(seed=version)
        if files:
            path, _ = WeightFiles(files).write(policy, version)
            seen = Path("/proc/self/cwd") / path.relative_to(os.getcwd())  # by each process as it is placed
            update = WeightUpdate(version, path=str(seen), read_here=True, deadline_s=DEADLINE_S)
        else:
            update = WeightUpdate(version, state_dict=checkpoint_weights(policy), deadline_s=DEADLINE_S)
        engine.update_weights(update)
    report: list[dict[str, Any]] = engine.health()["senders"]
    return report


class _Reports(Callback):
    """After `WeightSync`: what rank 0 says of the other ranks at each version."""

    def __init__(self) -> None:
        self.said: list[list[dict[str, Any]]] = []

    def on_train_batch_end(self, run: Any, *unused: Any) -> None:
        if run.is_global_zero:
            self.said.append(run.datamodule.engine.health()["senders"])


def fit(
    layout: Layout, urls: list[str], directory: Path, base: Path | None = None, senders: int | None = None
) -> tuple[list[list[dict[str, Any]]], dict[str, Tensor]]:
    """Two steps whose versions go to servers, with `base` of an adapter on the model there; what `_Reports` heard, and
    the trained weights."""
    torch.manual_seed(0)
    ranks, size, sharded = layout
    module, data, reports = (
        PolicyModule(adapted(base), optimizer=adamw),
        Served([make_batch(k, version=k) for k in range(2)]),
        _Reports(),
    )
    data.engine = SGLangEngine(urls=urls)
    strategy = DTAStrategy(group_size=size, shard_parameters=sharded)
    run = trainer(
        WeightSync("distributed", senders=senders),
        reports,
        devices=ranks,
        strategy=strategy,
        default_root_dir=directory,
    )
    try:
        run.fit(module, data)
    finally:
        data.engine.close()
    return reports.said, parameters(module.policy)
