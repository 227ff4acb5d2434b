"""The other direction: KL(reference || policy), over the tokens that the reference finds likeliest."""

from __future__ import annotations

from torch import Tensor

from app import checks

LIKELIEST = 20


def forward_kl(soft: Tensor, teacher_soft: Tensor, k: int = LIKELIEST) -> Tensor:
    """Sum over the reference's `k` likeliest tokens of q (log q - log p): [T] -> [T], nats, where each trained token
    was drawn (Hinton et al. 2015; on the policy's own samples: Agarwal et al. 2024, their lambda 1).

    Every likely token pulls, also those that the policy never samples, where `kl` hears of sampled ones alone. What is
    left out is not made up for: the sum is the divergence up to the mass beyond the k tokens (metric `teacher_mass`
    says how much is within), and may be slightly negative. Its gradient by logits is mass x p - q on these tokens.

    Args:
        soft: [T], with gradient: sum of q log p over these tokens.
        teacher_soft: [T]: sum of q log q.
        k: how many tokens, read when the reference is asked; an SGLang server sends them, so large ones cost traffic.
    """
    checks.at_least(1, {"regularisers.forward_kl: k": k})
    return teacher_soft - soft
