"""A policy whose second layer works on the token before, whichever sequence that is of: only alone is a sequence
computed right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from app.batch import RolloutBatch
from app.strategies import DTAStrategy
from modules import PolicyModule, SFTModule, build_model
from modules.algorithm import Regulariser
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


class MixingPolicy(PolicyModule):
    """Has a reference and an anchor. `found`: after each `prepare`, whether the engine runs densely, and how far both
    columns are from the model's own forward of each sequence; nothing moves, so both are of the same weights."""

    def __init__(self, **options: Any) -> None:
        kl = Regulariser("kl", 0.1)
        super().__init__(source(), optimizer=lambda params: torch.optim.SGD(params, lr=0.0), reference="initial",
                         regularisers=[kl], proximal="recomputed", epochs=2, **options)  # fmt: skip
        self.found: list[tuple[bool, float]] = []

    def configure_model(self) -> None:
        if self.policy is None:
            self.policy = build_model(self.model_source)
            layer = self.policy.model.layers[1]
            layer.mlp = BeforeToken(layer.mlp)
        super().configure_model()

    @torch.no_grad()
    def prepare(self, batch: RolloutBatch) -> None:
        super().prepare(batch)
        alone = []
        for tokens in batch.sequences():
            logprobs = self.policy(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            alone.append(nn.functional.pad(logprobs.gather(1, tokens[1:, None])[:, 0], (1, 0)))
        errors = (torch.stack([batch.columns[name] for name in ("reference", "proximal")]) - torch.cat(alone)).abs()
        self.found.append((self.engine.dense, float(errors[:, batch.loss_mask].max())))


def train_one_broken_rank() -> bool:
    """Whether this rank fell back, where rank 1 alone is broken."""
    torch.manual_seed(0)
    module = MixingModule(ranks=(1,), self_check="fallback")
    run = trainer(Metrics(), devices=2, strategy=DTAStrategy())
    run.fit(module, Batches([make_batch(k) for k in range(2)]))
    return module.engine.dense
