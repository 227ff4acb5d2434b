"""Importance ratios between trainer and sampler, by token or by sequence."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from app import checks
from modules.episodes import sequence_means, sequence_sums, spread_sequences
from modules.objectives.ratio import MAX_LOG_RATIO

Level = Literal["token", "sequence", "geometric"]


def importance_ratio(old: Tensor, behavior: Tensor, mask: Tensor, cu_seqlens: Tensor, level: Level) -> Tensor:
    """exp(old - behavior), [T]: of each "token"; of its whole "sequence" (the product over its trained tokens, which
    alone is unbiased, and varies more the longer answers are); or "geometric", the mean of the logarithms.

    Between e^-20 and e^20.
    """
    checks.one_of("correction_options.level", level, ("token", "sequence", "geometric"))
    log_ratio = old - behavior
    if level == "sequence":
        log_ratio = spread_sequences(sequence_sums(log_ratio, mask, cu_seqlens), cu_seqlens, len(old))
    elif level == "geometric":
        log_ratio = spread_sequences(sequence_means(log_ratio, mask, cu_seqlens), cu_seqlens, len(old))
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
