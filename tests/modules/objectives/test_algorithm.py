"""Composition: names, import paths, costs in loss and reward, corrections; and everything that cannot be composed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.batch import CALL_REWARD, BatchError, RolloutBatch
from modules import Regulariser
from modules.algorithm import Algorithm, LossInputs, with_rewards
from modules.episodes import episode_prompts, episodes
from modules.objectives import OBJECTIVES, traits, traits_of
from modules.regularisers import LinearCoef
from tests.helpers.tiny_policy import make_batch, naive_grpo
from tests.modules.objectives.naive_objectives import random_case


def own_objective(logprobs: Tensor, advantages: Tensor, power: float) -> tuple[Tensor, dict[str, Tensor]]:
    return -advantages * logprobs * power, {"half": advantages / 2}


def own_advantage(batch: RolloutBatch, value: float = 0.0) -> Tensor:
    return torch.full((batch.num_tokens,), value)


def own_cost(mask: Tensor) -> Tensor:
    return mask.float() * 0.25


def too_short(logprobs: Tensor) -> Tensor:
    return logprobs[1:]


def detached(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -logprobs.detach() * advantages


def undefined_at_0(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -advantages.abs().log() * logprobs


def steep_at_0(entropy: Tensor) -> Tensor:
    return -entropy.abs().sqrt()


def centred(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    own = advantages[mask]
    return -logprobs * (advantages - own.mean()) / (own.std() + 1e-6)


def shares_of_all(old: Tensor, behavior: Tensor, mask: Tensor) -> Tensor:
    weights = (old - behavior).exp() * mask
    return weights / weights.sum() * mask.sum()


def below_mean(entropy: Tensor, mask: Tensor) -> Tensor:
    return torch.relu(entropy[mask].mean() - entropy)


def noisy(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -logprobs * advantages * torch.rand(())


def no_loss(logprobs: Tensor) -> Tensor:
    return torch.zeros_like(logprobs)


def in_place(logprobs: Tensor, advantages: Tensor) -> Tensor:
    advantages *= 2
    return -logprobs * advantages


def asks_for_more(logprobs: Tensor, gradient_of_the_moon: Tensor) -> Tensor:
    return logprobs * gradient_of_the_moon


def reward(logprobs: Tensor) -> Tensor:
    return logprobs


def reports(*names: str) -> Callable[..., Any]:
    """An objective that reports these."""

    def named(logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -advantages * logprobs, dict.fromkeys(names, advantages)

    return named


def centred_in_place(batch: RolloutBatch) -> Tensor:
    rewards = batch.rewards
    rewards -= rewards.mean()
    return rewards.repeat_interleave(batch.lengths())


def centred_by_numpy(batch: RolloutBatch) -> Tensor:
    rewards = batch.rewards.numpy()
    rewards -= rewards.mean()
    return torch.from_numpy(rewards).repeat_interleave(batch.lengths())


HERE = "tests.modules.objectives.test_algorithm"


def loss_inputs(inputs: dict[str, Tensor]) -> LossInputs:
    return LossInputs(**{name: value for name, value in inputs.items() if name != "turns"})  # for costs in the reward


@pytest.mark.parametrize("advantage", [centred_in_place, centred_by_numpy])
def test_an_advantage_that_writes_into_the_batch_is_refused(advantage: Callable[..., Any]) -> None:
    """The mean reward would be logged as 0."""
    batch = make_batch()
    with pytest.raises(BatchError, match=rf"advantage: {advantage.__name__} writes into batch.rewards, which metrics"):
        Algorithm(advantage=advantage).credit(batch, torch.zeros(batch.num_tokens))


def test_a_function_of_ones_own_by_import_path() -> None:
    algorithm = Algorithm(
        advantage=f"{HERE}.own_advantage",
        advantage_options={"value": 2.0},
        objective=f"{HERE}.own_objective",
        objective_options={"power": 3.0},
        regularisers=[Regulariser(f"{HERE}.own_cost", 1.0, where="reward")],
    )
    assert algorithm.metrics == ("half",) and algorithm.penalties == ("penalty/own_cost",)
    batch = make_batch()
    inputs = random_case(0).inputs()
    losses, stats = algorithm.losses(loss_inputs(inputs))
    torch.testing.assert_close(losses, -3 * inputs["advantages"] * inputs["logprobs"])
    torch.testing.assert_close(stats["half"], inputs["advantages"] / 2)
    credit = algorithm.credit(batch, torch.zeros(batch.num_tokens))
    assert torch.equal(credit, 2.0 * batch.loss_mask)


def test_a_correction_weighs_the_objective_and_costs_stand_beside_it() -> None:
    inputs = random_case(0).inputs()
    kl = [Regulariser("kl", 0.5, options={"estimator": "k2"}), Regulariser("entropy", 0.1)]
    plain, both = Algorithm(), Algorithm(regularisers=kl, correction="truncated", correction_options={"cap": 1.1})
    weights = (inputs["old"] - inputs["behavior"]).exp().clamp(max=1.1)
    losses, stats = both.losses(loss_inputs(inputs))
    torch.testing.assert_close(losses, plain.losses(loss_inputs(inputs))[0] * weights)
    torch.testing.assert_close(stats["correction_square"], weights**2)
    costs, names = both.costs(loss_inputs(inputs))
    torch.testing.assert_close(costs, 0.25 * (inputs["logprobs"] - inputs["reference"]) ** 2 - 0.1 * inputs["entropy"])
    assert set(names) == {"kl", "entropy"}
    assert both.metrics == ("clip_fraction", "correction_weight", "correction_square", "correction_cut", "kl")
    assert both.proximal == "recomputed" and plain.proximal == "sampler"


def test_a_correction_has_no_gradient() -> None:
    inputs = random_case(0).inputs()
    inputs["old"].requires_grad_()
    losses, _ = Algorithm(objective="reinforce", correction="masked").losses(loss_inputs(inputs))
    assert not losses.requires_grad


def test_costs_in_the_reward_reach_group_statistics_and_token_returns() -> None:
    batch = make_batch()
    algorithm = Algorithm(regularisers=[Regulariser("kl", 0.3, where="reward", options={"estimator": "k1"})])
    reference = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    inputs = {"logprobs": batch.behavior_logprobs, "reference": reference, "mask": batch.loss_mask}
    token_rewards, sums = algorithm.token_rewards(batch, {**inputs, "cu_seqlens": batch.cu_seqlens})
    expected = -0.3 * (batch.behavior_logprobs - reference) * batch.loss_mask
    torch.testing.assert_close(token_rewards, expected)
    assert sums == {"penalty/kl": pytest.approx(-float(expected.sum()), rel=1e-5)}

    before = batch.rewards.clone()
    shaped = with_rewards(batch, token_rewards)
    _, _, of_sequence = episodes(batch)
    for i in range(len(batch)):
        mine = (of_sequence == of_sequence[i]).repeat_interleave(batch.lengths())
        assert float(shaped.rewards[i]) == pytest.approx(float(before[i] + expected[mine].sum()), rel=1e-4)
    assert torch.equal(batch.rewards, before)  # what is logged as the reward is the reward
    credit = algorithm.credit(batch, token_rewards)
    naive = torch.tensor(naive_grpo(shaped)).repeat_interleave(batch.lengths())
    torch.testing.assert_close(credit, naive * batch.loss_mask, rtol=1e-4, atol=1e-5)

    per_token = Algorithm("reinforce_pp", regularisers=algorithm_costs())
    changed = per_token.credit(batch, token_rewards)
    assert not torch.equal(changed, per_token.credit(batch, torch.zeros_like(token_rewards)))


def test_rewards_of_calls_are_earned_where_the_call_ends() -> None:
    batch = make_batch()
    batch.metadata[1][CALL_REWARD] = 0.75
    last = int(batch.cu_seqlens[1]) + int(batch.loss_mask[batch.cu_seqlens[1] : batch.cu_seqlens[2]].nonzero()[-1])
    found, _ = Algorithm().token_rewards(batch, {})
    assert found.nonzero().tolist() == [[last]] and float(found[last]) == 0.75
    naive = torch.tensor(naive_grpo(with_rewards(batch, found))).repeat_interleave(batch.lengths())
    torch.testing.assert_close(Algorithm().credit(batch, found), naive * batch.loss_mask, rtol=1e-4, atol=1e-5)
    returns = Algorithm("gae", advantage_options={"whiten": False, "lam": 1.0})
    zeros = torch.zeros_like(found)
    no_values = {"values": zeros}
    more = returns.credit(batch, found, no_values).returns - returns.credit(batch, zeros, no_values).returns  # type: ignore[union-attr]
    begin = int(batch.cu_seqlens[1])
    inside = batch.loss_mask.clone()
    inside[last + 1 :] = inside[:begin] = False  # of this call, nothing behind it and nothing of others
    torch.testing.assert_close(more[inside], torch.full((int(inside.sum()),), 0.75))
    assert not more[last + 1 :].any()
    for wrong in (float("nan"), "1", True, 1e10):
        batch.metadata[1][CALL_REWARD] = wrong
        with pytest.raises(BatchError, match="call_reward of a sequence"):
            Algorithm().token_rewards(batch, {})


def test_an_episode_has_the_prompt_of_its_sequences() -> None:
    batch = make_batch()
    batch.prompt_ids = [f"prompt-{group}" for group in batch.group_ids.tolist()]
    rewards, _, of_sequence = episodes(batch)
    prompts = episode_prompts(batch, of_sequence)
    assert len(prompts) == len(rewards) < len(batch) and len(set(prompts)) > 1
    assert [prompts[episode] for episode in of_sequence.tolist()] == batch.prompt_ids


def algorithm_costs() -> list[Regulariser]:
    return [Regulariser("kl", 0.3, where="reward", options={"estimator": "k1"})]


def test_advantages_that_are_not_finite_or_of_another_shape() -> None:
    batch = make_batch()
    nan = Algorithm(advantage=lambda batch: torch.full((batch.num_tokens,), float("nan")))
    with pytest.raises(BatchError, match=r"advantage=<lambda>: not finite on a .* of sequence 0 \(prompt 'prompt-0'\)"):
        nan.credit(batch, torch.zeros(batch.num_tokens))
    short = Algorithm(advantage=lambda batch: torch.zeros(3))
    with pytest.raises(BatchError, match=r"advantage=<lambda>: expected shape \(\d+,\), one a token, got \(3,\)"):
        short.credit(batch, torch.zeros(batch.num_tokens))
    array = Algorithm(advantage=lambda batch: np.zeros(batch.num_tokens))
    with pytest.raises(BatchError, match=r"advantage=<lambda>: expected a tensor of shape \(\d+,\), got ndarray"):
        array.credit(batch, torch.zeros(batch.num_tokens))


KL_IN_REWARD = Regulariser("kl", 0.1, where="reward")


def test_a_regulariser_may_be_what_the_anchor_is_for() -> None:
    made = Algorithm(objective="reinforce", regularisers=[Regulariser("kl_weighted", 0.1)], proximal="recomputed")
    assert made.proximal == "recomputed" and "old" in made.needs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "gro"}, "advantage: no function 'gro'; name one of grpo, dr_grpo"),
        ({"advantage": "no.such.module"}, "advantage: no function 'no.such.module'"),
        ({"advantage": "modules.advantages"}, "advantage: 'modules.advantages' is a module, not a function"),
        ({"advantage_options": {"sd": True}}, "grpo: got an unexpected .* .sd. .it has mean, std, eps; its"),
        ({"advantage_options": {"batch": 1}}, "advantage_options: 'batch' is an input of grpo"),
        ({"advantage_options": {"std": "turn"}}, "advantage_options.std: 'turn', must be one of"),
        ({"objective": "ppo"}, "objective: no function 'ppo'; name one of ppo_clip"),
        ({"objective_options": {"clip_low": 2.0}}, "objective_options.clip_low: .*, must be between 0 and 1"),
        (
            {"objective": f"{HERE}.own_objective"},
            "objective_options: own_objective: missing a required argument: 'power'",
        ),
        ({"objective": f"{HERE}.detached"}, "objective: detached has no gradient, .*: make it of logprobs"),
        (
            {"objective": f"{HERE}.detached", "regularisers": [Regulariser("entropy", 0.1)]},
            "objective: detached has no gradient, .* or of zeros for the regularisers alone",
        ),
        ({"objective": no_loss}, "objective: no_loss has no gradient, .*detached$"),
        (
            {"objective": f"{HERE}.centred"},
            r"objective: centred says of two sequences .*: decorate .* @traits\(whole_step=True\) .* ask for groups",
        ),
        ({"correction": shares_of_all}, "correction: shares_of_all says of two sequences together another thing"),
        (
            {"regularisers": [Regulariser(below_mean, 0.1)]},
            "regularisers: below_mean says of two sequences .*: make it of each sequence alone, or set where: reward",
        ),
        (
            {"objective": f"{HERE}.undefined_at_0"},
            "objective: undefined_at_0 is not finite on tokens that are not trained",
        ),
        (
            {"regularisers": [Regulariser(f"{HERE}.steep_at_0", 0.1)]},
            "regularisers: steep_at_0 is not finite on tokens that are not trained",
        ),
        ({"objective": f"{HERE}.in_place"}, "one writes into its advantages, which other functions and later steps"),
        ({"objective": f"{HERE}.asks_for_more"}, "missing a required argument: 'gradient_of_the_moon'.*logprobs"),
        ({"objective": f"{HERE}.too_short"}, r"too_short: expected tensors of shape \(4,\), one a token, got .*\(3,\)"),
        ({"objective": "sft", "advantage": "rloo"}, "advantage has no effect with objective=sft"),
        ({"objective": "tba", "advantage_options": {}}, "advantage_options has no effect with objective=tba"),
        ({"objective": "dpo", "correction": "truncated"}, "correction has no effect on objective=dpo"),
        ({"objective": "decoupled_ppo", "correction": "truncated"}, "weighs by exp.* itself"),
        ({"objective": "sft", "regularisers": [KL_IN_REWARD]}, "where=reward has no effect with objective=sft"),
        ({"objective": "reinforce", "proximal": "recomputed"}, "proximal has no effect"),
        ({"correction": "truncated", "proximal": "sampler"}, "proximal=sampler makes every weight of the correction 1"),
        ({"objective": "decoupled_ppo", "proximal": "sampler"}, "every weight of objective=decoupled_ppo 1"),
        ({"proximal": "old"}, "proximal: 'old', must be one of sampler, recomputed, interpolated"),
        ({"correction": "clipped"}, "correction: no function 'clipped'; name one of truncated, masked"),
        ({"correction_options": {"cap": 2.0}}, "correction_options has no effect without a correction"),
        ({"regularisers": [Regulariser("kl", 0.0)]}, "regularisers.kl: coef=0 has no effect"),
        *(
            (
                {"regularisers": [Regulariser("kl", coef)]},
                f"regularisers.kl: coef={coef!r} must be a finite number above 0",
            )
            for coef in (-1.0, float("nan"), float("inf"), -float("inf"), True, "much")
        ),
        (
            {"objective_options": {"clip_high": float("inf")}},
            "objective_options: ppo_clip: clip_high=inf must be a finite",
        ),
        ({"objective_options": {"dual_clip": float("nan")}}, "dual_clip=nan must be a finite number"),
        ({"objective_options": {"clip_low": "0,2"}}, "clip_low='0,2' is str, must be float"),
        ({"objective_options": {"clip_low": True}}, "clip_low=True is bool, must be float"),
        ({"objective_options": {"dual_clip": "3"}}, "dual_clip='3' is str, must be float or null"),
        ({"advantage": "reinforce_pp", "advantage_options": {"gamma": float("nan")}}, "gamma=nan must be a finite"),
        ({"correction": "masked", "correction_options": {"high": float("inf")}}, "high=inf must be a finite"),
        ({"objective": reports("mine", "reward")}, "named: reports 'reward', a name by which the run reports another"),
        ({"objective": reports("taught")}, "named: reports 'taught', a name by which the run"),
        ({"objective": reports("routing/changed")}, "named: reports 'routing/changed', a name by which the run"),
        ({"objective": reports("correction_weight")}, "named: reports 'correction_weight', a name by which the run"),
        (
            {"objective": reports("correction_cut"), "correction": "truncated"},
            "truncated: reports 'correction_cut', a name by which named reports",
        ),
        ({"objective": reports("kl"), "regularisers": [Regulariser("kl", 0.1)]}, "kl: reports 'kl', .* by which named"),
        ({"regularisers": [Regulariser(f"{HERE}.reward", 0.1)]}, "reward: reports 'reward', .*its function's"),
        (
            {"objective": reports("penalty/kl"), "regularisers": [KL_IN_REWARD]},
            "kl: reports 'penalty/kl', a name by which named",
        ),
        (
            {"objective": reports("coef/kl"), "regularisers": [Regulariser("kl", LinearCoef(0.1, 0.0, 5))]},
            "named: reports 'coef/kl', a name by which the run",
        ),
        ({"regularisers": [Regulariser("kl", 0.1)] * 2}, "regularisers: kl is given twice in the loss"),
        ({"regularisers": [Regulariser("kl", 0.1, options={"estimator": "k1"})]}, "k1 is zero in expectation"),
        ({"regularisers": [Regulariser(f"{HERE}.own_cost", 0.1)]}, "own_cost has no gradient.*where: reward"),
        ({"regularisers": [Regulariser("entropy", 0.1, where="reward")]}, "entropy: missing a required argument"),
        (
            {"regularisers": [Regulariser("overlong", 1.0, where="reward")]},
            "regularisers.options: overlong: missing a required",
        ),
    ],
)
def test_what_cannot_be_composed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Algorithm(**options)


@pytest.mark.parametrize("correction", ["truncated", "masked"])
def test_a_correction_is_as_coarse_as_the_ratio(correction: str) -> None:
    def level(objective: str, **options: Any) -> Any:
        algorithm = Algorithm(objective=objective, correction=correction, correction_options=options or None)
        assert algorithm.correction is not None
        return algorithm.correction.options.get("level")

    assert (level("gspo"), level("gspo", level="token"), level("ppo_clip")) == ("geometric", "token", None)
    Algorithm(objective="gspo", correction=own_correction)  # has no levels


def own_correction(old: torch.Tensor, behavior: torch.Tensor) -> torch.Tensor:
    return (old - behavior).exp()


def test_numbers_of_numpy_are_numbers() -> None:
    """As sweeps sample them."""
    assert Algorithm(objective_options={"clip_low": np.float64(0.1)}).objective.options["clip_low"] == 0.1


def test_statistics_over_sequences_that_are_all_there() -> None:
    """Of an objective for whole steps, and of a cost in the reward; and what is never the same is not judged."""
    whole = traits(whole_step=True)(lambda logprobs, advantages, mask: centred(logprobs, advantages, mask))
    in_reward = Regulariser(lambda logprobs, mask: logprobs - logprobs[mask].mean(), 0.1, where="reward")
    made = Algorithm(objective=whole, regularisers=[in_reward], correction=shares_of_all)
    assert made.whole_step and made.reward_costs
    Algorithm(objective=noisy)
    Algorithm(objective=no_loss, regularisers=[Regulariser("entropy", 0.1)])  # which trains by these alone


@pytest.mark.parametrize("name", [name for name, one in OBJECTIVES.items() if not traits_of(one).whole_step])
def test_a_value_that_is_not_finite_is_a_gradient_that_is_not_and_others_keep_theirs(name: str) -> None:
    algorithm, case = Algorithm(objective=name), random_case(0)
    mark: list[Tensor] = []
    for function in (algorithm.objective, algorithm.losses):
        inputs = loss_inputs(case.inputs())
        inputs.logprobs = inputs.logprobs.detach().requires_grad_()
        given: Any = vars(inputs) if function is algorithm.objective else inputs
        result = function(given)
        losses = result[0] if isinstance(result, tuple) else result
        (found,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
        mark += [losses.detach(), found]
    assert torch.equal(mark[0], mark[2]) and torch.equal(mark[1], mark[3])


def test_a_cost_that_is_put_nowhere() -> None:
    with pytest.raises(ValueError, match="where: 'advantage', must be one of loss, reward"):
        Regulariser("kl", 1.0, where="advantage")  # type: ignore[arg-type]
