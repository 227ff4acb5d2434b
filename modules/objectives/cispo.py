"""Clipped importance weights on a policy gradient (CISPO, MiniMax-M1, 2025, eqs. 4 and 5)."""

from __future__ import annotations

from torch import Tensor

from modules.objectives.ratio import check_clip, ratio_of


def cispo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    clip_low: float | None = None,
    clip_high: float = 4.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss_t = -stopgrad(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t logp_t: no token ever loses its gradient.

    Args:
        logprobs, old, advantages: [T]; r_t = exp(logp_t - old_t).
        clip_low: None leaves the weight free below, as the paper does.
        clip_high: the weight is at most 1 + clip_high.

    Returns:
        loss [T]; "weight_clipped": whether the weight was; such a token teaches on, with the bound for its weight.
    """
    check_clip(clip_low, clip_high)
    ratio = ratio_of(logprobs, old).detach()
    weight = ratio.clamp(None if clip_low is None else 1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, {"weight_clipped": weight != ratio}
