"""Divergence from a reference policy, estimated from samples of p: KL(p || q), one value a token, in nats (Schulman,
"Approximating KL divergence", 2020).

k1 is unbiased and may be negative; k2 is biased and never negative; k3 is unbiased and never negative. As a loss k1 is
useless, the expectation of its gradient being zero; k2's gradient is that of the divergence when p sampled; k3's is
that of KL(q || p). k3 keeps log(q / p) within -20 and 20, beyond which it is constant and has no gradient; k1 and k2
have no bound.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from app import checks
from modules.objectives.ratio import MAX_LOG_RATIO, ratio_of


def kl(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """KL(policy || reference): [T] -> [T], nats. `estimator` "k1" makes sense in the reward only."""
    checks.one_of("regularisers.kl: estimator", estimator, ESTIMATORS)
    return ESTIMATORS[estimator](logprobs, reference)


def kl_weighted(logprobs: Tensor, reference: Tensor, old: Tensor) -> Tensor:
    """k3 x exp(logp - old): [T] -> [T], nats; unbiased also in its gradient where `old` sampled (DeepSeek-V3.2, 2025,
    eq. 7), which k3 alone, weighing tokens by how likely they were, is not. Both log-ratios within -20 and 20."""
    return k3(logprobs, reference) * ratio_of(logprobs, old)


def k1(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """log p - log q: [T] -> [T]."""
    return p_logprobs - q_logprobs


def k2(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: [T] -> [T]."""
    return 0.5 * (p_logprobs - q_logprobs) ** 2


def k3(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """q / p - 1 - log(q / p): [T] -> [T], with log(q / p) within -20 and 20."""
    log_ratio = (q_logprobs - p_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
