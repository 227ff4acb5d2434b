"""DAPO's token objective (Yu et al. 2025, eq. 8): the upper clip is wider, so that rare tokens can become likely."""

from __future__ import annotations

from torch import Tensor

from modules.objectives.ppo_clip import ppo_clip


def dapo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.28
) -> tuple[Tensor, dict[str, Tensor]]:
    """`ppo_clip` with the paper's range; its token mean is the default aggregation.

    The paper's other parts have places of their own: the over-long penalty (eq. 13) is the regulariser `overlong`,
    dynamic sampling (eq. 11) the filter `datamodules.filters.NoSignal`, and it uses no KL term.

    Args, returns: as `ppo_clip`.
    """
    return ppo_clip(logprobs, old, advantages, clip_low, clip_high)
