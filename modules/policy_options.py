"""Checks of `PolicyModule`'s options that are not the algorithm's own.

Promises: an option out of range, or without effect, is an error that names it and says what to do.
"""

from __future__ import annotations

from modules.algorithm import Algorithm
from modules.model_source import ModelSource
from modules.objectives import AGGREGATIONS
from modules.reference import Refresh


def check_steps(minibatches: int, epochs: int) -> None:
    for name, value in (("minibatches", minibatches), ("epochs", epochs)):
        if value < 1:
            raise ValueError(f"{name}: must be at least 1, got {value}")


def check_aggregation(mode: str, constant: float | None) -> None:
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation: '{mode}' is not one of {', '.join(AGGREGATIONS)}")
    if mode == "constant" and (constant is None or constant <= 0):
        raise ValueError(f"aggregation=constant needs aggregation_constant above 0 (tokens), got {constant}")
    if mode != "constant" and constant is not None:
        raise ValueError(f"aggregation_constant has no effect with aggregation={mode}; remove it")


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
