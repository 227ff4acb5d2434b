"""Sampler against trainer: how far the log-probabilities an engine reported are from the policy's own.

With the same weights on both sides they should differ by rounding only; more is another kernel, another precision,
another chat template, or a bug. It can be told only on tokens of the version that the policy is at, which training
batches of an asynchronous run hardly have; held-out episodes, played at one pinned version, always do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.batch import RolloutBatch
from modules.regularisers import k3

MOST = 16
"""Sequences of a set of held-out prompts that are compared: one forward pass, whatever the size of the set."""


def sample(batch: RolloutBatch, version: int, most: int = MOST) -> RolloutBatch | None:
    """At most so many sequences with trained tokens that `version` sampled, evenly spaced; None without any."""
    of_token = torch.arange(len(batch)).repeat_interleave(batch.lengths())
    eligible = of_token[_current(batch, version)].unique()
    if not len(eligible):
        return None
    picks = torch.linspace(0, len(eligible) - 1, min(most, len(eligible)), dtype=torch.float64).round().long()
    return batch.select(eligible[picks])


def compare(batch: RolloutBatch, logprobs: Tensor, version: int) -> tuple[float, int, float]:
    """Of the trained tokens that `version` sampled: the sum of KL(sampler || policy) by k3 in nats, their number, and
    the largest |difference| in nats. `logprobs` float32 [T], the policy's."""
    chosen = _current(batch, version)
    behavior, now = batch.behavior_logprobs[chosen].double(), logprobs[chosen].double()
    return float(k3(behavior, now).sum()), int(chosen.sum()), float((now - behavior).abs().max())


def _current(batch: RolloutBatch, version: int) -> Tensor:
    return batch.loss_mask & (batch.versions == version)
