"""The naive dense reference: every sequence runs alone through the plain transformers model.

Nothing of `app.tree` is used. Log-probabilities are of softmax(logits / temperature); entropy and value at position t
belong to the distribution and the hidden state token t was drawn from (those of token t - 1); entry 0 and unscored
entries are 0.0. Everything stays in the model's dtype, except that log-probabilities of half precision are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass
class DenseOutput:
    """Columns of one sequence, [L] each; `values` is None without a value head."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None


LossFn = Callable[[Any, int], Tensor]


def dense_sequence(
    model: PreTrainedModel,
    tokens: Any,
    scored: Any = None,
    temperature: float = 1.0,
    head: nn.Module | None = None,
    inputs: dict[str, Any] | None = None,
) -> DenseOutput:
    """Outputs of one sequence, with graph when gradients are enabled; `inputs`: more arguments, pixels say."""
    ids = torch.as_tensor(tokens, dtype=torch.int64)
    result = model(input_ids=ids[None], use_cache=False, output_hidden_states=head is not None, **(inputs or {}))
    logits = result.logits[0, :-1]
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    log_softmax = torch.log_softmax(logits / temperature, dim=-1)
    mask = torch.ones(len(ids), dtype=torch.bool) if scored is None else torch.as_tensor(scored, dtype=torch.bool)

    def placed(column: Tensor) -> Tensor:
        """Position t - 1 of the model speaks about token t."""
        return torch.cat([column.new_zeros(1), torch.where(mask[1:], column, 0.0)])

    values = None
    if head is not None:
        values = placed(head(result.hidden_states[-1][0, :-1]).squeeze(-1))
    logprobs = log_softmax.gather(-1, ids[1:, None]).squeeze(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return DenseOutput(placed(logprobs), placed(entropy), values)


def dense_forward(
    model: PreTrainedModel,
    sequences: Sequence[Any],
    scored: Sequence[Any] | None = None,
    temperatures: Sequence[float] | None = None,
    head: nn.Module | None = None,
) -> list[DenseOutput]:
    return [
        dense_sequence(model, tokens, scored and scored[i], temperatures[i] if temperatures else 1.0, head)
        for i, tokens in enumerate(sequences)
    ]


def parameters(model: nn.Module, head: nn.Module | None = None) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, tied ones once."""
    named: Iterable[tuple[str, nn.Parameter]] = model.named_parameters()
    found = {name: p for name, p in named if p.requires_grad}
    if head is not None:
        found |= {f"value_head.{name}": p for name, p in head.named_parameters() if p.requires_grad}
    return found


def dense_backward(
    model: PreTrainedModel,
    sequences: Sequence[Any],
    loss_fn: LossFn,
    scored: Sequence[Any] | None = None,
    temperatures: Sequence[float] | None = None,
    head: nn.Module | None = None,
    inputs: Sequence[dict[str, Any]] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Summed loss and its gradients (zeros where a parameter has no part in it); `.grad` is not touched."""
    named = parameters(model, head)
    total = 0.0
    grads = {name: torch.zeros_like(p) for name, p in named.items()}
    for i, tokens in enumerate(sequences):
        temperature, given = temperatures[i] if temperatures else 1.0, inputs[i] if inputs else None
        loss = loss_fn(dense_sequence(model, tokens, scored and scored[i], temperature, head, given), i)
        total += float(loss.detach())
        if loss.requires_grad:
            for name, grad in zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True)):
                if grad is not None:
                    grads[name] += grad
    return total, grads


def relative_error(got: dict[str, Tensor | None], expected: dict[str, Tensor], floor: float = 0.0) -> tuple[float, str]:
    """Largest difference over all parameters, relative to the largest expected gradient (at least `floor`); and the
    parameter it is in."""
    largest = max(floor, *(float(grad.abs().max()) for grad in expected.values()))
    worst, where = 0.0, ""
    for name, want in expected.items():
        have = got.get(name)
        difference = want if have is None else have.to(want.dtype) - want
        error = float(difference.abs().max()) / (largest or 1.0)
        if not error <= worst:  # also when it is NaN
            worst, where = error, name
    return worst, where
