"""A policy whose second layer works on the token before, whichever sequence that is of: only alone is a sequence
computed right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from app.strategies import DTAStrategy
from modules import SFTModule
from tests.helpers.tiny_policy import Batches, Metrics, make_batch, parameters, sgd, source, trainer


class BeforeToken(nn.Module):
    """Row t of the input becomes row t - 1."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


class MixingModule(SFTModule):
    """`ranks`: where the layer is broken."""

    def __init__(self, ranks: tuple[int, ...] = (0, 1), **options: Any) -> None:
        super().__init__(source(), optimizer=sgd, **options)
        self.broken_ranks = ranks

    def configure_model(self) -> None:
        made = self.policy is None
        super().configure_model()
        assert self.policy is not None
        if made:
            layer = self.policy.model.layers[1]
            inner = BeforeToken(layer.mlp) if self.trainer.global_rank in self.broken_ranks else Plain(layer.mlp)
            layer.mlp = inner


class Plain(BeforeToken):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def train(devices: int, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = MixingModule(**options)
    run = trainer(Metrics(), devices=devices, strategy=DTAStrategy())
    run.fit(module, Batches([make_batch(k) for k in range(2)]))
    assert module.engine.dense == (options.get("self_check") == "fallback")
    return parameters(module)


def train_one_broken_rank() -> bool:
    """Whether this rank fell back, where rank 1 alone is broken."""
    torch.manual_seed(0)
    module = MixingModule(ranks=(1,), self_check="fallback")
    run = trainer(Metrics(), devices=2, strategy=DTAStrategy())
    run.fit(module, Batches([make_batch(k) for k in range(2)]))
    return module.engine.dense
