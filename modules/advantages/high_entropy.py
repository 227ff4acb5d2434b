"""Credit for the tokens alone where the policy was undecided."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from app import checks
from app.batch import LEFT_OUT, BatchError, RolloutBatch
from app.functions import Choice, choose
from modules.advantages.grpo import dr_grpo, grpo
from modules.advantages.reward import reward
from modules.advantages.rloo import rloo
from modules.advantages.tree import tree

_OF_BATCHES = {f.__name__: f for f in (grpo, dr_grpo, rloo, reward, tree)}


def high_entropy(
    batch: RolloutBatch,
    entropy: Tensor,
    share: float = 0.2,
    estimator: str = "grpo",
    estimator_options: dict[str, Any] | None = None,
) -> Tensor:
    """Another estimator's advantages on the `share` of the batch's trained tokens whose entropy is highest, 0 on the
    others, which lose their part of the objective and keep it in its denominators (Wang et al. 2025, "Beyond the 80/20
    rule", eq. 5; regularisers see all tokens, as before).

    Args:
        entropy: [T], nats, of the policy at the start of the batch: a pass of its own, which `model.proximal:
            recomputed` shares with more than one step a batch.
        share: of the tokens, above 0 and below 1; the paper's is 0.2. Tokens that tie with the last one stay.
        estimator: grpo, dr_grpo, rloo, reward, tree; or the import path of a function of `batch` alone.
        estimator_options: of that function, by name.

    Returns:
        float32 [T], in the estimator's units. Episodes left out of training do not count among the tokens.

    Raises:
        ValueError: an option out of range, or no such estimator.
        BatchError: the estimator returned something else.
    """
    advantages = _estimator(share, estimator, estimator_options)({"batch": batch})
    if not isinstance(advantages, Tensor) or advantages.shape != entropy.shape:
        got = f"shape {tuple(advantages.shape)}" if isinstance(advantages, Tensor) else type(advantages).__name__
        raise BatchError(
            f"advantage_options: estimator={estimator}: expected a tensor of shape {tuple(entropy.shape)}, one a token,"
            f" got {got}"
        )
    taking_part = torch.tensor([LEFT_OUT not in one for one in batch.metadata])
    counted = batch.loss_mask & taking_part.repeat_interleave(batch.lengths())
    found = entropy[counted]
    if not len(found):
        return advantages
    kept = max(1, round(share * len(found)))
    least = found.kthvalue(len(found) - kept + 1).values
    return advantages.masked_fill(~(counted & (entropy >= least)), 0.0)


def is_of_ones_own(advantage: Choice) -> bool:
    """Whether these are the advantages of a function of one's own.

    Raises:
        ValueError: there is no such function, or an option is out of range.
    """
    if advantage.function is not high_entropy:
        return False
    given = {name: one.default for name, one in inspect.signature(high_entropy).parameters.items()} | advantage.options
    chosen = _estimator(given["share"], given["estimator"], given["estimator_options"])
    return chosen.function not in _OF_BATCHES.values()


def _estimator(share: float, estimator: str, options: dict[str, Any] | None) -> Choice:
    checks.positive({"advantage_options: share": share})
    if share >= 1:
        raise ValueError(
            f"advantage_options: share: {share}, must be below 1: for all tokens set advantage={estimator}"
        )
    return choose("advantage_options: estimator", estimator, options, _OF_BATCHES, ["batch"])
