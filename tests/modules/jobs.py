"""What ranks run in the tests here (importable, hence not in a test file)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from app.batch import RolloutBatch
from app.strategies import DTAStrategy
from modules import ActorCriticModule, PolicyModule, SFTModule
from tests.modules.held_out import Sets
from tests.modules.tiny import Batches, Metrics, make_batch, parameters, sgd, source, trainer

Result = tuple[dict[str, Tensor], list[dict[str, float]], dict[str, float]]


def data(kind: str) -> list[RolloutBatch]:
    """Ordinary batches, three ("groups") or two ("two"), one of a single group, so that some steps have one sequence
    ("one"), or pairs of episodes ("pairs")."""
    if kind == "pairs":
        return [make_batch(k, groups=4, episodes=2, version=max(0, k - 1)) for k in range(2)]
    if kind == "one":
        return [make_batch(0, groups=1, episodes=2)]
    return [make_batch(k, version=max(0, k - 1)) for k in range(3 if kind == "groups" else 2)]


def train(devices: int, kind: str, module: str = "policy", **options: Any) -> Result:
    """Parameters, metrics of every step, and validation metrics."""
    torch.manual_seed(0)
    make = {"policy": PolicyModule, "critic": ActorCriticModule, "sft": SFTModule}[module]
    made = make(source(), optimizer=sgd, **options)
    metrics = Metrics()
    held_out: list[RolloutBatch | None] = [make_batch(7), make_batch(8, groups=1)]
    run = trainer(metrics, devices=devices, strategy=DTAStrategy())
    run.fit(made, Batches(data(kind), held_out))
    assert made.policy_version == len(data(kind))
    validation = {name: float(v) for name, v in run.callback_metrics.items() if name.startswith("val/")}
    return parameters(made), metrics.steps, validation


def validate(devices: int) -> dict[str, float]:
    """What is logged of two named sets."""
    run = trainer(devices=devices, strategy=DTAStrategy())
    run.validate(PolicyModule(source(), optimizer=sgd), Sets(), verbose=False)
    return {name: float(value) for name, value in run.callback_metrics.items()}


def plain_ddp() -> None:
    """Several processes under a strategy that averages gradients."""
    run = trainer(devices=2, strategy="ddp")
    run.fit(PolicyModule(source(), optimizer=sgd), Batches(data("one")))


def broken() -> None:
    """Rank 0 owns a batch that cannot be trained on; every rank has to hear of it."""
    batch = make_batch()
    batch.loss_mask[:] = False
    trainer(devices=2, strategy=DTAStrategy()).fit(PolicyModule(source(), optimizer=sgd), Batches([batch]))
