"""Tree training on any number of ranks, and the same by plain torch (importable, hence not in a test file)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from app.batch import RolloutBatch
from app.strategies import DTAStrategy
from modules import PolicyModule, SFTModule, build_model
from tests.helpers.tiny_policy import Batches, make_batch, parameters, sgd, source, trainer

LEARNING_RATE = 1e-3
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "adamw": lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE),
}


def data(kind: str) -> list[RolloutBatch]:
    """Five batches of ordinary episodes ("episodes"), one sequence each ("one"), or one ten times ("identical")."""
    if kind == "episodes":
        return [make_batch(k) for k in range(5)]
    alone = [make_batch(k, groups=1, episodes=2).select([0]) for k in range(5)]
    return alone if kind == "one" else [batch.select([0] * 10) for batch in alone]


def imitate(devices: int, kind: str, optimizer: str) -> dict[str, Tensor]:
    """Parameters after five steps of `SFTModule`."""
    torch.manual_seed(0)
    module = SFTModule(source(), optimizer=OPTIMIZERS[optimizer])
    trainer(devices=devices, strategy=DTAStrategy()).fit(module, Batches(data(kind)))
    return parameters(module)


def reinforce(devices: int, groups: int, minibatches: int, epochs: int) -> dict[str, Tensor]:
    """Parameters after three batches of `PolicyModule`, each `minibatches` x `epochs` steps of SGD."""
    torch.manual_seed(0)
    module = PolicyModule(source(), optimizer=sgd, minibatches=minibatches, epochs=epochs)
    batches = [make_batch(k, groups=groups, version=max(0, k - 1)) for k in range(3)]
    trainer(devices=devices, strategy=DTAStrategy()).fit(module, Batches(batches))
    return parameters(module)


def untrained() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"policy.{name}": parameter.detach() for name, parameter in build_model(source()).named_parameters()}


def imitate_plainly(kind: str, optimizer: str) -> dict[str, Tensor]:
    """The same as `imitate`: transformers, one sequence at a time, and a plain optimizer."""
    torch.manual_seed(0)
    model = build_model(source())
    stepper: Any = OPTIMIZERS[optimizer](model.parameters())
    for batch in data(kind):
        stepper.zero_grad()
        for tokens, mask in zip(batch.sequences(), batch.split(batch.loss_mask)):
            logits = model(tokens[None]).logits[0, :-1]
            losses = functional.cross_entropy(logits, tokens[1:], reduction="none")
            (losses[mask[1:]].sum() / batch.loss_mask.sum()).backward()
        stepper.step()
    return {f"policy.{name}": parameter.detach() for name, parameter in model.named_parameters()}
