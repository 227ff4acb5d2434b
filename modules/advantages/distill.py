"""Every token's own reward as its advantage: on-policy distillation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from app.batch import RolloutBatch
from modules.advantages.grpo import grpo
from modules.advantages.statistics import Over


def distill(batch: RolloutBatch, token_rewards: Tensor, task: float = 0.0, std: Over = "none") -> Tensor:
    """A_t = token_rewards_t + task x A, what a token earns by itself, without what comes after it, and a share of the
    episode's group-relative advantage.

    With the regulariser `kl` (estimator k1) in the reward and the teacher as `reference`, the policy gradient is that
    of the reverse divergence from the teacher, token by token, on what the policy itself samples (Agarwal et al. 2024,
    "On-policy distillation of language models", with their lambda 1; Lu et al. 2025, "On-policy distillation").

    Args:
        token_rewards: [T], read on trained tokens.
        task: weight of the episodes' rewards, at least 0; 0 learns from the teacher alone, and takes groups of one.
        std: as for `grpo`, of the share that the task has.

    Returns:
        float32 [T], in nats with coef 1; 0 on tokens that are not trained.
    """
    if not 0 <= task < math.inf:
        raise ValueError(f"advantage_options.task: {task}, must be a finite number of at least 0")
    advantages = token_rewards.float()
    if task > 0:
        advantages = advantages + task * grpo(batch, std=std)
    return torch.where(batch.loss_mask, advantages, 0.0)
