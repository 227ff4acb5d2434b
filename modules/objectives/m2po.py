"""Second-moment trust region (M2PO, Zheng et al. 2025, "Prosperity before collapse"; github.com/Infini-AI-Lab/M2PO)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from app import checks
from modules.objectives.ratio import check_above, check_clip, ratio_of
from modules.objectives.traits import traits

_NARROWEST = (0.3, 0.5)  # the authors' miniclip_low and miniclip_high


@traits(whole_step=True)
def m2po(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    threshold: float = 0.04,
    tokens: Literal["harmful", "all"] = "harmful",
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A trust region for very stale data, as wide as the second moment of the step's log-ratios, M2 = mean (log r_t)^2,
    allows: outliers are cut off, however far the whole batch has drifted.

    The paper and the authors' code differ in which tokens count:

    - "harmful", the code: tokens that push further out ((A > 0, r > 1) or (A < 0, r < 1)) and no others. tau is the cap
      on |log r| with which their M2 is `threshold`; loss_t = -min(r_t A_t, clip(r_t, e^-tau, e^tau) A_t), with no cap
      while M2 is below the threshold, and never a narrower range than [1 - clip_low, 1 + clip_high]. Tokens that would
      bring the policy back keep their gradient. (The code takes the largest |log r| of a token below that tau.)
    - "all", section 4 of the paper: loss_t = -M_t r_t A_t, without clipping; M drops as few tokens as it takes for M2
      of those kept to be at most `threshold`, the largest |log r| first, whatever their direction. Where the policy has
      drifted far these are also the corrections.

    Args:
        logprobs, old, advantages: [T]; r_t = exp(logp_t - old_t). mask: bool [T], all trained tokens of the step.
        threshold: tau_M2 of the paper, nats^2.
        tokens: which count.
        clip_low, clip_high: the narrowest range, with "harmful" only; None for the authors' 0.3 and 0.5.

    Returns:
        loss [T] (denominators count all trained tokens); "clip_fraction": whether a token lost its gradient.
    """
    check_above("threshold", threshold)
    checks.one_of("objective_options.tokens", tokens, ("harmful", "all"))
    log_ratio = (logprobs - old).detach().double()
    ratio = ratio_of(logprobs, old)
    if tokens == "all":
        if clip_low is not None or clip_high is not None:
            raise ValueError(
                "objective_options.clip_low and clip_high have no effect with tokens=all, which does not clip: remove"
                " them, or set tokens to harmful"
            )
        kept = _within(log_ratio.square(), mask, threshold)
        return -ratio * advantages * kept, {"clip_fraction": ~kept}
    low = _NARROWEST[0] if clip_low is None else clip_low
    high = _NARROWEST[1] if clip_high is None else clip_high
    check_clip(low, high)
    harmful = mask & (advantages * log_ratio > 0)
    cap = _cap(log_ratio.square(), harmful, threshold)
    bounds = (-cap).exp().clamp(max=1 - low).to(ratio), cap.exp().clamp(min=1 + high).to(ratio)
    free = ratio * advantages
    bounded = ratio.clamp(*bounds) * advantages
    return -torch.minimum(free, bounded), {"clip_fraction": bounded < free}


def _cap(squares: Tensor, counted: Tensor, threshold: float) -> Tensor:
    """Scalar t: the mean of min(squares, t^2) over the tokens `counted` is `threshold`; inf if it is less anyway."""
    ascending = torch.where(counted, squares, torch.zeros_like(squares)).sort()[0]  # the others change no sum
    sums, above = ascending.cumsum(0), torch.arange(len(squares), 0, -1, device=squares.device)
    budget = threshold * counted.sum()
    capped = sums - ascending + ascending * above  # the sum of min(squares, t^2) for t^2 each of them
    first = (capped < budget).sum()  # as t^2 rises, so does that sum
    at = first.clamp(max=len(squares) - 1)
    square = (budget - sums[at] + ascending[at]).clamp(min=0) / above[at]
    return torch.where(first < len(squares), square, torch.inf).sqrt()


def _within(squares: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """bool [T]: the largest set of tokens, the smallest squares first, whose mean is at most `threshold`."""
    squares = torch.where(mask, squares, torch.zeros_like(squares))
    order = squares.argsort(stable=True)  # tokens that are not trained come first, as zeros that change no sum
    trained = mask[order].cumsum(0)
    mean = squares[order].cumsum(0) / trained.clamp(min=1)
    # Running means of an ascending list ascend, so the kept tokens are the longest head within the threshold.
    kept = torch.zeros_like(mask)
    kept[order] = mean <= threshold
    return kept
