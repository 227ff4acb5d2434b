"""Decoupled PPO: the trust region is around a proximal policy, another one than the sampler (AReaL, Fu et al. 2025,
eq. 5; Hilton et al. 2022)."""

from __future__ import annotations

from torch import Tensor

from app import checks
from modules.objectives.ppo_clip import ppo_clip
from modules.objectives.ratio import ratio_of


def decoupled_ppo(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float | None = 5.0,
    over_cap: str = "mask",
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss_t = -min(r_t A_t, clip(r_t) A_t) w_t, r_t = exp(logp_t - old_t), w_t = exp(old_t - behavior_t).

    Args:
        logprobs: [T], of the policy being trained, in nats.
        old: [T], of the proximal policy: `proximal` "recomputed" (the trainer's at the start of the batch; no extra
            pass with one optimizer step a batch) or "interpolated".
        behavior: [T], of the sampler.
        advantages: [T].
        clip_low, clip_high: as `ppo_clip`.
        weight_cap: largest w that is used as it is; None for no limit.
        over_cap: what becomes of tokens above it: "mask", their loss is 0, or "clamp", their w is the cap. Denominators
            count them either way.

    Returns:
        loss [T]; "clip_fraction"; "weight": w as used; "weight_cut": whether the cap changed it.
    """
    checks.one_of("objective_options.over_cap", over_cap, ("mask", "clamp"))
    checks.at_least(1, {"objective_options.weight_cap": weight_cap})
    losses, stats = ppo_clip(logprobs, old, advantages, clip_low, clip_high)
    weight = ratio_of(old, behavior)
    over = weight > weight_cap if weight_cap is not None else weight.new_zeros(weight.shape).bool()
    if weight_cap is not None:
        weight = weight.masked_fill(over, 0.0) if over_cap == "mask" else weight.clamp(max=weight_cap)
    return losses * weight, {**stats, "weight": weight, "weight_cut": over}
