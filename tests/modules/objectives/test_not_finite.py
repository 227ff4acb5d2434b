"""Numbers that are not finite on trained tokens are told as what they are: whose, where, and what can be done."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.batch import BatchError
from app.strategies import DTAStrategy
from app.strategies.divergence import Diverged
from modules import ActorCriticModule, ModelSource, PolicyModule, Regulariser
from modules.models import build_model
from modules.objectives import traits
from tests.helpers.tiny_policy import fit, make_batch, parameters, sgd, source


def no_gradient_where_nan(logprobs: Tensor, advantages: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Of chunks of more than two sequences, as the trials have."""
    nan = torch.log(torch.zeros_like(advantages)) * 0
    return nan if len(cu_seqlens) > 3 else -logprobs * advantages


def nan_beside(logprobs: Tensor, cu_seqlens: Tensor) -> Tensor:
    return logprobs * 0.1 + (torch.nan if len(cu_seqlens) > 3 else 0.0)


@traits(whole_step=True)
def of_whole_step(logprobs: Tensor, advantages: Tensor, cu_seqlens: Tensor) -> Tensor:
    return no_gradient_where_nan(logprobs, advantages, cu_seqlens)


@pytest.fixture
def broken(tmp_path: Path) -> ModelSource:
    model = build_model(source())
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 2] = torch.nan
    model.save_pretrained(tmp_path)
    return ModelSource(str(tmp_path))


def nan_but_in_the_trial(logprobs: Tensor, mask: Tensor) -> Tensor:
    return -logprobs if len(mask) == 4 else -logprobs * torch.nan


def test_a_reference_is_told_before_a_step(broken: ModelSource) -> None:
    module = PolicyModule(source(), optimizer=sgd, reference=broken, regularisers=[Regulariser("kl", 0.1)])
    where = r"is nan for token \d+ of sequence 0 \(prompt 'prompt-0'; \d+ trained tokens in all\)"
    with pytest.raises(BatchError, match=rf"model\.reference: the reference's log-probability {where}: .*float32"):
        fit(module, [make_batch()])


def test_so_are_values_and_what_rewards_are_made_of(broken: ModelSource) -> None:
    """They were told as an advantage, and as a cost, whose function was to be corrected."""
    with pytest.raises(BatchError, match=r"model\.critic .*: the critic's value is nan for token"):
        fit(ActorCriticModule(source(), critic=broken, optimizer=sgd), [make_batch()])
    with pytest.raises(BatchError, match=r"model\.model: the policy's entropy is nan for token"):
        fit(PolicyModule(broken, advantage="high_entropy", optimizer=sgd), [make_batch()])
    cost = Regulariser("kl", 0.1, "reward", {"estimator": "k1"})
    module = PolicyModule(broken, optimizer=sgd, reference=source(), regularisers=[cost])
    with pytest.raises(BatchError, match=r"model\.model: the policy's log-probability is nan for token"):
        fit(module, [make_batch(recorded=False)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            r"parameter 'policy\.model\.layers\.1\.mlp\.up_proj\.weight' is not .*model\.model: the policy's log-p",
        ),
        ({"objective": nan_but_in_the_trial}, r"objective=nan_but_in_the_trial is not finite on trained tokens whose"),
        (
            {"regularisers": [Regulariser(nan_but_in_the_trial, 0.1)]},
            r"regularisers\.nan_but_in_the_trial is not finite on trained tokens whose .*: correct the function",
        ),
    ],
)
def test_what_no_step_got_over_is_no_divergence(broken: ModelSource, options: dict[str, Any], message: str) -> None:
    model = source() if options else broken
    module = PolicyModule(model, optimizer=sgd, self_check="skip", **options)
    with pytest.raises(Diverged, match=rf"^no step could be trained: .*{message}.*begin again$"):
        fit(module, [make_batch(k) for k in range(4)], strategy=DTAStrategy(max_skipped_steps=2))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"objective": no_gradient_where_nan}, "objective=no_gradient_where_nan"),
        ({"objective": of_whole_step}, "objective=of_whole_step"),
        ({"regularisers": [Regulariser(nan_beside, 0.1)]}, r"regularisers\.nan_beside"),
    ],
)
def test_a_loss_that_is_not_finite_costs_its_step_though_its_gradient_be(options: dict[str, Any], named: str) -> None:
    strategy, module = DTAStrategy(), PolicyModule(source(), optimizer=sgd, self_check="skip", **options)
    module.configure_model()
    before = {name: one.clone() for name, one in parameters(module).items()}
    with pytest.warns(UserWarning, match=f"step 1: {named} is not finite on trained tokens"):
        steps = fit(module, [make_batch(k) for k in range(2)], strategy=strategy)
    assert strategy.skipped_steps == 2 and all(math.isnan(step["loss"]) for step in steps)
    assert all(torch.equal(before[name], one) for name, one in parameters(module).items())
    with pytest.raises(ValueError, match="the gradient norm of step 1 is nan: this strategy cannot leave a step out"):
        fit(PolicyModule(source(), optimizer=sgd, self_check="skip", **options), [make_batch()])
