"""Second-moment trust region (M2PO, Zheng et al. 2025, "Prosperity before collapse")."""

from __future__ import annotations

import torch
from torch import Tensor

from modules.objectives.ratio import ratio_of
from modules.objectives.traits import traits


@traits(whole_step=True)
def m2po(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, threshold: float = 0.04
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss_t = -M_t r_t A_t, without clipping; M drops as few tokens of the step as it takes for the mean of
    (log r_t)^2 over those kept to be at most `threshold`, the largest first (section 4).

    Very stale data trains on: what is cut off are outliers, however far the whole batch has drifted by.

    Args:
        logprobs, old, advantages: [T]; r_t = exp(logp_t - old_t). mask: bool [T], all trained tokens of the step.
        threshold: tau_M2 of the paper.

    Returns:
        loss [T] (denominators count the dropped tokens); "clip_fraction": whether a token was dropped.
    """
    if not threshold > 0:
        raise ValueError(f"objective_options.threshold: must be above 0, got {threshold}")
    moment = (logprobs - old).detach().double().square()
    moment = torch.where(mask, moment, torch.zeros_like(moment))
    order = moment.argsort(stable=True)  # tokens that are not trained come first, as zeros that change no sum
    trained = mask[order].cumsum(0)
    mean = moment[order].cumsum(0) / trained.clamp(min=1)
    # Running means of an ascending list ascend, so the kept tokens are the longest head within the threshold.
    kept = torch.zeros_like(mask)
    kept[order] = mean <= threshold
    return -ratio_of(logprobs, old) * advantages * kept, {"clip_fraction": ~kept}
