"""Clipped policy-gradient objective, token level (PPO, Schulman et al. 2017, eq. 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from modules.objectives.ratio import check_above, check_clip, ratio_of


def ppo_clip(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """r_t = exp(logp_t - old_t); loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t).

    Args:
        logprobs: [T], of the policy being trained, in nats.
        old: [T], of the policy the update starts from; no gradient.
        advantages: [T], units of (normalised) reward.
        clip_low, clip_high: the ratio may move to 1 - clip_low and 1 + clip_high.
        dual_clip: c > 1: where A_t < 0 the loss is at most -c A_t, which a ratio far above 1 would exceed (dual clip,
            Ye et al. 2020, eq. 5). The paper uses 3.

    Returns:
        loss [T]; "clip_fraction": whether clipping cut a token's gradient off.
    """
    check_clip(clip_low, clip_high)
    if dual_clip is not None:
        check_above("dual_clip", dual_clip, 1.0)
    ratio = ratio_of(logprobs, old)
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    gain = torch.minimum(free, bounded)
    clipped = bounded < free
    if dual_clip is not None:
        floor = dual_clip * advantages
        cut = (advantages < 0) & (floor > gain)
        gain, clipped = torch.where(cut, floor, gain), clipped | cut
    return -gain, {"clip_fraction": clipped}
