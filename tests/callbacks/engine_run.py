"""A Trainer run that moves a real language model and serves it with a real engine; only the batches are made up."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from datamodules.inference.protocol import GenerationRequest, InferenceEngine
from tests.datamodules.inference.engine_suite import assert_parity, prompts_of
from tests.helpers.tiny_run import TinyData, TinyModule


class PolicyOnTrial(TinyModule):
    """Every step moves all trained parameters of `policy`."""

    def __init__(self, policy: Any, steps_per_batch: int = 1) -> None:
        super().__init__(steps_per_batch)
        self.policy = policy

    def training_step(self, handle: Any, batch_idx: int) -> torch.Tensor:
        self.step_seconds = {}
        self.policy_version += handle.index == handle.count - 1
        return sum(parameter.sum() for parameter in self.policy.parameters() if parameter.requires_grad)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.policy.parameters() if p.requires_grad], lr=0.02)


class EngineData(TinyData):
    """Three batches an epoch, and `engine`, started as `RolloutDataModule` does."""

    def __init__(self, engine: InferenceEngine, batches: int = 3) -> None:
        super().__init__(batches=batches, validate=False)
        self.engine: Any = engine

    def start(self, model: Any, version: int, *parts: Any) -> None:
        if not self.engine.health()["alive"]:
            self.engine.start(model, version, 1, *parts)

    def assert_serves(self, policy: Any, version: int) -> None:
        """What the engine samples now is of these weights, to 1e-5, and says so."""
        request = GenerationRequest(prompts_of([9])[0], 12)
        response = asyncio.run(self.engine.generate(request))
        assert set(response.versions) == {version}
        assert_parity({version: policy}, request, response, 1e-5)
