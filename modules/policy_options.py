"""Checks of `PolicyModule`'s options that are not the algorithm's own.

Promises: an option out of range, or without effect, is an error that names it and says what to do.
"""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from modules.algorithm import Algorithm
from modules.model_source import ModelSource
from modules.objectives import AGGREGATIONS
from modules.reference import Refresh


def check_steps(minibatches: int, epochs: int) -> None:
    for name, value in (("minibatches", minibatches), ("epochs", epochs)):
        if value < 1:
            raise ValueError(f"{name}: must be at least 1, got {value}")


def check_groups(minibatches: int, data: Any) -> None:
    """`data`: the datamodule, which may say how many groups a batch holds."""
    option, groups = getattr(data, "groups_per_batch", ("", minibatches))
    if minibatches > groups:
        raise ValueError(
            f"minibatches: {minibatches}, but data.{option}: {groups} groups a batch, which stay whole: set minibatches"
            f" to {groups} at most, or raise data.{option}"
        )


def check_proximal(proximal: str, steps_per_batch: int) -> None:
    if proximal == "interpolated" and steps_per_batch == 1:
        raise ValueError(
            "proximal=interpolated with minibatches=1 and epochs=1: in the only step of a batch the proximal policy is"
            " the policy itself, exactly and without a pass, which an interpolation would replace by a guess: set"
            " proximal to recomputed, or minibatches or epochs above 1"
        )


def check_aggregation(mode: str, constant: float | None) -> None:
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation: '{mode}' is not one of {', '.join(AGGREGATIONS)}")
    if mode == "constant" and (constant is None or not 0 < constant < math.inf):
        raise ValueError(f"aggregation=constant needs aggregation_constant above 0 (tokens), got {constant}")
    if mode != "constant" and constant is not None:
        raise ValueError(f"aggregation_constant has no effect with aggregation={mode}; remove it")


def note_aggregation(algorithm: Algorithm, given: str | None, mode: str) -> None:
    """A line for those who name half of Dr.GRPO."""
    if algorithm.advantage is not None and algorithm.advantage.name == "dr_grpo" and given is None:
        rank_zero_warn(
            f"advantage=dr_grpo is half of Dr.GRPO: aggregation is {mode}, the paper's is constant (with"
            " aggregation_constant, the longest answer in tokens); naming an aggregation silences this line"
        )


def check_reference(
    algorithm: Algorithm, reference: ModelSource | str | None, refresh: Refresh | None, offload: bool, has_critic: bool
) -> None:
    if isinstance(reference, str) and reference != "initial":
        raise ValueError(f"reference: '{reference}' is neither 'initial' nor a model; write reference: {{path: DIR}}")
    if "reference" in algorithm.needs and reference is None:
        raise ValueError(
            f"reference is missing: {_readers(algorithm)} compares the policy with one; set reference to 'initial' or"
            " to a model"
        )
    if "reference" not in algorithm.needs and reference is not None:
        raise ValueError(
            "reference has no effect: neither the objective nor a regulariser reads it; name regularisers: [{name: kl,"
            " coef: ...}], or remove reference"
        )
    for key, given in (("reference_refresh", refresh is not None), ("reference_offload", offload)):
        if given and reference is None:
            raise ValueError(f"{key} has no effect without a reference; set one, or remove {key}")
    if "values" in algorithm.needs and not has_critic:
        raise ValueError(
            f"advantage={algorithm.advantage.name if algorithm.advantage else ''} needs a critic: set class_path to"
            " modules.ActorCriticModule"
        )


def _readers(algorithm: Algorithm) -> str:
    costs = [choice for _, choice in algorithm.loss_costs + algorithm.reward_costs]
    return " and ".join(c.name for c in (algorithm.objective, *costs) if "reference" in c.needs)
