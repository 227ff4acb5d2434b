"""Calls of the functions of a loss: what they may return, and what is tried before training.

Promises: mistakes show in a function's first calls, on made-up tokens, and not in its numbers; one that never says the
same twice, by chance or by a state of its own, is not refused for that. A value that is not finite shows in gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from app.functions import Choice

_LENGTHS = (5, 8)  # tokens of the two sequences, the first of each not trained


def with_stats(result: Any, like: Tensor, choice: Choice) -> tuple[Tensor, dict[str, Tensor]]:
    """What a function returned: its values [T] and what it has logged, [T] each. Raises ValueError for other shapes."""
    value, stats = result if isinstance(result, tuple) else (result, {})
    return shaped(value, like, choice), {name: shaped(one, like, choice) for name, one in stats.items()}


def shaped(value: Any, like: Tensor, choice: Choice) -> Tensor:
    """`value`, which is to be of the shape of `like`. Raises ValueError."""
    if not isinstance(value, Tensor) or value.shape != like.shape:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{choice.name}: expected tensors of shape {tuple(like.shape)}, one a token, got {got}")
    return value


def marked(losses: Tensor, logprobs: Tensor) -> Tensor:
    """`losses` [T], whose gradient by `logprobs` [T] is not finite where they are not: by gradients all ranks know
    together that a step is to be skipped, and a value such as log(0) may have none. Others keep theirs to the bit."""
    return losses + 0 * losses.detach() * logprobs


def check_untrained(key: str, choice: Choice, values: Tensor, inputs: Mapping[str, Any]) -> None:
    """Raises ValueError where tokens that are not trained would make the loss of all nan: a weight of 0 makes
    nothing of what is not finite.

    Args:
        values: [T], what the function made of `inputs`.
    """
    mask, sources = inputs["mask"], [one for name in _TRAINED if (one := inputs[name]) is not None]
    weighed = (values * mask).sum()
    found = torch.autograd.grad(weighed, sources, retain_graph=True, allow_unused=True) if values.requires_grad else ()
    for one in (values.detach(), *(gradient for gradient in found if gradient is not None)):
        finite = torch.isfinite(one)
        if bool(finite[mask].all()) and not bool(finite.all()):
            raise ValueError(
                f"{key}: {choice.name} is not finite on tokens that are not trained, whose logprobs, entropy and"
                " advantages may be 0, so that the whole loss would be nan: ask for mask, and put numbers there by"
                " torch.where(mask, x, 1.0) in front of what fails at 0"
            )


def check_alone(key: str, choice: Choice, remedy: str) -> None:
    """Raises ValueError for a function that says of two sequences together another thing than of each alone: it is
    called once a chunk, and what is in a chunk is the planner's to say."""

    def called(inputs: Mapping[str, Tensor]) -> Tensor:
        return with_stats(choice(inputs), inputs["mask"], choice)[0].detach().double()[inputs["mask"]]

    whole, again = called(_sequences()), called(_sequences())
    if _same(whole, again) and not _same(whole, torch.cat([called(one) for one in _cut(_sequences())])):
        raise ValueError(
            f"{key}: {choice.name} says of two sequences together another thing than of each alone, so that the loss"
            f" would depend on how a step is cut into chunks and ranks: {remedy}"
        )


def _same(first: Tensor, second: Tensor) -> bool:
    """Where both are finite: what is not is told in training, as what it is."""
    finite = torch.isfinite(first) & torch.isfinite(second)
    return torch.allclose(first[finite], second[finite], rtol=1e-4, atol=1e-5)


_TRAINED = ("logprobs", "entropy", "soft")
_NEGATIVE = ("logprobs", "old", "behavior", "reference", "soft", "teacher_soft")


def _sequences() -> dict[str, Tensor]:
    """Two: all inputs that a chunk has, numbers such as in training, 0 on tokens that are not trained."""
    drawn = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, *_LENGTHS]).cumsum(0)
    mask = torch.ones(int(ends[-1]), dtype=torch.bool)
    mask[ends[:-1]] = False
    base = torch.rand(len(mask), generator=drawn)
    noise = {name: 0.2 * torch.rand(len(mask), generator=drawn) for name in (*_NEGATIVE, "entropy")}
    found = {name: (-0.5 - base - noise[name]) * mask for name in _NEGATIVE}
    found["entropy"] = (0.5 + base + noise["entropy"]) * mask
    found["advantages"] = torch.tensor([1.0, -0.5]).repeat_interleave(ends.diff()) * mask
    for name in _TRAINED:
        found[name].requires_grad_()
    return found | {"mask": mask, "cu_seqlens": ends}


def _cut(both: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    ends = both["cu_seqlens"].tolist()
    tokens = {name: value for name, value in both.items() if name != "cu_seqlens"}
    return [
        {name: value[begin:end] for name, value in tokens.items()} | {"cu_seqlens": torch.tensor([0, end - begin])}
        for begin, end in pairwise(ends)
    ]
