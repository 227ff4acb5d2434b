"""Soft clipping by a sigmoid gate (SAPO, Gao et al. 2025, "Soft adaptive policy optimization")."""

from __future__ import annotations

import torch
from torch import Tensor

from modules.objectives.ratio import check_above, ratio_of
from modules.objectives.traits import traits


@traits(aggregation="sequence_mean")
def sapo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, tau = tau_pos where A_t > 0, else tau_neg (eqs. 5 and 6).

    At r = 1 value and gradient are those of r A up to a constant; away from it the gradient fades smoothly, faster for
    larger tau. The default aggregation is "sequence_mean".

    Args:
        logprobs, old, advantages: [T]; r_t = exp(logp_t - old_t).

    Returns:
        loss [T]; "gate": 4 p (1 - p) with p the sigmoid, the share of the gradient that is left, in (0, 1].
    """
    for name, value in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        check_above(name, value)
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(logprobs)
    gate = torch.sigmoid(tau * (ratio_of(logprobs, old) - 1))
    return -4 / tau * gate * advantages, {"gate": 4 * gate * (1 - gate)}
