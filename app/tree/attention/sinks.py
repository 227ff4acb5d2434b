"""Attention sinks: a score per head that takes part in the softmax and has no value."""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [1, Hq, n, d] and log-sum-exp [1, Hq, n] of a softmax without sinks [Hq] -> with them."""
    if sinks is None:
        return out, lse
    merged = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (out * torch.exp(lse - merged).unsqueeze(-1)).to(out.dtype), merged


def grad_of_sinks(sinks: Tensor, lse: Tensor, grad: Tensor, out: Tensor) -> Tensor:
    """Gradient [Hq], given that of the output, the output and the log-sum-exp, sinks included."""
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)  # of the sink in every row's softmax
    return -(share * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
